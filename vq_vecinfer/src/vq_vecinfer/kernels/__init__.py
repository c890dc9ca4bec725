"""VecInfer's kernels: nearest centroid and pack in one pass, and back.

Each equals the plain functions of :mod:`vq_vecinfer.method`, bit for bit.  Keys are smoothed, turned and centred in the
pass that encodes them; the mean of values, and what is undone of decoded keys, is plain operations.  Head size and
lengths are run-time numbers, and so are the bits of a code; sub and dtypes are compiled in.
"""

from __future__ import annotations

import math

import mlx.core as mx

from vq_core.api.attend import Tile
from vq_core.codec.bits import WORD
from vq_core.kernels import Backend, Call, Kernel, KernelOffer, Output
from vq_vecinfer import method
from vq_vecinfer.kernels import bodies
from vq_vecinfer.kernels.cases import dequantizing_cases, key_cases, quantizing_cases
from vq_vecinfer.kernels.query import QUERY
from vq_vecinfer.kernels.reference import BITS, DTYPES, SUBS, dequantized, quantized, quantized_keys

THREADS = 128
MOST = 2**31
"""Elements of one array: bodies count in 32 bits."""


def _threads(call: Call) -> tuple[int, int, int]:
    return (THREADS, 1, 1)


def _codes(call: Call) -> int:
    return math.prod(call.shapes["x"]) // int(call.parameters["sub"])


def _stored_codes(call: Call) -> int:
    return math.prod(call.shapes["codes"]) * WORD // call.numbers["bits"]


def _words(call: Call) -> tuple[int, ...]:
    B, H, n, D = call.shapes["x"]
    return (B, H, n * D // int(call.parameters["sub"]) * call.numbers["bits"] // WORD)


def _dense(call: Call) -> tuple[int, ...]:
    N, H, words = call.shapes["codes"]
    D, sub, bits = call.numbers["head_dim"], int(call.parameters["sub"]), call.numbers["bits"]
    return (N, H, words * WORD // bits * sub // D, D)


def _check_book(call: Call, places: int) -> str:
    """What is wrong with the codebook."""
    sub, count = int(call.parameters["sub"]), 2 ** call.numbers["bits"]
    book = call.shapes["codebook"]
    if len(book) != 3 or book[0] not in (1, places) or book[1:] != (count, sub):
        return f"codebook {book} must be (1 or {places}, {count}, {sub})"
    return ""


def _check_quantizing(call: Call) -> str:
    x, sub, bits = call.shapes["x"], int(call.parameters["sub"]), call.numbers["bits"]
    if bits not in BITS:
        return f"codes of {bits} bits: accepted are {', '.join(map(str, BITS))}"
    if len(x) != 4 or x[3] % sub or not x[3]:
        return f"x {x} must be (B, H, n, D), D a multiple of {sub}"
    if x[2] * x[3] // sub * bits % WORD:
        return f"{x[2]} tokens of {x[3] // sub} codes of {bits} bits fill no whole words"
    if math.prod(x) >= MOST or math.prod(x) // sub * bits >= 2 * MOST:
        return f"x {x} has {math.prod(x)} elements; fewer than {MOST}, and {2 * MOST} bits of codes, are accepted"
    wrong = _check_book(call, x[3] // sub)
    if not wrong and call.shapes["halves"] != call.shapes["codebook"][:2]:
        wrong = f"halves {call.shapes['halves']} must be {call.shapes['codebook'][:2]}"
    return wrong


def _check_keys(call: Call) -> str:
    wrong = _check_quantizing(call)
    if wrong:
        return wrong
    B, H, _, D = call.shapes["x"]
    if D not in method.HEAD_DIMS:
        return f"head size {D}: accepted are {', '.join(map(str, method.HEAD_DIMS))}"
    for name, shape in (("inverse", (H, D)), ("mean", (B, H, D))):
        got = call.shapes[name]
        if got != shape and (name == "inverse" or call.numbers["centred"]):
            return f"{name} {got} must be {shape}"
    return ""


def tokens_at_once(codes: int, bits: int) -> int:
    """Tokens of so many codes that a threadgroup takes: whole words, and 128 codes where more than one block is."""
    block = WORD // math.gcd(WORD, codes * bits)
    return block * max(1, THREADS // (block * codes))


def _key_groups(call: Call) -> int:
    B, H, n, D = call.shapes["x"]
    return max(1, -(-B * H * n // tokens_at_once(D // int(call.parameters["sub"]), call.numbers["bits"])))


def _check_dequantizing(call: Call) -> str:
    codes, D = call.shapes["codes"], call.numbers["head_dim"]
    sub, bits = int(call.parameters["sub"]), call.numbers["bits"]
    if sub > D or D % sub:
        return f"head size {D} is no multiple of {sub}"
    if len(codes) != 3 or codes[2] * WORD % (D // sub * bits):
        return f"codes {codes} are no whole tokens of {D // sub} codes of {bits} bits"
    if math.prod(codes) * WORD // bits * sub >= MOST or math.prod(codes) * WORD >= 2 * MOST:
        return f"codes {codes} are {MOST} numbers or more; fewer are accepted"
    return _check_book(call, D // sub)


QUANTIZE = Kernel(
    name="vecinfer_quantize",
    stands_for="encode+pack",
    body=bodies.QUANTIZE,
    inputs={"x": "T", "codebook": "float32", "halves": "float32"},
    outputs={"codes": Output("uint32", _words)},
    parameters={"T": DTYPES, "sub": SUBS},
    fixed=("sub",),
    numbers=("bits",),
    threads=_threads,
    threadgroups=lambda call: (max(1, -(-_codes(call) // THREADS)), 1, 1),
    equals=quantized,
    cases=quantizing_cases,
    check=_check_quantizing,
)
QUANTIZE_KEYS = Kernel(
    name="vecinfer_quantize_keys",
    stands_for="encode+pack",
    body=bodies.QUANTIZE_KEYS,
    header=bodies.HEADER,
    inputs={"x": "T", "inverse": "float32", "mean": "float32", "codebook": "float32", "halves": "float32"},
    outputs={"codes": Output("uint32", _words)},
    parameters={"T": DTYPES, "sub": SUBS},
    fixed=("sub",),
    numbers=("bits", "centred"),
    threads=_threads,
    threadgroups=lambda call: (_key_groups(call), 1, 1),
    equals=quantized_keys,
    cases=key_cases,
    check=_check_keys,
)
DEQUANTIZE = Kernel(
    name="vecinfer_dequantize",
    stands_for="decode",
    body=bodies.DEQUANTIZE,
    inputs={"codes": "uint32", "codebook": "float32"},
    outputs={"y": Output("float32", _dense)},
    parameters={"sub": SUBS},
    fixed=("sub",),
    numbers=("bits", "head_dim"),
    threads=_threads,
    threadgroups=lambda call: (max(1, -(-_stored_codes(call) // THREADS)), 1, 1),
    equals=dequantized,
    cases=dequantizing_cases,
    check=_check_dequantizing,
)


def pack(state: method.VecInfer, x: mx.array, sequence: Tile, backend: Backend, **rest: object) -> dict[str, mx.array]:
    """What ``vq_encode`` and ``vq_pack`` do, in one launch; values lose their mean before."""
    given = {"sub": state.sub, "bits": state.bits}
    if state.inverse is not None:
        mean = state.inverse if state.mean is None else sequence["mean"]  # it is not read without
        arrays = (x, state.inverse, mean, state.codebook, state.halves)
        given["centred"] = int(state.mean is not None)
        return {"codes": QUANTIZE_KEYS(*arrays, backend=backend, **given)[0]}
    y = x if state.mean is None else state.stored(x, sequence)
    return {"codes": QUANTIZE(y, state.codebook, state.halves, backend=backend, **given)[0]}


def unpack(state: method.VecInfer, packed: Tile, backend: Backend, **rest: object) -> mx.array:
    """What ``vq_decode`` does: one launch, then the transform of keys undone."""
    given = {"sub": state.sub, "bits": state.bits, "head_dim": state.head_dim}
    (y,) = DEQUANTIZE(packed["codes"], state.codebook, backend=backend, **given)
    return method.restored(state, y + packed["mean"][:, :, None] if state.mean is not None else y)


OFFERS = (
    KernelOffer("encode+pack", (QUANTIZE, QUANTIZE_KEYS), pack),
    KernelOffer("decode", (DEQUANTIZE,), unpack),
    KernelOffer("", (QUERY,)),
)
KERNELS = (QUANTIZE, QUANTIZE_KEYS, DEQUANTIZE)
