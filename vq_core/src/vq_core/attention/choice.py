"""Which tier serves a reading: the fused kernels where both sides have snippets and the shape fits, else plain MLX.

MLX compiles a kernel when its result is evaluated, far from the call, so each variant is run on a small cache of its
own before it is first used, and compared with dense float32 attention.
"""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.attention.view import CacheView, SideView
from vq_core.errors import PluginError, UnsupportedShapeError, VQError
from vq_core.kernels.kernel import Kernel
from vq_core.kernels.skeleton.gather import gather
from vq_core.kernels.skeleton.kernels import Pair, pair
from vq_core.kernels.skeleton.matrix_kernels import MatrixPair, matrix_pair
from vq_core.kernels.skeleton.portable import Pointer, Side
from vq_core.plugins.binding import PROBE_TOLERANCE, BoundSide

Dtypes = tuple[mx.Dtype, ...]


@attrs.frozen(eq=False)
class Fit:
    """What the portable skeleton can do for a pair of sides.

    Attributes:
        kernels: The kernels, ``None``: it cannot.
        backend: Where they run.
        why: Why it cannot.
        dense: The kernels that decode each side for long queries, ``None``: there are none.
        dense_why: Why there are none.
        sides: Both sides as the kernels see them.
        matrix: The kernels on tensor cores, ``None``: there are none.
        matrix_why: Why there are none.
    """

    kernels: Pair | None
    backend: Any
    why: str = ""
    dense: tuple[Kernel, Kernel] | None = None
    dense_why: str = ""
    sides: tuple[Side, ...] = ()
    matrix: MatrixPair | None = None
    matrix_why: str = ""


_lock = threading.RLock()
_fits: dict[Any, Fit] = {}
_proven: dict[Any, str] = {}
"""Variants that were run once, by kernel, backend and parameters: why each must not be used, mostly nothing."""


def fit(view: CacheView) -> Fit:
    """What serves the few queries of a decode step on a reading."""
    return fit_of(
        view.keys.bound, view.values.bound, view.keys.dtype, field_dtypes(view.keys), field_dtypes(view.values)
    )


def fit_of(keys: BoundSide, values: BoundSide, exact: mx.Dtype, key_fields: Dtypes, value_fields: Dtypes) -> Fit:
    """What serves two bound sides whose fields have these dtypes."""
    key = (keys, values, exact, key_fields, value_fields)
    found = _fits.get(key)
    if found is None:
        found = _fit(*key)
        if not latent(keys, values):  # that one is a side of its own at each reading
            _fits[key] = found
    return found


def told_of(keys: BoundSide, values: BoundSide, key_fields: Dtypes = (), value_fields: Dtypes = ()) -> tuple[str, str]:
    """What serves a decode step of two sides, for the report, or why plain operations do."""
    return _told(fit_of(keys, values, getattr(mx, keys.ctx.dtype), key_fields, value_fields))


def latent(keys: BoundSide, values: BoundSide) -> bool:
    """Whether the values are the keys' side, as latent attention reads it."""
    return values.ctx.side == keys.ctx.side


def require(tier: str, keys: BoundSide, values: BoundSide) -> None:
    """Raise :class:`UnsupportedShapeError` if a tier that was asked for by name cannot serve two sides."""
    found = fit_of(keys, values, getattr(mx, keys.ctx.dtype), (), ())
    if tier == "kernel" and found.kernels is None:
        raise not_served(tier, found.why)
    if tier == "matrix" and found.matrix is None:
        raise not_served(tier, found.matrix_why)


def not_served(tier: str, why: str) -> UnsupportedShapeError:
    """The error for a tier asked for by name."""
    return UnsupportedShapeError(f"attention={tier!r}: {why}; attention='auto' takes what there is")


def _told(found: Fit) -> tuple[str, str]:
    matrix_why = found.matrix_why or _failed(found.matrix and found.matrix.run)
    why = found.why or _failed(found.kernels and found.kernels.run)
    dense_why = found.dense_why or _failed(found.dense)
    long = f"prefill in tiles: {dense_why}" if dense_why else "prefill by decoding to a scratch"
    if found.matrix is not None and not matrix_why:
        masks = f"masks that are arrays by plain operations: {why}" if why else "masks that are arrays by the kernel"
        return f"matrix ({found.backend}): {found.matrix.run.name}; {masks}; {long}", ""
    if found.kernels is None or why:
        return "", why
    return f"kernel ({found.backend}): {found.kernels.run.name} (matrix: {matrix_why}); {long}", ""


def _failed(kernels: Any) -> str:
    """Why kernels failed when they were tried out, if they did."""
    return next((why for (kernel, *_), why in _proven.items() if why and kernel is kernels), "")


def field_dtypes(side: SideView) -> Dtypes:
    """Dtypes of the fields as stored, where a layout lets them widen; else nothing, for they are the layout's."""
    layout = side.bound.layout
    return tuple(side.pages.stored(f.name).dtype for f in layout.fields) if layout.widens and side.pages.count else ()


LATENT = "latent attention (MLA) reads the keys as values too, which no fused kernel does"


def _fit(keys: BoundSide, values: BoundSide, exact: mx.Dtype, key_fields: Dtypes, value_fields: Dtypes) -> Fit:
    if keys.backend is None:
        return Fit(None, None, keys.no_backend, dense_why=keys.no_backend, matrix_why=keys.no_backend)
    if latent(keys, values):
        return Fit(None, keys.backend, LATENT, dense_why=LATENT, matrix_why=LATENT)
    matrix, matrix_why = _matrix(keys, values, exact, (*key_fields, *value_fields))
    for side in (keys, values):
        if side.snippet is None:
            why = side.without_snippet
            return Fit(None, keys.backend, why, dense_why=why, matrix=matrix, matrix_why=matrix_why)
    sides = (_side(keys, key_fields, "k"), _side(values, value_fields, "v"))
    kernels, dense, why, dense_why = None, None, "", ""
    D, Dv, dtype = keys.ctx.key_dim, values.ctx.value_dim, name_of(exact)
    try:
        kernels = pair_of(keys, values, exact, key_fields, value_fields)
    except UnsupportedShapeError as error:
        why = str(error)
    try:
        dense = gather(sides[0], D, dtype), gather(sides[1], Dv, dtype)
    except UnsupportedShapeError as error:
        dense_why = str(error)
    return Fit(kernels, keys.backend, why, dense, dense_why, sides, matrix, matrix_why)


def _matrix(keys: BoundSide, values: BoundSide, exact: mx.Dtype, fields: Dtypes) -> tuple[MatrixPair | None, str]:
    """The kernels on tensor cores, or why there are none."""
    for side in (keys, values):
        if side.held is None or side.held.matrix is None:
            return None, f"{side.choice.label} holds its {side.ctx.side} in no form for tensor cores"
    assert keys.held is not None and values.held is not None
    if any(dtype == mx.float32 for dtype in fields):
        return None, "scales and zeros have been widened to float32"
    try:
        return matrix_pair(keys.held.matrix, values.held.matrix, name_of(exact)), ""
    except UnsupportedShapeError as error:
        return None, str(error)


def pair_of(
    keys: BoundSide, values: BoundSide, exact: mx.Dtype, key_fields: Dtypes = (), value_fields: Dtypes = ()
) -> Pair:
    """The kernels of two bound sides with snippets; see :func:`vq_core.kernels.skeleton.kernels.pair`."""
    assert values.snippet is not None
    if values.layout.block % values.snippet.tokens:
        # Zero times what a page held before is not zero where that is a NaN.
        raise UnsupportedShapeError(
            f"tiles of {values.snippet.tokens} tokens of values may lie across the end of what is stored, in blocks of "
            f"{values.layout.block}: give its snippet tiles of 1 token, or of a number that divides the block"
        )
    sides = _side(keys, key_fields, "k"), _side(values, value_fields, "v")
    return pair(*sides, keys.ctx.key_dim, values.ctx.value_dim, name_of(exact))


def _side(bound: BoundSide, dtypes: Dtypes, prefix: str) -> Side:
    snippet = bound.snippet
    assert snippet is not None
    fields = bound.layout.fields
    names = [name_of(d) for d in dtypes] or [f.dtype for f in fields]
    pointers = [Pointer(f.name, d, math.prod(f.shape), f.axis is None) for f, d in zip(fields, names, strict=True)]
    pointers += [Pointer(name, name_of(a.dtype)) for name, a in snippet.constants.items()]
    return Side(snippet, pointers, bound.layout.page, snippet.width or bound.ctx.head_dim, prefix)


def name_of(dtype: mx.Dtype) -> str:
    """A dtype's name as kernels have it."""
    name = str(dtype).removeprefix("mlx.core.")
    return "bool_" if name == "bool" else name


# ---- trying a variant out


def proven(view: CacheView, found: Fit, queries: mx.array, tier: str, rows: int, fallback: str) -> str:
    """Why the kernels that serve some queries must not be used; nothing if they may. Runs them once, on own tokens.

    Args:
        view, found: The reading and what serves it.
        queries: (B, H_q, L, D).
        tier: ``"matrix"``, ``"kernel"``, or ``"long"``: the kernels for long queries.
        rows: Of the kernel tier, query rows that a threadgroup takes at once.
        fallback: The policy's.

    Raises:
        PluginError: they fail, and ``fallback`` is not ``"warn"``.
    """
    kernel = {"matrix": found.matrix and found.matrix.run, "kernel": found.kernels and found.kernels.run}.get(
        tier, found.dense
    )
    key = (kernel, found.backend, tier, rows, queries.dtype, *_around(found, tier))
    reason = _proven.get(key)
    if reason is None or (reason and fallback != "warn"):  # what another cache goes on without is an error to this one
        with _lock:
            reason = _proven.get(key)
            if reason is None or (reason and fallback != "warn"):
                reason = _proven[key] = _try(view, found, queries.dtype, tier, rows, fallback)
    return reason


def _around(found: Fit, tier: str) -> tuple[Kernel | None, bool]:
    """What runs before and after a pass, which layers of one text may differ in: the merge; whether queries turn."""
    if tier == "matrix" and found.matrix is not None:
        return found.matrix.merge, found.matrix.signs[0] is not None
    if tier == "kernel" and found.kernels is not None:
        return found.kernels.merge, found.kernels.keys.snippet.signs is not None
    return None, False


LONG = 24
"""Queries of the trial of kernels for long ones."""


def _try(view: CacheView, found: Fit, dtype: mx.Dtype, tier: str, rows: int, fallback: str) -> str:
    from vq_core.attention.packed import attend

    small = _small(view)
    D = small.keys.dim
    q = _random(7, (1, small.heads, LONG, D) if tier == "long" else (1, small.heads * (rows or 3), 1, D), dtype)
    try:
        got = attend(small, q, scale=D**-0.5, tier="kernel" if tier == "long" else tier, trying=True)
        want = attend(small, q, scale=D**-0.5, tier="reference")
        mx.eval(got, want)
        a, b = np.array(got.astype(mx.float32)), np.array(want.astype(mx.float32))
        error = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)
        limit = 2e-2 if mx.bfloat16 in (dtype, small.keys.dtype) else PROBE_TOLERANCE
        reason = "" if error <= limit else f"differs from dense attention by {error:.2e}; at most {limit:.0e} is right"
    except VQError as error_:
        reason = str(error_)
    except Exception as error_:  # MLX's words for a text that does not compile
        reason = f"it does not run: {type(error_).__name__}: {error_}"
    if not reason:
        return ""
    pair_ = found.matrix if tier == "matrix" else found.kernels
    names = found.dense or () if tier == "long" or pair_ is None else [pair_.run]
    message = f"kernel {' and '.join(k.name for k in names)} on {found.backend}: {reason}"
    if fallback != "warn":
        raise PluginError(
            f"{message}; report it to the authors of {view.keys.bound.choice.label} and "
            f"{view.values.bound.choice.label}, or use attention='mlx', fallback='warn' or kernels='off'"
        )
    warnings.warn(f"{message}; plain operations do its work from now on", RuntimeWarning, stacklevel=3)
    return reason


def _small(view: CacheView) -> CacheView:
    """A cache of one row, some pages and some exact tokens, of the same methods and dtypes."""
    keys, values = view.keys, view.values
    tokens = math.lcm(keys.bound.layout.page, values.bound.layout.page)
    sides = []
    for seed, side in enumerate((keys, values)):
        H, D = view.heads, side.dim
        x = _random(seed, (1, H, tokens, D), side.dtype)
        exact = _random(seed + 3, (1, H, 5, D), side.dtype)
        sides.append(SideView(side.bound, _pages(side, x), exact, None))
    return CacheView(sides[0], sides[1], (0,), (tokens,), (5,))


def _pages(side: SideView, x: mx.array) -> Any:
    from vq_core.attention.pages import Pages

    layout, bound = side.bound.layout, side.bound
    positions = mx.arange(x.shape[2], dtype=mx.int32)[None]
    sequence = bound.start(x[:, :, : layout.block], positions[:, : layout.block])
    tile = dict(bound.pack(x, positions, sequence))
    depth = x.shape[2] // layout.page
    for field in layout.paged:
        a, axis = tile[field.name], 2 + (field.axis or 0)
        split = a.reshape(*a.shape[:axis], depth, field.shape[field.axis or 0], *a.shape[axis + 1 :])
        paged = mx.moveaxis(split, axis, 0).reshape(depth, a.shape[1], *field.shape)
        held = side.pages.stored(field.name).dtype if side.pages.count else paged.dtype
        tile[field.name] = mx.contiguous(paged.astype(held))
    return Pages(tile | dict(sequence), depth, depth, None)


def _random(seed: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    # numpy's generator: MLX's global random state belongs to the user.
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)
