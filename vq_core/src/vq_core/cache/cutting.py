"""A row cut within its packed tokens: the survivors of the cut block come back as decoded, approximate ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from vq_core.attention.view import decode_depths
from vq_core.cache.window import owned

if TYPE_CHECKING:
    from vq_core.cache.history import History


def cut_row(history: History, row: int, goal: int) -> History:
    """One row of a history, alone, cut to ``goal`` tokens held."""
    part = history.select([row])
    window, sinks, packed = part.window, part.window.sinks[0], part.packed[0]
    if goal >= sinks + packed:
        part.shorten(part.held[0] - goal)
        return part
    keep = max(0, goal - sinks) // history.block * history.block
    view, dropped = part.view(), part.dropped[0]
    exact = []
    for side, stored, first in (
        ("keys", view.keys, window.sink_keys),
        ("values", view.values, window.sink_values),
    ):
        page = history.bound[side].layout.page
        pieces = []
        if not keep and first is not None and sinks:
            pieces.append(first[:, :, : min(sinks, goal)])
        if goal > sinks + keep:
            begin = keep // page
            decoded = decode_depths(view, stored, begin, -(-(goal - sinks) // page)).astype(stored.exact.dtype)
            pieces.append(decoded[:, :, keep - begin * page : goal - sinks - begin * page])
        blank = stored.exact[:, :, :0]
        exact.append(mx.concatenate(pieces, axis=2) if pieces else blank)
    window.keys, window.values = (owned(x, 0, x.shape[2]) for x in exact)
    window.counts = [exact[0].shape[2]]
    window.approximate = [max(0, goal - sinks - keep)]
    if not keep:
        # The sink tokens stand at the left of the window again, exact; what follows them is approximate.
        window.sinks, window.sink_keys, window.sink_values = [0], None, None
    for store in part.stores.values():
        store.cut([keep])
        if not keep and not dropped:
            store.sequence = {}
    return part
