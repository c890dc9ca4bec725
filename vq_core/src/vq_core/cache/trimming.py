"""What may be cut off a cache's end: asked before anything is cut."""

from __future__ import annotations

from vq_core.cache.history import History
from vq_core.cache.policy import LayerPolicy
from vq_core.errors import CacheStateError
from vq_core.plugins.registry import resolve


def methods_trim(policy: LayerPolicy, history: History | None) -> bool:
    """Whether both methods can drop packed tokens."""
    if history is not None:
        records = [bound.record for bound in history.bound.values()]
    else:
        records = [resolve(choice.label) for choice in (policy.keys, policy.values)]
    return all(record.facts.capabilities.trimmable for record in records if record.facts is not None)


def check_cut(policy: LayerPolicy, history: History, n: int) -> None:
    """Refuse a cut of n tokens that cannot be made.

    Raises:
        CacheStateError: it reaches packed tokens of a method that cannot be trimmed, or the next token would attend to
            tokens that a sliding window has dropped.
    """
    if history.sliding is not None:
        rows = zip(history.lengths, history.dropped, strict=True)
        most = min((t + 1 - history.sliding - d for t, d in rows if d), default=n)
        if n > most:
            raise CacheStateError(
                f"trim({n}): tokens that the window of {history.sliding} needs then are gone; "
                f"at most {max(0, most)} can be dropped"
            )
    exact = min(history.window.counts)
    if n > exact and any(history.packed) and not methods_trim(policy, history):
        raise CacheStateError(
            f"trim({n}): the method cannot drop packed tokens; only the newest {exact} can be dropped"
        )
