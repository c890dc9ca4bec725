"""A bound side in device form: the same method, its pages in the order that a device's kernels read.

The shell keeps, grows, cuts and counts pages by the form's layout; what is saved, and what the method's plain hooks
read, is the canonical order, made a tile at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.api.layout import Layout
from vq_core.errors import PluginError, VQError
from vq_core.kernels.device_form import DeviceForm
from vq_core.kernels.skeleton.snippet import unlike_signs
from vq_core.kernels.verify import same_bits
from vq_core.plugins import fused
from vq_core.plugins.loader import make_manager
from vq_core.plugins.records import MethodRecord

if TYPE_CHECKING:
    from vq_core.plugins.binding import BoundSide

TILE_TOKENS = 1024
"""Tokens whose canonical order is made at once for a method's plain attention."""


@attrs.frozen(eq=False)
class Held:
    """How a side's pages are held, where that is not the canonical order.

    Attributes:
        form: The form.
        canonical: The method's layout.
        matrix: The snippet for tensor cores, if the form has one.
    """

    form: DeviceForm
    canonical: Layout
    matrix: Any = None


@attrs.frozen(eq=False)
class InOrder:
    """A method's attention on pages in device form, a tile of which is put in order at a time."""

    attend: Any
    canonical: Callable[[Mapping[str, mx.array]], Mapping[str, mx.array]]

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return int(min(TILE_TOKENS, getattr(self.attend, "tile_tokens", TILE_TOKENS)))

    def prepare_query(self, queries: mx.array) -> Any:
        """As the method's."""
        return self.attend.prepare_query(queries)

    def scores(self, queries: Any, tile: Mapping[str, mx.array]) -> mx.array:
        """As the method's, on the tile in order."""
        found: mx.array = self.attend.scores(queries, self.canonical(tile))
        return found

    def accumulate(self, weights: mx.array, tile: Mapping[str, mx.array]) -> mx.array:
        """As the method's, on the tile in order."""
        found: mx.array = self.attend.accumulate(weights, self.canonical(tile))
        return found

    def finish(self, sums: mx.array) -> mx.array:
        """As the method's."""
        found: mx.array = self.attend.finish(sums)
        return found


def forms_of(record: MethodRecord) -> Sequence[DeviceForm]:
    """What a method's ``vq_device`` returns, checked.

    Raises:
        PluginError: it fails, or returns anything but forms of different names.
    """
    name = record.label
    try:
        found: Any = make_manager(record.plugin, name).hook.vq_device()
    except VQError:
        raise
    except Exception as error:  # whatever a stranger's code raises becomes one typed error that names it
        raise PluginError(f"method {name!r}: vq_device failed with {type(error).__name__}: {error}") from error
    found = () if found is None else found
    if not isinstance(found, Sequence) or not all(isinstance(form, DeviceForm) for form in found):
        raise PluginError(f"method {name!r}: vq_device must return a sequence of DeviceForm objects, it gave {found!r}")
    if len({form.name for form in found}) < len(found):
        raise PluginError(f"method {name!r}: vq_device names a form twice")
    return found


def form_named(bound: BoundSide, name: str) -> DeviceForm | None:
    """The method's form of a name that serves this side, whatever the device."""
    for form in forms_of(bound.record):
        if form.name == name and not form.declines(bound.state):
            return form
    return None


def in_device_form(bound: BoundSide, kernels: str, fallback: str) -> BoundSide:
    """The side in the first form that serves it, or as it was, with the reasons in its operations.

    Raises:
        PluginError: a form breaks the contract, and ``fallback`` is not ``"warn"``.
    """
    backend, why_not = fused.backend_for(kernels)
    declined: list[str] = []
    for form in forms_of(bound.record):
        reason = why_not
        if not reason and backend not in form.backends:
            reason = f"it is for {', '.join(form.backends)}, not for {backend}"
        reason = reason or _guarded(bound, form, lambda form=form: form.declines(bound.state))  # type: ignore[misc]
        if reason:
            declined.append(f"{form.name}: {reason}")
            continue
        try:
            return _in(bound, form, str(backend), tuple(declined))
        except PluginError as error:
            if fallback != "warn":
                raise
            warnings.warn(f"{error}; the canonical order is kept", RuntimeWarning, stacklevel=2)
            declined.append(str(error))
    return declined_form(bound, "; ".join(declined) or "the method offers none")


@lru_cache(maxsize=256)
def declined_form(bound: BoundSide, reason: str) -> BoundSide:
    """A side in canonical order, with the reason in its operations; the same object for the same side and reason."""
    from vq_core.plugins.binding import Operation

    return attrs.evolve(bound, operations=(*bound.operations, Operation("vq_device", "canonical order", (reason,))))


def together(sides: Sequence[BoundSide], plain: Sequence[BoundSide]) -> list[BoundSide]:
    """Both sides in device form, or neither: kernels that read one side in it read the other in it too.

    Args:
        sides: As :func:`in_device_form` made them.
        plain: The same in canonical order.
    """
    held = [side.held for side in sides]
    if not any(held):
        return list(sides)
    reason = ""
    if not all(held):
        reason = "the other side has none"
    elif math.lcm(*(s.layout.block for s in sides)) != math.lcm(*(p.layout.block for p in plain)):
        reason = "its blocks would pack tokens later than the method's"
    if not reason:
        return list(sides)
    return [declined_form(p, reason) if s.held else s for s, p in zip(sides, plain, strict=True)]


def reorder(
    form: DeviceForm, bound: BoundSide, fields: Mapping[str, mx.array], *, to_device: bool
) -> dict[str, mx.array]:
    """Paged fields in the form's order, or back; what the layout calls a field of the sequence passes through."""
    paged = {field.name for field in form.layout(bound.state).paged}
    moved = {name: a for name, a in fields.items() if name in paged}
    move = form.to_device if to_device else form.from_device
    found: Any = _guarded(bound, form, lambda: move(bound.state, moved)) if moved else {}
    return {name: found[name] if name in paged else a for name, a in fields.items()}


def _guarded(bound: BoundSide, form: DeviceForm, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except VQError:
        raise
    except Exception as error:  # a stranger's code
        said = f"{type(error).__name__}: {error}"
        raise PluginError(f"method {bound.choice.label!r}, device form {form.name}: {said}") from error


def _in(bound: BoundSide, form: DeviceForm, backend: str, declined: tuple[str, ...]) -> BoundSide:
    from vq_core.plugins.binding import Operation, state_arrays

    layout = _guarded(bound, form, lambda: form.layout(bound.state))
    _probe(bound, form, layout, backend)
    snippet, matrix = (
        None if part is None else _guarded(bound, form, lambda part=part: part(bound.state))  # type: ignore[misc]
        for part in (form.snippet, form.matrix)
    )
    mx.eval(state_arrays((snippet, matrix)))  # a lazy constant would belong to this thread
    for one in (snippet, matrix):
        wrong = _guarded(bound, form, lambda one=one: unlike_signs(one))  # type: ignore[misc]
        if wrong and one is not None:
            raise PluginError(f"method {bound.choice.label!r}, device form {form.name}, snippet {one.name!r}: {wrong}")
    run, plain_decode = form.run, bound._decode

    def canonical(fields: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return reorder(form, bound, fields, to_device=False)

    def pack(state: Any, x: mx.array, positions: mx.array, sequence: Mapping[str, mx.array]) -> Mapping[str, mx.array]:
        if run is not None:
            return run(state=state, x=x, positions=positions, sequence=sequence, backend=backend)
        return reorder(form, bound, bound.pack(x, positions, sequence), to_device=True)

    def decode(state: Any, packed: Mapping[str, mx.array], positions: mx.array | None) -> mx.array:
        x: mx.array = plain_decode(state=state, packed=canonical(packed), positions=positions)
        return x

    said = f"{form.name} ({'+'.join(kernel.name for kernel in form.kernels) or 'plain operations'}, {backend})"
    return attrs.evolve(
        bound,
        layout=layout,
        operations=(*bound.operations, Operation("vq_device", said, declined)),
        attend=None if bound.attend is None else InOrder(bound.attend, canonical),
        both=pack,
        decode=decode,
        # The method's own snippet reads the canonical order.
        snippet=snippet,
        held=Held(form, bound.layout, matrix),
    )


def _probe(bound: BoundSide, form: DeviceForm, layout: Any, backend: str) -> None:
    """What the form promises, on a page of N(0, 1) numbers.

    Raises:
        PluginError: it does not keep it.
    """
    what = f"method {bound.choice.label!r}, device form {form.name}"
    canonical = bound.layout
    if not isinstance(layout, Layout):
        raise PluginError(f"{what}: its layout is {type(layout).__name__}, not a Layout")
    mine, theirs = (
        [(f.name, f.dtype, f.wide, f.codes, f.axis is None, f.nbytes) for f in given.fields]
        for given in (layout, canonical)
    )
    if mine != theirs or layout.page != canonical.page or layout.block % canonical.block:
        raise PluginError(f"{what}: its fields must be the method's in name, dtype and bytes, its page the method's")
    ctx = bound.ctx
    numbers = np.random.default_rng(2).standard_normal((1, ctx.kv_heads, canonical.page, ctx.head_dim), np.float32)
    x = mx.array(numbers).astype(getattr(mx, ctx.dtype))
    positions = mx.arange(canonical.page, dtype=mx.int32)[None]
    sequence = bound.start(x[:, :, : canonical.block], positions[:, : canonical.block])
    rows = bound.pack(x, positions, sequence)
    held = reorder(form, bound, rows, to_device=True)
    for field in layout.paged:
        wanted = (*x.shape[:2], *field.shape)
        if held[field.name].shape != wanted or held[field.name].dtype != rows[field.name].dtype:
            raise PluginError(f"{what}: {field.name} is {held[field.name].shape}, its layout promises {wanted}")
    back = reorder(form, bound, held, to_device=False)
    if any(back[name].shape != rows[name].shape or not same_bits(back[name], rows[name]) for name in rows):
        raise PluginError(f"{what}: from_device does not undo to_device")
    if form.run is None:
        return
    run = form.run
    got = _guarded(
        bound, form, lambda: run(state=bound.state, x=x, positions=positions, sequence=sequence, backend=backend)
    )
    for name, want in held.items():
        have = got.get(name)
        if have is None or have.shape != want.shape or have.dtype != want.dtype or not same_bits(have, want):
            raise PluginError(f"{what}: its kernels give another {name} than the hooks and to_device")
