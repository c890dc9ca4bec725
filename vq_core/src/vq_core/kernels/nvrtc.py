"""Compiles kernels for CUDA without a GPU: NVIDIA's run-time compiler comes as a wheel.

The text is put into the function that ``mx.fast.cuda_kernel`` makes: the same names, the template arguments inside it,
so that what compiles here compiles there.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vq_core.errors import PluginError
from vq_core.kernels.gpu import declaration
from vq_core.kernels.kernel import Kernel

PACKAGES = "nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl"
ARCHITECTURE = "sm_90a"
CPP = {
    "bool_": "bool", "uint8": "uint8_t", "int8": "int8_t", "uint16": "uint16_t", "int16": "int16_t",
    "uint32": "uint32_t", "int32": "int32_t", "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float",
}  # fmt: skip
BEFORE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef signed char int8_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
struct vq_shape { int at[8]; __device__ int operator[](int i) const { return at[i]; } };
"""


def installed() -> bool:
    """Whether the compiler's wheels are there."""
    return _folder() is not None


def compile_for_cuda(kernel: Kernel, variant: Mapping[str, Any]) -> bytes:
    """Machine code of one variant.

    Raises:
        PluginError: the compiler is not installed, or its complaints about the text.
    """
    folder = _folder()
    if folder is None:
        raise PluginError(f"NVIDIA's run-time compiler is not installed: pip install {PACKAGES}")
    library = ctypes.CDLL(str(next(folder.glob("lib/libnvrtc.so*"))))
    program = ctypes.c_void_p()
    text = cuda_text(kernel, variant).encode()
    library.nvrtcCreateProgram(ctypes.byref(program), text, kernel.name.encode(), 0, None, None)
    options = [f"--gpu-architecture={ARCHITECTURE}", "--device-as-default-execution-space", "--std=c++17"]
    options += [f"--include-path={p}" for p in (folder / "include", folder / "include" / "cccl")]
    given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = library.nvrtcCompileProgram(program, len(options), given)
    try:
        if failed:
            raise PluginError(
                f"kernel {kernel.name} {dict(variant)} does not compile for CUDA:\n{_log(library, program)}"
            )
        size = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cuda_text(kernel: Kernel, variant: Mapping[str, Any]) -> str:
    """The function that MLX would make of a kernel."""
    made, kinds = declaration(kernel, "cuda"), kernel.kinds

    def typed(dtype: str) -> str:
        return CPP[str(variant.get(dtype, dtype))]

    takes = [
        f"const {typed(dtype)}* {name}, const vq_shape {name}_shape, const int {name}_ndim"
        for name, dtype in kernel.arguments.items()
    ]
    takes += [f"{typed(output.dtype)}* {name}" for name, output in kernel.outputs.items()]
    known = [
        f"using {name} = {typed(name)};"
        if kinds[name] == "dtype"
        else f"constexpr {kinds[name]} {name} = {_value(value)};"
        for name, value in variant.items()
    ]
    lines = [
        BEFORE,
        made["header"],
        f"__global__ void {kernel.name}({', '.join(takes)}) {{",
        *known,
        made["source"],
        "}",
    ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _folder() -> Path | None:
    try:
        found = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    for place in found.submodule_search_locations or [] if found else []:
        if list(Path(place).glob("lib/libnvrtc.so*")):
            return Path(place)
    return None


def _log(library: Any, program: Any) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")
