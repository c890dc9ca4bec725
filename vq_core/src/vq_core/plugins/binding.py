"""Binding: one method's chain of hooks for one side of a layer, resolved once and then plain functions.

A pluggy call costs 20 to 140 plain calls, so nothing of pluggy runs per token.  Binding prepares the method's
constants, asks each hook's implementations in turn which of them serves, compares the method's attention
with its own decoding on a small input, and records what was chosen.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pluggy

from vq_core.api.facts import PrepareContext
from vq_core.api.layout import Layout
from vq_core.calibration.artifact import artifact_of
from vq_core.errors import PluginError, VQError
from vq_core.kernels.skeleton.snippet import Snippet, unlike_signs
from vq_core.plugins import fused
from vq_core.plugins.choice import SideChoice, choose
from vq_core.plugins.device import Held, in_device_form
from vq_core.plugins.loader import make_manager
from vq_core.plugins.offered import offers_of
from vq_core.plugins.promises import Promise, checked
from vq_core.plugins.reach import state_arrays as state_arrays
from vq_core.plugins.records import MethodRecord
from vq_core.plugins.registry import resolve

PROBE_TOLERANCE = 2e-3


@attrs.frozen(eq=False)
class Operation:
    """Which implementation serves a hook.

    Attributes:
        name: The hook.
        implementation: Where it is defined, ``"core"`` for the core's own way.
        declined: Earlier implementations and why they do not run.
    """

    name: str
    implementation: str
    declined: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class BoundSide:
    """A method bound to one side of a layer.  Shared by all caches that ask for the same; never copied.

    ``backend`` is where kernels run, ``None`` where they do not, for the reason ``no_backend``.  ``held`` is there
    where pages are held in a device form: ``layout`` is the form's, ``pack``, ``decode`` and ``attend`` work on it.
    ``no_snippet`` is the method's reason where it gave one in the place of a snippet.
    ``artifact`` is the digest of the file that its constants come from, empty where they come from none.
    """

    record: MethodRecord
    choice: SideChoice
    ctx: PrepareContext
    state: Any
    layout: Layout
    operations: tuple[Operation, ...]
    attend: Any | None
    needs_positions: bool
    _start: Callable[..., Mapping[str, mx.array]] | None
    _encode: Callable[..., Any]
    _pack: Callable[..., Mapping[str, mx.array]]
    _decode: Callable[..., mx.array]
    _both: Callable[..., Mapping[str, mx.array]] | None = None
    snippet: Snippet | None = None
    backend: str | None = None
    no_backend: str = ""
    held: Held | None = None
    no_snippet: str = ""
    artifact: str = ""
    _promised: dict[Any, Promise] = attrs.field(init=False, factory=dict, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundSide:
        return self

    @property
    def without_snippet(self) -> str:
        """Why fused attention cannot read this side, where it has no snippet."""
        said = f"{self.choice.label} has no snippet for its {self.ctx.side}"
        return f"{said}: {self.no_snippet}" if self.no_snippet else said

    @property
    def constants(self) -> list[mx.array]:
        """Arrays of the prepared state, and of what attention was made from it: a snippet's tables, a device form's.
        Each once; shared by all caches of the process."""
        return state_arrays((self.state, self.attend, self.snippet, self.held and self.held.matrix), (BoundSide,))

    @property
    def canonical(self) -> Layout:
        """The method's layout: what is saved."""
        return self.layout if self.held is None else self.held.canonical

    def start(self, x: mx.array, positions: mx.array) -> dict[str, mx.array]:
        """Fields of the sequence from the first block (B, H, block, D), checked against the layout."""
        if self._start is None:
            return {}
        start = self._start
        rows = _guarded(self.choice.label, "vq_start", lambda: start(state=self.state, x=x, positions=positions))
        return checked(self.choice.label, self.layout, rows, x, paged=False)

    def pack(self, x: mx.array, positions: mx.array, sequence: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Encode and pack n tokens (B, H, n, D); rows of the paged fields, checked against the layout."""
        name, state = self.choice.label, self.state
        if self._both is not None:
            both = self._both
            rows = _guarded(name, "kernel", lambda: both(state=state, x=x, positions=positions, sequence=sequence))
        else:
            codes = _guarded(
                name, "vq_encode", lambda: self._encode(state=state, x=x, positions=positions, sequence=sequence)
            )
            rows = _guarded(name, "vq_pack", lambda: self._pack(state=state, codes=codes))
        return checked(name, self.layout, rows, x, True, self._promised)

    def decode(self, packed: Mapping[str, mx.array], positions: mx.array | None) -> mx.array:
        """Decode a tile: (N, H, n, D) float32."""
        x: mx.array = _guarded(
            self.choice.label, "vq_decode", lambda: self._decode(state=self.state, packed=packed, positions=positions)
        )
        return x


_lock = threading.RLock()
_bound: dict[Any, BoundSide] = {}
_latched: dict[tuple[str, str], str] = {}


def bind(
    method: str | SideChoice, ctx: PrepareContext, fallback: str = "error", kernels: str = "auto", device: bool = False
) -> BoundSide:
    """Bind a method to a layer side; equal requests share one object, its constants and its probe.

    Args:
        method: Text form or checked choice.
        ctx: The layer side.
        fallback: ``"warn"``: a method whose attention fails its probe is read by decoding, and a kernel that fails
            its own is not used, with one warning a process; ``"error"``: raise.
        kernels: Where the method's kernels run, see :class:`~vq_core.cache.policy.LayerPolicy`.
        device: Whether pages are held in a device form, where the method offers one that serves the side there.

    Raises:
        SettingsError, UnsupportedShapeError: the method refuses the settings or the shape.
        PluginError: the method breaks the contract.
    """
    choice = choose(method, ctx.side) if isinstance(method, str) else method
    # Outside our lock: a plugin that binds while it is being loaded holds the registry's and waits for ours.
    record = resolve(choice.label)
    return bind_record(record, choice, ctx, fallback, kernels, device)


def bind_record(
    record: MethodRecord, choice: SideChoice, ctx: PrepareContext, fallback: str = "error", kernels: str = "auto",
    device: bool = False,
) -> BoundSide:  # fmt: skip
    """As :func:`bind`, of a method at hand, which need not be registered."""
    with _lock:
        learnt = artifact_of(record, choice, ctx)  # of the file as it is now: another one is another method
        digest = learnt.digest if learnt else ""
        key = (record.distribution, record.version, choice, ctx, fallback, fused.backend_for(kernels), digest)
        if key not in _bound:
            _bound[key] = _bind(record, choice, ctx, fallback, kernels)
        if not device:
            return _bound[key]
        ordered = (*key, "device")
        if ordered not in _bound:
            _bound[ordered] = in_device_form(_bound[key], kernels, fallback)
        return _bound[ordered]


def _bind(record: MethodRecord, choice: SideChoice, ctx: PrepareContext, fallback: str, kernels: str) -> BoundSide:
    name = choice.label
    manager = make_manager(record.plugin, name)
    learnt = artifact_of(record, choice, ctx)
    state = _guarded(
        name, "vq_prepare", lambda: manager.hook.vq_prepare(ctx=ctx, settings=choice.settings, artifact=learnt)
    )
    if state is None:
        raise PluginError(f"method {name!r}: vq_prepare returned None; it must return the method's state")
    mx.eval(state_arrays(state))
    layout = _guarded(name, "vq_layout", lambda: manager.hook.vq_layout(ctx=ctx, settings=choice.settings, state=state))
    if not isinstance(layout, Layout):
        raise PluginError(f"method {name!r}: vq_layout returned {type(layout).__name__}, not a Layout")
    x = _probe_input(ctx, layout)
    positions = mx.arange(layout.page, dtype=mx.int32)[None]
    chosen: dict[str, Operation] = {}
    pick = _Picker(manager, name, chosen)
    start = None
    sequence: Mapping[str, mx.array] = {}
    if layout.sequence:
        block = layout.block
        start, sequence = pick("vq_start", state=state, x=x[:, :, :block], positions=positions[:, :block])
    encode, codes = pick("vq_encode", state=state, x=x, positions=positions, sequence=sequence)
    pack, _ = pick("vq_pack", state=state, codes=codes)
    rows = _guarded(name, "vq_pack", lambda: pack(state=state, codes=codes))
    packed = checked(name, layout, rows, x, paged=True) | checked(name, layout, sequence, x, paged=False)
    decode, decoded = pick("vq_decode", state=state, packed=packed, positions=positions)
    wanted = (1, ctx.kv_heads, layout.page, ctx.head_dim)
    if decoded.shape != wanted or decoded.dtype != mx.float32:
        raise PluginError(
            f"method {name!r}: vq_decode must return {wanted} float32, it gave {decoded.shape} {decoded.dtype}"
        )
    attend, operation = _attend(manager, name, state, ctx, packed, decoded, fallback)
    offers = offers_of(manager, name)
    both = fused.choose(
        name, "encode+pack", offers, state, kernels, fallback, rows,
        lambda offer, backend: offer.run(  # type: ignore[misc]
            state=state, x=x, positions=positions, sequence=sequence, backend=backend
        ),
    )  # fmt: skip
    back = fused.choose(
        name, "decode", offers, state, kernels, fallback, {"x": decoded},
        lambda offer, backend: {
            "x": offer.run(state=state, packed=packed, positions=positions, backend=backend)  # type: ignore[misc]
        },
    )  # fmt: skip
    _note(chosen, both, "vq_encode", "vq_pack")
    _note(chosen, back, "vq_decode")
    snippet = _snippet(manager, name, state, ctx)
    return BoundSide(
        record, choice, ctx, state, layout, (*chosen.values(), operation), attend,
        "positions" in pick.arguments["vq_decode"], start, encode, pack, back.run or decode, both.run,
        snippet if isinstance(snippet, Snippet) else None, *fused.backend_for(kernels),
        no_snippet=snippet if isinstance(snippet, str) else "", artifact=learnt.digest if learnt else "",
    )  # fmt: skip


def _note(chosen: dict[str, Operation], served: fused.Fused, *hooks: str) -> None:
    """Say in the operations which kernels serve, and which do not and why."""
    for hook in hooks:
        plain = chosen[hook]
        said = served.said or plain.implementation
        chosen[hook] = attrs.evolve(plain, implementation=said, declined=plain.declined + served.declined)


def _snippet(manager: pluggy.PluginManager, name: str, state: Any, ctx: PrepareContext) -> Snippet | str | None:
    """The method's part of fused attention, its constants evaluated; or why there is none."""
    found = _guarded(name, "vq_snippet", lambda: manager.hook.vq_snippet(state=state, side=ctx.side))
    if found is not None and not isinstance(found, Snippet | str):
        said = f"vq_snippet must return a Snippet, a reason as text, or None; it gave {type(found).__name__}"
        raise PluginError(f"method {name!r}: {said}")
    mx.eval(state_arrays(found))
    if isinstance(found, Snippet):
        wrong = _guarded(name, "vq_snippet", lambda: unlike_signs(found))
        if wrong:
            raise PluginError(f"method {name!r}, snippet {found.name!r}: {wrong}")
    return found


class _Picker:
    """Asks a hook's implementations in pluggy's order; the first that gives a result is bound."""

    def __init__(self, manager: pluggy.PluginManager, method: str, chosen: dict[str, Operation]):
        self.manager, self.method, self.chosen = manager, method, chosen
        self.arguments: dict[str, tuple[str, ...]] = {}

    def __call__(self, hook: str, **kwargs: Any) -> tuple[Callable[..., Any], Any]:
        declined: list[str] = []
        for impl in reversed(getattr(self.manager.hook, hook).get_hookimpls()):
            where = f"{getattr(impl.function, '__module__', '?')}.{getattr(impl.function, '__qualname__', hook)}"
            if impl.hookwrapper or impl.wrapper:
                raise PluginError(f"method {self.method!r}: {where} is a wrapper; {hook} runs per token and takes none")
            bound = _plain(impl.function, impl.argnames)
            result = _call(self.method, hook, bound, **kwargs)
            if result is not None:
                self.chosen[hook] = Operation(hook, where, tuple(declined))
                self.arguments[hook] = tuple(impl.argnames)
                return bound, result
            declined.append(f"{where} declined")
        raise PluginError(f"method {self.method!r}: no implementation of {hook} serves this layer")


def _plain(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The implementation as a function that takes all of the hook's arguments by name."""
    wanted = tuple(names)

    def call(**kwargs: Any) -> Any:
        return function(*[kwargs[name] for name in wanted])

    return call


def _guarded(method: str, hook: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except VQError:
        raise
    except Exception as error:  # whatever a stranger's code raises becomes one typed error that names it
        raise PluginError(f"method {method!r}: {hook} failed with {type(error).__name__}: {error}") from error


def _call(method: str, hook: str, function: Callable[..., Any], **kwargs: Any) -> Any:
    def evaluated() -> Any:
        result = function(**kwargs)
        mx.eval(state_arrays(result))
        return result

    return _guarded(method, hook, evaluated)


def _attend(
    manager: pluggy.PluginManager, name: str, state: Any, ctx: PrepareContext,
    packed: Mapping[str, mx.array], decoded: mx.array, fallback: str,
) -> tuple[Any | None, Operation]:  # fmt: skip
    attend = _guarded(name, "vq_attend", lambda: manager.hook.vq_attend(state=state, side=ctx.side))
    if attend is None:
        return None, Operation("vq_attend", "core: decode a tile, then multiply", ("the method offers none",))
    where = f"{type(attend).__module__}.{type(attend).__qualname__}"
    if fallback == "warn" and (name, where) in _latched:
        return None, Operation("vq_attend", "core: decode a tile, then multiply", (_latched[name, where],))
    try:
        error = _guarded(name, "vq_attend", lambda: _probe_attention(attend, ctx, packed, decoded))
        if not error <= PROBE_TOLERANCE:
            raise PluginError(
                f"method {name!r}: attention on the {ctx.side} differs from vq_decode by {error:.2e} (relative; "
                f"at most {PROBE_TOLERANCE:.0e}); report it to {name!r}'s author, or use fallback='warn'"
            )
    except PluginError as failure:
        if fallback != "warn":
            raise
        reason = f"{where} failed its probe: {failure}"
        _latched[name, where] = reason
        warnings.warn(f"{reason}; it is read by decoding from now on", RuntimeWarning, stacklevel=2)
        return None, Operation("vq_attend", "core: decode a tile, then multiply", (reason,))
    mx.eval(state_arrays(attend))  # what the probe did not need: constants are read on other threads
    return attend, Operation("vq_attend", where)


def _probe_attention(attend: Any, ctx: PrepareContext, packed: Mapping[str, mx.array], decoded: mx.array) -> float:
    rng = np.random.default_rng(1)
    page = decoded.shape[2]
    if ctx.side == "keys":
        q = mx.array(rng.standard_normal((1, ctx.kv_heads, 3, ctx.head_dim), np.float32))
        got = attend.scores(attend.prepare_query(q), packed)
        want = q @ decoded.swapaxes(-1, -2)
    else:
        w = mx.array(rng.random((1, ctx.kv_heads, 3, page), np.float32))
        got, want = attend.finish(attend.accumulate(w, packed)), w @ decoded
    mx.eval(got, want)
    if got.shape != want.shape:
        raise PluginError(f"attention on the {ctx.side} gave {got.shape}, not {want.shape}")
    a, b = np.array(got.astype(mx.float32)), np.array(want)
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)


def _probe_input(ctx: PrepareContext, layout: Layout) -> mx.array:
    # numpy's generator: MLX's global random state belongs to the user.
    x = np.random.default_rng(0).standard_normal((1, ctx.kv_heads, layout.page, ctx.head_dim), np.float32)
    return mx.array(x).astype(getattr(mx, ctx.dtype))
