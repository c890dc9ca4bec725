"""When the rows of several caches make one batch."""

from __future__ import annotations

from collections.abc import Sequence

from vq_core.cache.history import History
from vq_core.cache.policy import LayerPolicy
from vq_core.errors import CacheStateError, SettingsError


def joined(parts: Sequence[tuple[tuple[LayerPolicy, int | None], History | None]]) -> History | None:
    """One history of the rows of several, in order; ``None`` where none of them is bound.

    Args:
        parts: Of each cache what it was made by, policy and window, and its history.

    Raises:
        SettingsError: caches of different policies, windows or shapes.
        CacheStateError: an empty cache among others.
    """
    if len({(policy.but_for_files, window) for (policy, window), _ in parts}) > 1:
        raise SettingsError("join needs caches of one policy; these differ in method, settings or window")
    histories = [history for _, history in parts if history is not None]
    if not histories:
        return None
    if len(histories) < len(parts) or any(not max(history.lengths) for history in histories):
        raise CacheStateError("join: an empty cache has no shape to join; leave it out")
    if len({(h.bound["keys"].ctx, h.bound["values"].ctx) for h in histories}) > 1:
        raise SettingsError("join needs caches of one shape and dtype (and of one layer, if a method differs by layer)")
    if len({(h.bound["keys"].artifact, h.bound["values"].artifact) for h in histories}) > 1:
        raise SettingsError("join needs caches packed with one artifact; the files of these differ in content")
    if len({tuple(h.bound[side].layout for side in ("keys", "values")) for h in histories}) > 1:
        raise SettingsError("join needs caches that hold their pages in one order: all in device form, or none")
    return histories[0].join(histories[1:])
