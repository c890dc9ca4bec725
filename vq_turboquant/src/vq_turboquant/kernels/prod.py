"""turboquant_prod's kernels: rotate, quantize, project what is left and pack in one pass, and back.

Each equals the plain functions of :mod:`vq_turboquant.prod`, bit for bit: the sketch's sums are exact, see
:mod:`vq_core.codec.projection`.  Keys of one bit have kernels of their own: there is nothing to rotate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import mlx.core as mx

from vq_core.api import PrepareContext
from vq_core.api.attend import Tile
from vq_core.codec.projection import HIGH, LOW, Projection
from vq_core.kernels import Backend, Call, Case, Kernel, KernelOffer, Output
from vq_turboquant import prod
from vq_turboquant.kernels import vectors
from vq_turboquant.kernels.cases import DTYPES, packing
from vq_turboquant.scale import filled

WIDTHS = (1, 2, 3)
"""Bits of a code."""
SKETCH = "sketch"
"""Kind of the kernels without codes, beside those of the rotations."""
KINDS = (*vectors.KINDS, SKETCH)
FACTOR, SCALE = 32, 33
"""Places in the table: of what a sum of signs is times, and of the scale of S."""

TURN = {
    "hadamard": (vectors.HADAMARD, vectors.UNHADAMARD),
    "haar": (vectors.turn("turning", "turning_low"),) * 2,
    SKETCH: ("", ""),
}

LEFT = f"""
  TERM = 0.0f;
  if (i < D) {{
    const float y = vq_mul(all[own + i], root);
{vectors.count("first", "y", vectors.EDGES)}
    const float r = vq_sub(y, tables[{vectors.LEVELS}u + first]);
    TERM = vq_mul(r, r);
    all[own + i] = vq_mul(r, unit);
    made[own + i] = float(first);
  }} else if (i < W) {{
    made[own + i] = 0.0f;
  }}
"""
RESIDUAL = f"""
const float unit = vq_div(1.0f, root);
{vectors.folded("left", LEFT)}
simdgroup_barrier(mem_flags::mem_threadgroup);
{vectors.packed("codes", "w", "words", "made")}
if (n < rows && lane == 0u) gap[row] = M({vectors.mean("left")});
"""

SIGNS = f"""
{vectors.split("D")}
for (uint j = lane; j < m; j += 32u) {{  // m is a multiple of 32: all lanes vote
{vectors.product("sketching", "sketching_low", "D", "m")}
  const uint word = simd_ballot(projected(whole, mixed, other, 1.0f) > 0.0f);
  if (n < rows && lane == 0u) sketch[row * (m / 32u) + j / 32u] = word;
}}
"""


def _pack_text(kind: str) -> str:
    coded = kind != SKETCH
    return f"""
// x (B, H, n, D) -> {"codes (B, H, n, W * bits / 32), gap (B, H, n, 1), " if coded else ""}sketch (B, H, n, m / 32),
// scale (B, H, n, 1).
const uint D = x_shape[3], m = sketching_shape[1]{", words = W * uint(bits) / 32u" if coded else ""};
{vectors.DENSE if coded else vectors.SPLIT}
{vectors.PLACE}
{vectors.LOAD}
{TURN[kind][0]}
{RESIDUAL if coded else ""}
{SIGNS}
if (n < rows && lane == 0u) scale[row] = M(step);
"""


def _unpack_text(kind: str) -> str:
    coded = kind != SKETCH
    decoded = f"""
  const uint which = {vectors.code("codes", "i")};
  all[own + i] = vq_mul(vq_add(tables[{vectors.LEVELS}u + which], vq_mul(vq_mul(float(gap[row]), factor), back)), unit);
"""
    return f"""
// {"codes (N, H, n, words), gap (N, H, n, 1), " if coded else ""}sketch (N, H, n, m / 32), scale (N, H, n, 1)
// -> x (N, H, n, D), D = head_dim.
const uint D = head_dim, m = sketching_shape[0]{", words = codes_shape[3]" if coded else ""};
{vectors.DENSE if kind == "haar" else ""}
{vectors.PLACE}
const float root = sqrt(float(D)), unit = vq_div(1.0f, root), size = vq_mul(float(scale[row]), root);
const float factor = tables[{FACTOR}], part = tables[{SCALE}] * {1 / HIGH!r}f;
for (uint i = lane; i < D; i += 32u) {{
  float high = 0.0f, low_part = 0.0f;  // sums of whole numbers: exact
  for (uint o = 0u; o < m / 32u; ++o) {{
    const uint word = sketch[row * (m / 32u) + o];
    for (uint k = 0u; k < 32u; ++k) {{
      const float f = sketching[(o * 32u + k) * D + i], s = sketching_low[(o * 32u + k) * D + i];
      high += (word >> k & 1u) != 0u ? f : -f;
      low_part += (word >> k & 1u) != 0u ? s : -s;
    }}
  }}
  const float back = vq_add(vq_mul(high, part), vq_mul(low_part, part * {1 / LOW!r}f));
  {decoded if coded else "all[own + i] = vq_mul(vq_mul(back, factor), unit);"}
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
{TURN[kind][1]}
for (uint i = lane; n < rows && i < D; i += 32u) x[row * D + i] = vq_mul(all[own + i], size);
"""


# ---- references: the method's own functions, with constants from the kernels' arrays


def arrays(state: prod.State, undo: bool = False) -> tuple[mx.array, ...]:
    """What the kernels read besides the tokens: rotation, sketch, tables."""
    sketch = (state.sketch.first, state.sketch.second)
    if not undo:
        sketch = (mx.contiguous(sketch[0].T), mx.contiguous(sketch[1].T))
    turning = vectors.rotation_arrays(state.rotation, undo) if state.rotation is not None else ()
    table = vectors.table(state.edges, state.levels, (state.factor, state.sketch.scale), ())
    return (*turning, *sketch, table)


def constants_of(constants: Sequence[mx.array], dim: int, bits: int, dtype: str, undo: bool) -> prod.State:
    """The state that a kernel's arrays are, for one direction."""
    *turning, high, low, tables = constants
    held = tables.reshape(4, 16)
    if not undo:
        high, low = high.T, low.T
    factor, scale = vectors.floats(held[2, :2])
    return prod.State(
        bits=bits,
        dim=dim,
        dtype=dtype,
        rotation=vectors.rotation_of(turning) if turning else None,
        sketch=Projection(high, high, low, scale),
        factor=factor,
        basis=high,
        edges=vectors.floats(held[0, : 2**bits - 1]),
        levels=held[1, : 2**bits],
    )


def packed(x: mx.array, *constants: mx.array, M: str, bits: int = 0, **rest: object) -> list[mx.array]:
    """What packing must give: codes, where there are some, sketch, scale and gap."""
    state = constants_of(constants, x.shape[3], bits, M, undo=False)
    rows = prod.vq_pack(state, prod.vq_encode(state, x))
    return [rows[name] for name in _fields(bits)]


def _unpacked(*given: mx.array, head_dim: int, bits: int = 0, **rest: object) -> tuple[mx.array]:
    names = _fields(bits)
    state = constants_of(given[len(names) :], head_dim, bits, "float32", undo=True)
    return (prod.vq_decode(state, dict(zip(names, given, strict=False))),)


def _fields(bits: int) -> tuple[str, ...]:
    return ("codes", "sketch", "scale", "gap") if bits else ("sketch", "scale")


# ---- cases


def _packing(kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for x, width, name in packing(kind if kind != SKETCH else "haar", (1, 2, 3, 4)):
            bits = 0 if kind == SKETCH else WIDTHS[width % 3]
            dim, dtype = x.shape[3], vectors.metadata_dtype(vectors.name_of(x))
            given = {"M": dtype, "rows": x.size // dim} | ({"bits": bits, "W": filled(dim, bits)} if bits else {})
            yield Case((x, *arrays(state_of(bits, dim, dtype, kind))), given, f"{name}, codes of {bits}")

    return cases


def _unpacking(kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for case in _packing(kind)():
            bits, dtype = case.parameters.get("bits", 0), case.parameters["M"]
            dim = case.inputs[0].shape[3]
            rows = packed(*case.inputs, **case.parameters)
            constants = arrays(state_of(bits, dim, dtype, kind), undo=True)
            given = {"head_dim": dim, "rows": case.parameters["rows"]} | ({"bits": bits} if bits else {})
            yield Case((*rows, *constants), given, case.name)

    return cases


@cache
def state_of(bits: int, dim: int, dtype: str, kind: str) -> prod.State:
    """A state as ``vq_prepare`` makes it; the two sketches in turns."""
    sketch = ("gaussian", "orthogonal")[dim // 16 % 2]
    settings = prod.Settings(bits + 1, sketch, "auto" if kind == SKETCH else kind)
    return prod.vq_prepare(PrepareContext("keys", 1, dim, dim, dtype, seed=dim), settings)


# ---- the kernels


def _words(call: Call) -> tuple[int, ...]:
    return (*call.shapes["x"][:3], call.numbers["W"] * call.parameters["bits"] // 32)


def _signs(call: Call) -> tuple[int, ...]:
    return (*call.shapes["x"][:3], call.shapes["sketching"][1] // 32)


def _one(call: Call) -> tuple[int, ...]:
    return (*call.shapes["x"][:3], 1)


def _check_packing(call: Call) -> str:
    x, given = call.shapes["x"], call.parameters
    if given["M"] != vectors.metadata_dtype(given["T"]):
        return f"scales of {given['T']} numbers are {vectors.metadata_dtype(given['T'])}, not {given['M']}"
    dim = x[-1]
    wrong = vectors.check(call, dim, x, "x") or check_constants(call, (dim, filled(dim, 1)))
    if not wrong and "bits" in given and call.numbers["W"] != filled(dim, given["bits"]):
        return (
            f"W={call.numbers['W']}: {dim} codes of {given['bits']} bits are filled up to {filled(dim, given['bits'])}"
        )
    return wrong


def _check_unpacking(call: Call) -> str:
    sketch, dim, bits = call.shapes["sketch"], call.numbers["head_dim"], call.parameters.get("bits", 0)
    wrong = vectors.check(call, dim, sketch, "sketch") or check_constants(call, (filled(dim, 1), dim))
    wanted = {"sketch": filled(dim, 1) // 32, "scale": 1}
    wanted |= {"codes": filled(dim, bits) * bits // 32, "gap": 1} if bits else {}
    for name, last in wanted.items():
        if not wrong and call.shapes[name] != (*sketch[:3], last):
            return f"{name} {call.shapes[name]} must be {(*sketch[:3], last)} for {dim} codes of {bits} bits and signs"
    return wrong


def check_constants(call: Call, shape: tuple[int, int]) -> str:
    """What is wrong with the sketch, whose parts have this shape, or with the tables."""
    wanted = {"sketching": shape, "sketching_low": shape, "tables": (vectors.TABLE,)}
    for name, one in wanted.items():
        if call.shapes[name] != one:
            return f"{name} {call.shapes[name]} must be {one}"
    return ""


def constant_inputs(kind: str) -> dict[str, str]:
    """A kind's arrays besides the tokens, and their dtypes."""
    turning = {} if kind == SKETCH else vectors.rotation_inputs(kind)
    return turning | {"sketching": "float32", "sketching_low": "float32", "tables": "float32"}


def header(kind: str) -> str:
    """Functions of a kind's kernels."""
    return vectors.HELPERS["haar"] + (vectors.HELPERS[kind] if kind == "hadamard" else "")


def _packer(kind: str) -> Kernel:
    coded = kind != SKETCH
    outputs = {"sketch": Output("uint32", _signs), "scale": Output("M", _one)}
    if coded:
        outputs = {"codes": Output("uint32", _words), **outputs, "gap": Output("M", _one)}
    return Kernel(
        name=f"turboquant_prod_pack_{kind}",
        stands_for="encode+pack",
        body=_pack_text(kind),
        header=header(kind),
        inputs={"x": "T", **constant_inputs(kind)},
        outputs=outputs,
        parameters={"T": DTYPES, "M": ("float16", "float32")} | ({"bits": WIDTHS} if coded else {}),
        numbers=("rows", "W") if coded else ("rows",),
        threads=vectors.threads,
        threadgroups=vectors.threadgroups,
        equals=packed,
        cases=_packing(kind),
        check=_check_packing,
    )


def _unpacker(kind: str) -> Kernel:
    coded = kind != SKETCH
    fields = {"sketch": "uint32", "scale": "M"}
    if coded:
        fields = {"codes": "uint32", **fields, "gap": "M"}
    return Kernel(
        name=f"turboquant_prod_unpack_{kind}",
        stands_for="decode",
        body=_unpack_text(kind),
        header=header(kind) + (vectors.UNPACK if coded else ""),
        inputs={**fields, **constant_inputs(kind)},
        outputs={"x": Output("float32", lambda call: (*call.shapes["sketch"][:3], call.numbers["head_dim"]))},
        parameters={"M": ("float16", "float32")} | ({"bits": WIDTHS} if coded else {}),
        numbers=("head_dim", "rows"),
        threads=vectors.threads,
        threadgroups=vectors.threadgroups,
        equals=_unpacked,
        cases=_unpacking(kind),
        check=_check_unpacking,
    )


PACK = {kind: _packer(kind) for kind in KINDS}
UNPACK = {kind: _unpacker(kind) for kind in KINDS}


def _kind(state: prod.State) -> str:
    return SKETCH if state.rotation is None else vectors.kind_of(state.rotation)


def pack(state: prod.State, x: mx.array, backend: Backend, **rest: object) -> dict[str, mx.array]:
    """What ``vq_encode`` and ``vq_pack`` do, in one launch."""
    given = {"M": state.dtype, "rows": x.size // state.dim}
    given |= {"bits": state.bits, "W": state.codes} if state.bits else {}
    made = PACK[_kind(state)](x, *state.arrays, backend=backend, **given)
    return dict(zip(_fields(state.bits), made, strict=True))


def unpack(state: prod.State, packed: Tile, backend: Backend, **rest: object) -> mx.array:
    """What ``vq_decode`` does, in one launch."""
    given = {"head_dim": state.dim, "rows": packed["scale"].size} | ({"bits": state.bits} if state.bits else {})
    rows = [packed[name] for name in _fields(state.bits)]
    return UNPACK[_kind(state)](*rows, *state.undoing, backend=backend, **given)[0]


OFFERS = (
    KernelOffer("encode+pack", tuple(PACK.values()), pack, vectors.declines),
    KernelOffer("decode", tuple(UNPACK.values()), unpack, vectors.declines),
)
KERNELS = (*PACK.values(), *UNPACK.values())
