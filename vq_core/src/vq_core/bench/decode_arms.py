"""The arms of `vq bench decode`: one model, and caches of each kind for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx

from vq_core.bench.filling import CHUNK, chunks
from vq_core.bench.geometry import Geometry
from vq_core.cache.policy import LayerPolicy
from vq_core.cache.shell import PackedKVCache
from vq_core.calibration.stand_in import SAID, completed
from vq_core.errors import VQError
from vq_core.hosts.mlx_lm import compress, identity, rivals
from vq_core.hosts.mlx_lm.prepare import CompressedModel
from vq_core.hosts.mlx_lm.report import held_bytes


@attrs.frozen(eq=False)
class Arm:
    """One kind of cache.

    Attributes:
        name: For the record.
        kind: ``"plain"``, ``"mlx-lm quantized"`` or ``"vq"``.
        make: Fresh caches, one a layer.
        handle: Of the model, for ours.
        stand_in: What its learnt constants come from, where they are no model's.
    """

    name: str
    kind: str
    make: Callable[[], list[Any]]
    handle: CompressedModel | None = None
    stand_in: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For the time in which the model runs with these caches: MLX's attention is ours only then."""
        if self.handle is None:
            yield
            return
        self.handle.redo()
        try:
            yield
        finally:
            self.handle.undo()

    def facts(self, caches: list[Any]) -> dict[str, Any]:
        """What the caches hold, all layers together."""
        found: dict[str, Any] = {"kind": self.kind, "cache_bytes": sum(map(held_bytes, caches))}
        reports = [cache.report() for cache in caches if isinstance(cache, PackedKVCache)]
        if not reports:
            return found
        first = reports[0]
        found |= {"stand_in": self.stand_in} if self.stand_in else {}
        return found | {
            "method": first.keys,
            "attention": first.attention,
            "operations": list(first.operations),
            "tokens_packed": first.packed,
            "tokens_exact": first.exact,
            "packed_bytes": sum(r.bytes.codes + r.bytes.metadata for r in reports),
            "window_bytes": sum(r.bytes.window for r in reports),
            "spare_bytes": sum(r.bytes.spare for r in reports),
        }


def lost(caches: list[Any]) -> int:
    """Updates of our caches that no packed attention has read; filling them makes some too."""
    return sum(cache.reads.lost for cache in caches if isinstance(cache, PackedKVCache))


def make_arms(
    model: Any, geometry: Geometry, dtype: str, methods: tuple[str, ...], tiers: tuple[str, ...], residual: int,
    left_out: list[dict[str, Any]],
) -> list[Arm]:  # fmt: skip
    """mlx-lm's plain cache first: it is the base; its quantized ones where the model's steps run with them; ours."""
    arms = [Arm(f"mlx-lm {dtype}", "plain", lambda: rivals.plain_caches(model))]
    bits: dict[int, None] = {}
    ours: list[Arm] = []
    whose = identity(model)
    for text in dict.fromkeys(methods):
        width = getattr(LayerPolicy.make(method=text).keys.settings, "bits", None)
        refused = rivals.quantized_refuses(width, geometry.head_dim)
        if refused:
            left_out.append({"arm": f"mlx-lm quantized, as {text}", "reason": refused})
        elif width is not None:
            bits[width] = None
        whole = completed(text, [(geometry.kv_heads, geometry.head_dim)], model=whose, layers=geometry.layers)
        for tier in dict.fromkeys(tiers):
            handle = compress(model, method=whole, residual=residual, attention=tier)  # type: ignore[arg-type]
            handle.undo()
            ours.append(Arm(f"{text} [{tier}]", "vq", handle.fresh, handle, "" if whole == text else SAID))
    for width in bits:
        arm = Arm(
            f"mlx-lm quantized {width} bits", "mlx-lm quantized",
            lambda width=width: rivals.quantized_caches(geometry.layers, width),  # type: ignore[misc]
        )  # fmt: skip
        reason = _does_not_run(model, geometry, dtype, arm)
        if reason:
            left_out.append({"arm": arm.name, "reason": reason})
        else:
            arms.append(arm)
    return arms + ours


def _does_not_run(model: Any, geometry: Geometry, dtype: str, arm: Arm) -> str:
    """Why a step does not run: MLX's CUDA backend has no quantized product over a buffer that is not exactly full."""
    caches = arm.make()
    fill(caches, geometry, dtype, 256)
    try:
        rivals.synchronous(model, caches, mx.array([0]), 2)
    except VQError:
        raise
    except (RuntimeError, ValueError) as error:
        return f"MLX cannot run a step with it here: {type(error).__name__}: {error}"
    return ""


def fill(caches: list[Any], geometry: Geometry, dtype: str, tokens: int, *, seed: int = 0, chunk: int = CHUNK) -> None:
    """Random keys and values into every layer's cache, the same in all layers, chunk by chunk."""
    for keys, values in chunks(
        tokens, batch=1, kv_heads=geometry.kv_heads, head_dim=geometry.head_dim, dtype=dtype, seed=seed, chunk=chunk
    ):
        for cache in caches:
            # Arrays of their own: mlx-lm's cache takes the first ones as they are, and layers would share them.
            cache.update_and_fetch(keys + 0, values + 0)
            mx.eval(cache.state)
    mx.clear_cache()


def filled(arm: Arm, geometry: Geometry, dtype: str, tokens: int) -> tuple[list[Any], dict[str, int]]:
    """Fresh caches of so many tokens, and what MLX says that they take."""
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = arm.make()
    with arm.running():
        fill(caches, geometry, dtype, tokens)
    return caches, {"resident_bytes": mx.get_active_memory() - before}
