"""turboquant_rvq's kernels: rotate, quantize twice and pack both streams in one pass, and back.

No array of codes is ever written: a vector's codes live in threadgroup memory until its words are made.  Each kernel
equals the plain functions of :mod:`vq_turboquant.rvq`, bit for bit.  Head size and lengths are run-time numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import mlx.core as mx

from vq_core.api import PrepareContext, Side
from vq_core.api.attend import Tile
from vq_core.codec.bits import words_for
from vq_core.kernels import Backend, Call, Case, Kernel, KernelOffer, Output, Snippet
from vq_turboquant import rvq
from vq_turboquant.kernels import vectors
from vq_turboquant.kernels.cases import DTYPES, packing
from vq_turboquant.scale import filled

WIDTHS = (1, 2, 3, 4)

QUANTIZE = f"""
for (uint i = lane; i < W; i += 32u) {{  // a number beyond the head size is 0
  const float y = i < D ? vq_mul(all[own + i], root) : 0.0f;
{vectors.count("first", "y", vectors.EDGES)}
  const float r = vq_sub(y, tables[{vectors.LEVELS}u + first]);
{vectors.count("second", "r", vectors.MORE_EDGES)}
  all[own + i] = float(first | second << 8u);
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
"""


def _pack_text(kind: str) -> str:
    turn = vectors.HADAMARD if kind == "hadamard" else vectors.turn("turning", "turning_low")
    return f"""
// x (B, H, n, D) -> codes and rest (B, H, n, W * bits / 32), scale (B, H, n, 1).
const uint D = x_shape[3], words = W * uint(bits) / 32u;
{"" if kind == "hadamard" else vectors.DENSE}
{vectors.PLACE}
{vectors.LOAD}
{turn}
{QUANTIZE}
{vectors.packed("codes", "w & 255u", "words")}
{vectors.packed("rest", "w >> 8u", "words")}
if (n < rows && lane == 0u) scale[row] = M(step);
"""


def _unpack_text(kind: str) -> str:
    turn = vectors.UNHADAMARD if kind == "hadamard" else vectors.turn("turning", "turning_low")
    return f"""
// codes and rest (N, H, n, words), scale (N, H, n, 1) -> x (N, H, n, D), D = head_dim.
const uint D = head_dim, words = codes_shape[3];
{"" if kind == "hadamard" else vectors.DENSE}
{vectors.PLACE}
const float root = sqrt(float(D)), unit = vq_div(1.0f, root), size = vq_mul(float(scale[row]), root);
for (uint i = lane; i < D; i += 32u) {{
  const uint first = {vectors.code("codes", "i")}, second = {vectors.code("rest", "i")};
  all[own + i] = vq_mul(vq_add(tables[{vectors.LEVELS}u + first], tables[{vectors.MORE_LEVELS}u + second]), unit);
}}
simdgroup_barrier(mem_flags::mem_threadgroup);
{turn}
for (uint i = lane; n < rows && i < D; i += 32u) x[row * D + i] = vq_mul(all[own + i], size);
"""


# ---- references: the method's own functions, with constants from the kernels' arrays


def arrays(state: rvq.State, undo: bool = False) -> tuple[mx.array, ...]:
    """What the kernels read besides the tokens: the rotation, and the tables."""
    tables = vectors.table(state.edges[0], state.levels[0], state.edges[1], state.levels[1])
    return (*vectors.rotation_arrays(state.rotation, undo), tables)


def constants_of(constants: Sequence[mx.array], dim: int, bits: int, W: int, dtype: str) -> rvq.State:
    """The state that a kernel's arrays are, for one direction."""
    *turning, tables = constants
    held = tables.reshape(4, 16)[:, : 2**bits]
    return rvq.State(
        bits,
        dim,
        dtype,
        vectors.rotation_of(turning),
        mx.zeros((W, 0)),
        (vectors.floats(held[0, :-1]), vectors.floats(held[2, :-1])),
        (held[1], held[3]),
    )


def _packed(x: mx.array, *constants: mx.array, bits: int, W: int, M: str, **rest: object) -> tuple[mx.array, ...]:
    state = constants_of(constants, x.shape[3], bits, W, M)
    rows = rvq.vq_pack(state, rvq.vq_encode(state, x))
    return rows["codes"], rows["rest"], rows["scale"]


def _unpacked(
    codes: mx.array, rest: mx.array, scale: mx.array, *constants: mx.array, bits: int, head_dim: int, **more: object
) -> tuple[mx.array]:
    state = constants_of(constants, head_dim, bits, codes.shape[3] * 32 // bits, "float32")
    return (rvq.vq_decode(state, {"codes": codes, "rest": rest, "scale": scale}),)


# ---- cases


def _packing(kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for x, bits, name in packing(kind, WIDTHS):
            dim, dtype = x.shape[3], vectors.metadata_dtype(vectors.name_of(x))
            given = {"bits": bits, "M": dtype, "W": filled(dim, bits), "rows": x.size // dim}
            yield Case((x, *arrays(state_of(bits, dim, dtype, kind))), given, name)

    return cases


def _unpacking(kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for case in _packing(kind)():
            given = case.parameters
            dim, bits, dtype = case.inputs[0].shape[3], given["bits"], given["M"]
            rows = _packed(*case.inputs, **given)
            constants = arrays(state_of(bits, dim, dtype, kind), undo=True)
            more = {"bits": bits, "head_dim": dim, "rows": given["rows"]}
            yield Case((*rows, *constants), more, case.name)

    return cases


@cache
def state_of(bits: int, dim: int, dtype: str, kind: str) -> rvq.State:
    """A state as ``vq_prepare`` makes it; the two tables of stage 2 in turns."""
    settings = rvq.Settings(rvq.BITS[bits - 1], ("laplace", "fitted")[dim // 16 % 2], kind)
    return rvq.vq_prepare(PrepareContext("keys", 1, dim, dim, dtype, seed=dim), settings)


# ---- the kernels


def _words(call: Call) -> tuple[int, ...]:
    return (*call.shapes["x"][:3], words_for(call.numbers["W"], call.parameters["bits"]))


def _check_packing(call: Call) -> str:
    x, given, W = call.shapes["x"], call.parameters, call.numbers["W"]
    if given["M"] != vectors.metadata_dtype(given["T"]):
        return f"scales of {given['T']} numbers are {vectors.metadata_dtype(given['T'])}, not {given['M']}"
    wrong = vectors.check(call, x[-1], x, "x") or _check_tables(call)
    if not wrong and filled(x[3], given["bits"]) != W:
        return f"W={W}: {x[3]} codes of {given['bits']} bits are filled up to {filled(x[3], given['bits'])}"
    return wrong


def _check_unpacking(call: Call) -> str:
    codes, rest, scale = (call.shapes[name] for name in ("codes", "rest", "scale"))
    dim, bits = call.numbers["head_dim"], call.parameters["bits"]
    wrong = vectors.check(call, dim, codes, "codes") or _check_tables(call)
    if wrong:
        return wrong
    if rest != codes or scale != (*codes[:3], 1) or codes[3] * 32 != filled(dim, bits) * bits:
        return f"codes {codes}, rest {rest} and scale {scale} do not fit {dim} numbers of twice {bits} bits"
    return ""


def _check_tables(call: Call) -> str:
    tables = call.shapes["tables"]
    return "" if tables == (vectors.TABLE,) else f"tables {tables} must be ({vectors.TABLE},)"


def _packer(kind: str) -> Kernel:
    return Kernel(
        name=f"turboquant_rvq_pack_{kind}",
        stands_for="encode+pack",
        body=_pack_text(kind),
        header=vectors.HELPERS[kind],
        inputs={"x": "T", **vectors.rotation_inputs(kind), "tables": "float32"},
        outputs={
            "codes": Output("uint32", _words),
            "rest": Output("uint32", _words),
            "scale": Output("M", lambda call: (*call.shapes["x"][:3], 1)),
        },
        parameters={"T": DTYPES, "M": ("float16", "float32"), "bits": WIDTHS},
        numbers=("W", "rows"),
        threads=vectors.threads,
        threadgroups=vectors.threadgroups,
        equals=_packed,
        cases=_packing(kind),
        check=_check_packing,
    )


def _unpacker(kind: str) -> Kernel:
    return Kernel(
        name=f"turboquant_rvq_unpack_{kind}",
        stands_for="decode",
        body=_unpack_text(kind),
        header=vectors.HELPERS[kind] + vectors.UNPACK,
        inputs={
            "codes": "uint32", "rest": "uint32", "scale": "M", **vectors.rotation_inputs(kind), "tables": "float32",
        },
        outputs={"x": Output("float32", lambda call: (*call.shapes["codes"][:3], call.numbers["head_dim"]))},
        parameters={"M": ("float16", "float32"), "bits": WIDTHS},
        numbers=("head_dim", "rows"),
        threads=vectors.threads,
        threadgroups=vectors.threadgroups,
        equals=_unpacked,
        cases=_unpacking(kind),
        check=_check_unpacking,
    )  # fmt: skip


PACK = {kind: _packer(kind) for kind in vectors.KINDS}
UNPACK = {kind: _unpacker(kind) for kind in vectors.KINDS}


def pack(state: rvq.State, x: mx.array, backend: Backend, **rest: object) -> dict[str, mx.array]:
    """What ``vq_encode`` and ``vq_pack`` do, in one launch."""
    given = {"bits": state.bits, "M": state.dtype, "W": state.codes, "rows": x.size // state.dim}
    made = PACK[vectors.kind_of(state.rotation)](x, *state.arrays, backend=backend, **given)
    return dict(zip(("codes", "rest", "scale"), made, strict=True))


def unpack(state: rvq.State, packed: Tile, backend: Backend, **rest: object) -> mx.array:
    """What ``vq_decode`` does, in one launch."""
    rows = [packed[name] for name in ("codes", "rest", "scale")]
    given = {"bits": state.bits, "head_dim": state.dim, "rows": rows[2].size}
    return UNPACK[vectors.kind_of(state.rotation)](*rows, *state.undoing, backend=backend, **given)[0]


OFFERS = (
    KernelOffer("encode+pack", tuple(PACK.values()), pack, vectors.declines),
    KernelOffer("decode", tuple(UNPACK.values()), unpack, vectors.declines),
)
KERNELS = (*PACK.values(), *UNPACK.values())


# ---- fused attention

NUMBERS = """
// Eight codes of either stream. Of each second code both parts lie side by side after one shift: a place in `sums`.
const uint every = EVERY, both = (1u << uint(2 * B)) - 1u;
VQ_UNROLL
for (int i = 0; i < N; ++i) {
  const int bit = c * B, at = (t + i) * W + bit / 32;
  uint a = codes[at] >> uint(bit & 31), b = rest[at] >> uint(bit & 31);
  if (B == 3 && (bit & 31) > 8) {
    a |= codes[at + 1] << uint(32 - (bit & 31));
    b |= rest[at + 1] << uint(32 - (bit & 31));
  }
  const uint even = (a & every) | (b & every) << uint(B), odd = (a >> uint(B) & every) | (b & every << uint(B));
  VQ_UNROLL
  for (int j = 0; j < 4; ++j) {
    u[i * 8 + 2 * j] = sums[even >> uint(2 * B * j) & both];
    u[i * 8 + 2 * j + 1] = sums[odd >> uint(2 * B * j) & both];
  }
}
"""


def snippet(state: rvq.State, side: Side) -> Snippet:
    """How fused attention reads eight numbers of a token."""
    tokens, words, bits = 2 if side == "keys" else 1, state.codes * state.bits // 32, state.bits
    every = sum((2**bits - 1) << (2 * bits * j) for j in range(4))  # each second code of eight
    return Snippet(
        "turboquant_rvq", tokens, 8, NUMBERS.replace("EVERY", f"{every}u"),
        "return vq_float2(float(scale[t]), 0.0f);", "token",
        constants={"sums": mx.pad(state.sums, (0, max(0, 8 - state.sums.size)))},
        integers={"N": tokens, "B": bits, "W": words},
        width=state.codes, prepare=state.prepare_query, finish=state.finish, signs=state.signs,
    )  # fmt: skip
