"""One side's tokens as a dense array, by the method's snippet: packed pages, window and first tokens in their order.

For prefill: a bounded scratch that MLX's own attention reads, made in one launch and dropped again.
"""

from __future__ import annotations

import math
import threading

import mlx.core as mx

from vq_core.errors import PluginError, UnsupportedShapeError
from vq_core.kernels.kernel import Call, Kernel, Output
from vq_core.kernels.skeleton.kernels import MOST_ELEMENTS, short
from vq_core.kernels.skeleton.portable import TYPES, Side

THREADS = 128
NUMBERS = ("length", "regular", "depth", "before")

START = """
// A thread takes one tile of T packed tokens by C channels, or as much of the other tokens; neighbours lie along the
// channels, as the result does. Row b's tokens end at column `length`; what is before them is zero.
const uint B = rows_shape[0], H = exact_shape[1], width = exact_shape[2], first_width = sinks_shape[2];
const uint tiles = depth * {page}u / {T}u, others = before + width + first_width;
const uint across = {across}u, runs = (tiles + (others + {T}u - 1u) / {T}u) * across, every = B * H * runs;
const uint i = thread_position_in_grid.x;
if (i < every) {
  const uint above = i / runs, b = above / H, head = above - b * H, inner = i - above * runs, along = inner / across;
  const int packed = rows[b * 8u], first = rows[b * 8u + 1u], recent = rows[b * 8u + 2u], pad = rows[b * 8u + 3u];
  const int hidden = rows[b * 8u + 4u], c = int(inner - along * across) * {C};
"""


RUN = "template <class T> struct alignas(16) gather_run { T v[16 / sizeof(T)]; };"
"""Neighbours that are written at once."""


def body(side: Side, dim: int, dtype: str) -> str:
    """The kernel's text for head size ``dim``, a dense array of ``dtype``."""
    s, T, C, kind = side.snippet, side.snippet.tokens, side.snippet.channels, TYPES[dtype]
    units = s.units or (1.0,) * (T if side.prefix == "k" else C)
    table = ", ".join(f"{u!r}f" for u in units)
    token_map = channel_map = ""
    if s.per == "channel":
        channel_map = f"const float2 map = {side.call('affine', 't', 'c + j')};"
    elif s.per == "token":
        token_map = f"const float2 map = {side.call('affine', 't + i', 'c')};"
    number = f"vq_mul(u[i * {C} + j], UNIT[{'i' if side.prefix == 'k' else 'j'}])"
    stored = f"vq_add(vq_mul({number}, map.x), map.y)" if s.per else number
    outer, inner = (("j", C, channel_map), ("i", T, "")) if channel_map else (("i", T, token_map), ("j", C, ""))
    start, decoded, copied = START, DECODED, COPIED
    if C % (16 // WIDTHS[dtype]) or dim % C:  # tiles that are no whole runs
        decoded, copied = SCALAR, SCALAR_COPIED
    found = f"""
{start}
  if (along < tiles) {{
    const uint at = along * {T}u;
    {side.place(f"at / {side.page}u")}
    const int t = int(at - {side.prefix}_depth * {side.page}u), column = pad - hidden + first + int(at);
    VQ_LOCAL(float, u, {T * C});
    if (int(at) < packed) {{
      {side.call("numbers", "t", "c", "u")};
      const float UNIT[{len(units)}] = {{{table}}};
      VQ_UNROLL
      for (int {outer[0]} = 0; {outer[0]} < {outer[1]}; ++{outer[0]}) {{
        {outer[2]}
        VQ_UNROLL
        for (int {inner[0]} = 0; {inner[0]} < {inner[1]}; ++{inner[0]}) u[i * {C} + j] = {stored};
      }}
{decoded}
    }}
  }} else {{
    VQ_UNROLL
    for (uint k = 0u; k < {T}u; ++k) {{
      const uint other = (along - tiles) * {T}u + k;
      int column = -1;
      uint from = 0u, place = 0u;
      if (other < width) {{
        place = other;
        from = 1u;
        column = int(other) >= int(width) - recent ? int(length) - int(width) + int(other) : -1;
      }} else if (other < width + first_width) {{
        place = other - width;
        from = 2u;
        column = int(place) < first ? pad - hidden + int(place) : -1;
      }} else if (other < others) {{
        column = int(other - width - first_width);
        column = column < pad ? column : -1;
      }}
      if (column >= 0 && (from == 0u || column >= pad)) {{
        const uint out = (above * length + uint(column)) * {dim}u + uint(c);
        const uint own = (above * width + place) * {dim}u + uint(c);
        const uint old = (above * first_width + place) * {dim}u + uint(c);
{copied}
      }}
    }}
  }}
}}
"""
    names = ("page", side.page), ("T", T), ("C", C), ("across", -(-dim // C)), ("dim", dim), ("kind", kind)
    for name, value in (*names, ("wide", 16 // WIDTHS[dtype])):
        found = found.replace(f"{{{name}}}", str(value))
    return found


WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}
SCALAR = """
      VQ_UNROLL
      for (int i = 0; i < {T}; ++i) {
        VQ_UNROLL
        for (int j = 0; j < {C}; ++j) {
          if (int(at) + i < packed && column + i >= pad && c + j < {dim}) {
            y[(above * length + uint(column + i)) * {dim}u + uint(c + j)] = {kind}(u[i * {C} + j]);
          }
        }
      }
"""
DECODED = """
      VQ_UNROLL
      for (int i = 0; i < {T}; ++i) {
        if (int(at) + i < packed && column + i >= pad) {
          const uint out = (above * length + uint(column + i)) * {dim}u + uint(c);
          VQ_UNROLL
          for (uint k = 0u; k < {C}u / {wide}u; ++k) {
            gather_run<{kind}> some;
            VQ_UNROLL
            for (uint j = 0u; j < {wide}u; ++j) some.v[j] = {kind}(u[uint(i) * {C}u + k * {wide}u + j]);
            vq_view<gather_run<{kind}>>(y)[out / {wide}u + k] = some;
          }
        }
      }
"""
SCALAR_COPIED = """
        VQ_UNROLL
        for (uint j = 0u; j < {C}u; ++j) {
          if (uint(c) + j < {dim}u) {
            float found = 0.0f;
            if (from == 1u) found = float(exact[own + j]);
            if (from == 2u) found = float(sinks[old + j]);
            y[out + j] = {kind}(found);
          }
        }
"""
COPIED = """
        VQ_UNROLL
        for (uint k = 0u; k < {C}u / {wide}u; ++k) {
          gather_run<{kind}> some;
          if (from == 1u && vq_aligned<gather_run<{kind}>>(exact)) {
            some = vq_view<gather_run<{kind}>>(exact)[own / {wide}u + k];
          } else {
            VQ_UNROLL
            for (uint j = 0u; j < {wide}u; ++j) {
              float found = 0.0f;
              if (from == 1u) found = float(exact[own + k * {wide}u + j]);
              if (from == 2u) found = float(sinks[old + k * {wide}u + j]);
              some.v[j] = {kind}(found);
            }
          }
          vq_view<gather_run<{kind}>>(y)[out / {wide}u + k] = some;
        }
"""


_lock = threading.Lock()
_made: dict[str, tuple[Kernel, str]] = {}


def gather(side: Side, dim: int, dtype: str) -> Kernel:
    """The kernel for one side with exact tokens of a dtype.

    Raises:
        UnsupportedShapeError: the snippet's numbers are in a basis of their own.
    """
    if side.snippet.prepare is not None or side.snippet.finish is not None:
        raise UnsupportedShapeError(f"{side.snippet.name} stores its {side.prefix} side in a basis of its own")
    if side.page % side.snippet.tokens:
        raise UnsupportedShapeError(f"tiles of {side.snippet.tokens} tokens do not divide pages of {side.page}")
    kinds = "".join(short(p.dtype) for p in side.pointers)
    name, text = f"gather_{side.snippet.label}_{dim}_{short(dtype)}_{kinds}", body(side, dim, dtype)
    with _lock:
        known = _made.get(name)
        if known is None:
            known = _made[name] = (_kernel(name, text, side, dim, dtype), text)
    if known[1] != text:
        raise PluginError(f"two different snippets are called {side.snippet.label!r}: give each text its own name")
    return known[0]


def _kernel(name: str, text: str, side: Side, dim: int, dtype: str) -> Kernel:
    def shape(call: Call) -> tuple[int, ...]:
        return (call.shapes["rows"][0], call.shapes["exact"][1], call.numbers["length"], dim)

    def threadgroups(call: Call) -> tuple[int, int, int]:
        B, H, T = call.shapes["rows"][0], call.shapes["exact"][1], side.snippet.tokens
        others = call.numbers["before"] + call.shapes["exact"][2] + call.shapes["sinks"][2]
        runs = (call.numbers["depth"] * side.page // T + -(-others // T)) * -(-dim // side.snippet.channels)
        return (-(-B * H * runs // THREADS), 1, 1)

    def check(call: Call) -> str:
        if any(math.prod(s) >= MOST_ELEMENTS for s in (*call.shapes.values(), shape(call))):
            return f"{shape(call)} numbers: fewer than 2**32 are accepted"
        return ""

    arrays = {f"{side.prefix}_{p.name}": p.dtype for p in side.pointers}
    return Kernel(
        name=name,
        stands_for="decode",
        body=text,
        header="\n".join([RUN, side.snippet.header.strip(), side.header()]),
        inputs={"rows": "int32", "exact": dtype, "sinks": dtype, f"{side.prefix}_table": "int32"} | arrays,
        outputs={"y": Output(dtype, shape)},
        numbers=NUMBERS,
        threads=lambda call: (THREADS, 1, 1),
        threadgroups=threadgroups,
        equals=_not_here,
        cases=lambda: (),
        # A snippet's own arithmetic may be contracted on a GPU: within a last place of the dtype then.
        exact=False,
        tolerance={"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}[dtype],
        check=check,
    )


def _not_here(*inputs: mx.array, **parameters: object) -> list[mx.array]:
    """What is decoded only the bound method's own hooks can say."""
    raise PluginError("a decoding kernel is compared by what vq_core.attention.verifying.decoding makes of it")
