// Everything that a kernel body of the dialect may use. See docs/kernels/dialect.md.
#pragma once
#include "types.h"
#include "numbers.h"
#include "elementary.h"
#include "vectors.h"
#include "scheduler.h"
#include "collectives.h"
#include "memory.h"
#include "shared_memory.h"
#include "matrix.h"
#include "control.h"
#include "launch.h"
