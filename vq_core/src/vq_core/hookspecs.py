"""The contract between the core and a method.  This file is the reference manual.

A method is a plugin object (a module or an instance) named by an entry point in the group ``vq.methods``; the
entry point's name is the method's name.  It implements the hooks below with :data:`vq_core.api.hookimpl`.
An implementation may take fewer arguments than its specification, never others.

**Notation.** B sequences (rows), H KV heads, n or S tokens, D the head size of the side at hand.  Arrays are
MLX arrays, lazy: a hook must not evaluate on the hot path, and must not keep an array it was given.  One
exception: where only the data can say that a field needs its wide dtype, ``vq_encode`` may look at it, once a
flush.  Hooks called per token (``vq_start``, ``vq_encode``, ``vq_pack``, ``vq_decode`` and the objects of
``vq_attend``) are bound once, when a cache is built, and then called as plain functions: wrappers are not allowed
on them.

**Who owns what.** The shell owns the stored arrays and decides when tokens are flushed.  The method owns the
mathematics.  The core owns softmax, masks, grouped queries, the exact window and the model's attention sinks.
No hook sees both sides of a layer, so any key method goes with any value method.

**Numbers.** Ranges and norms in float32, codes by ``rint`` computed from the scale and zero as stored.
Encoding n blocks at once equals encoding them one by one, bit for bit, and no row depends on another row.
NaN or Inf in a token never leaves its own group.  Random constants come from ``ctx.seed`` alone and never
touch MLX's global random state.

**Threads.** A hook may be called from several threads at once; state is read only after ``vq_prepare``.

**First result wins.** Where a plugin offers several implementations of one hook, they are asked in pluggy's
order when the cache is bound; one that returns ``None`` declines, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pluggy import HookspecMarker

if TYPE_CHECKING:
    import mlx.core as mx

    from vq_core.api.attend import KeyAttention, ValueAttention
    from vq_core.api.calibration import Artifact, Calibration
    from vq_core.api.facts import MethodFacts, PrepareContext, Side
    from vq_core.api.layout import Layout
    from vq_core.kernels.device_form import DeviceForm
    from vq_core.kernels.offers import KernelOffer
    from vq_core.kernels.skeleton.snippet import Snippet

hookspec = HookspecMarker("vq")


@hookspec(firstresult=True)
def vq_method() -> MethodFacts:  # type: ignore[empty-body]
    """Static facts: name, summary, paper, settings class, sides, capabilities, API version.

    Called at discovery, so it must be cheap and must not need a device.  ``vq list-methods`` has to answer where
    MLX is missing or broken: import MLX inside the other hooks, or accept being listed as broken there.
    """


@hookspec(firstresult=True)
def vq_calibrate(ctx: PrepareContext, settings: Any, calibration: Calibration) -> Mapping[str, mx.array] | None:
    """Constants of one layer side, learnt from a model's own keys or values; ``vq calibrate`` writes them to a file.

    Needed only where the capabilities say ``needs_calibration``.  Called once a layer side, outside of any cache; it
    may take its time and evaluate.  Equal arguments must give equal bits: what is random comes from ``ctx.seed``.

    Args:
        ctx: The layer side, with the model's identity.
        settings: As in ``vq_prepare``; ``settings.artifact`` is empty.
        calibration: Sampled tokens and statistics of all, :class:`vq_core.api.Calibration`. Raise
            :class:`~vq_core.errors.SettingsError` where they are too few, naming how many tokens are needed.

    Returns:
        Arrays by name; ``vq_prepare`` gets them as ``artifact.arrays``.
    """


@hookspec(firstresult=True)
def vq_prepare(ctx: PrepareContext, settings: Any, artifact: Artifact | None) -> Any:
    """Constants of one layer side: rotations, codebooks, calibration artifacts.

    Called once per process for equal (method, ctx, settings); the result is shared by all caches, evaluated by
    the core, never copied, and its arrays are reported apart from the cache's own bytes.  This is the place
    to refuse: raise :class:`~vq_core.errors.UnsupportedShapeError` for a head size and
    :class:`~vq_core.errors.SettingsError` for settings that cannot serve it, naming what would.

    Args:
        ctx: The layer side, a :class:`vq_core.api.PrepareContext`.
        settings: An instance of the method's settings class.
        artifact: What was learnt for this side, :class:`vq_core.api.Artifact`: the core has read the file that
            ``settings.artifact`` names, and checked that it is of this method with these settings, of this model,
            layer and shape. ``None`` for methods that need no calibration.

    Returns:
        Anything but ``None``; it is handed to every other hook as ``state``.
    """


@hookspec(firstresult=True)
def vq_layout(ctx: PrepareContext, settings: Any, state: Any) -> Layout:  # type: ignore[empty-body]
    """What is stored: block, page, fields.  See :class:`vq_core.api.Layout`.

    The layout is canonical: it is what is saved and what ``vq_decode`` reads.

    Args:
        ctx: As in ``vq_prepare``.
        settings: As in ``vq_prepare``.
        state: From ``vq_prepare``.
    """


@hookspec(firstresult=True)
def vq_start(state: Any, x: mx.array, positions: mx.array) -> Mapping[str, mx.array]:  # type: ignore[empty-body]
    """Fields of the sequence, such as a mean key, from exactly the first block of each row.

    Needed only where the layout has a field with ``axis=None``.

    Args:
        state: From ``vq_prepare``.
        x: (B, H, block, D), the first tokens that leave the exact window.
        positions: (B, block) int32.

    Returns:
        One array per sequence field, (B, H, *field.shape).
    """


@hookspec(firstresult=True)
def vq_encode(state: Any, x: mx.array, positions: mx.array, sequence: Mapping[str, mx.array]) -> Any:
    """Codes and metadata of n tokens, n a multiple of the block.

    Args:
        state: From ``vq_prepare``.
        x: (B, H, n, D) in the model's dtype.
        positions: (B, n) int32, the tokens' places in their sequences.
        sequence: The fields of the sequence, (B, H, *field.shape); empty where the layout has none.

    Returns:
        Anything that ``vq_pack`` takes: one code an element, unpacked, is the plain choice.
    """


@hookspec(firstresult=True)
def vq_pack(state: Any, codes: Any) -> Mapping[str, mx.array]:  # type: ignore[empty-body]
    """Rows of the paged fields from what ``vq_encode`` returned.

    Args:
        state: From ``vq_prepare``.
        codes: From ``vq_encode``.

    Returns:
        One array per paged field, (B, H, *field.shape) with the token axis of ``field.shape`` shortened or
        lengthened to n tokens, in ``field.dtype`` (or ``field.wide``: then the whole field is converted).
    """


@hookspec(firstresult=True)
def vq_decode(state: Any, packed: Mapping[str, mx.array], positions: mx.array) -> mx.array:  # type: ignore[empty-body]
    """The reference reading of packed fields; the twin that every fused path must equal.

    Args:
        state: From ``vq_prepare``.
        packed: Paged fields (N, H, *field.shape), the token axis at any multiple n of the block; fields of the
            sequence (N or 1, H, *field.shape).
        positions: (N, n) int32.

    Returns:
        (N, H, n, D), float32.
    """


@hookspec(firstresult=True)
def vq_kernels() -> Sequence[KernelOffer]:  # type: ignore[empty-body]
    """Kernels that do what other hooks do, faster: :mod:`vq_core.kernels`.

    Optional.  Each offer names the operation it stands for, its kernels (each with its reference and the inputs on
    which ``vq verify`` compares them), how to run them, and which layer sides it declines.  The core uses the first
    that serves, on devices that have a backend, after it gave on a small input exactly what the hooks give; what it
    declines, and why, stands in the report.  The hooks stay the reference, and serve where no kernel does.
    """


@hookspec(firstresult=True)
def vq_device() -> Sequence[DeviceForm]:  # type: ignore[empty-body]
    """Orders in which devices hold the packed pages: :class:`vq_core.kernels.device_form.DeviceForm`.

    Optional.  A form is a fixed permutation of the method's fields, exact both ways, in which a device's kernels read
    them.  A cache that is to hold its pages so takes the first form that serves the side on its device; on a small
    input it must give back every bit.  What is saved stays in the order of ``vq_layout``.
    """


@hookspec(firstresult=True)
def vq_attend(state: Any, side: Side) -> KeyAttention | ValueAttention | None:
    """This side's half of attention on packed fields: :mod:`vq_core.api.attend`.

    ``None``, or no implementation: the core decodes a tile of pages and multiplies, which costs a bounded
    tile of transient memory and the time to decode.  The core compares the object with ``vq_decode`` on a
    small input when a cache is bound.

    Args:
        state: From ``vq_prepare``.
        side: ``"keys"``: return a :class:`~vq_core.api.attend.KeyAttention`; ``"values"``: a
            :class:`~vq_core.api.attend.ValueAttention`. One object may be both.
    """


@hookspec(firstresult=True)
def vq_snippet(state: Any, side: Side) -> Snippet | str | None:
    """How fused attention reads this side's packed fields: :class:`vq_core.kernels.skeleton.snippet.Snippet`.

    ``None``, or no implementation: attention takes plain operations, and the report says so.  A text in the place of a
    snippet says why there is none, for settings that one cannot serve, and stands in the report too.  With a snippet a
    decode step is one launch and a merge, on every backend, for every shape, mask and partner on the other side.  The
    core compares what the kernel gives with the plain operations before it uses it.

    Args:
        state: From ``vq_prepare``.
        side: ``"keys"`` or ``"values"``.
    """
