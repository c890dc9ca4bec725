"""The paged store on its own: pages of rows, spare capacity, cutting, selecting, joining."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api import Field, Layout
from vq_core.cache.store import PageStore

BLOCK, PAGE, HEADS = 4, 16, 2


def layout(page: int = PAGE) -> Layout:
    return Layout(
        BLOCK,
        (
            Field("wide", "float16", (3, page), axis=1, codes=True, wide="float32"),
            Field("half", "int32", (page // 2, 5), axis=0),
            Field("mean", "float32", (7,), axis=None),
        ),
        page,
    )


class Twin:
    """The store as a list of rows in numpy: token t of row r holds numbers that say r and t."""

    def __init__(self, rows: int, page: int = PAGE):
        self.store = PageStore(layout(page), HEADS, rows)
        self.page = page
        self.names = list(range(rows))
        self.tokens = [0] * rows

    def rows(self, name: int, begin: int, end: int) -> dict[str, np.ndarray]:
        t = np.arange(begin, end)
        wide = name * 100 + np.broadcast_to(t[None, None], (HEADS, 3, len(t))) / 8
        half = name * 10000 + np.broadcast_to(t[::2, None] // 2, (HEADS, len(t) // 2, 5))
        return {"wide": wide.astype(np.float16), "half": half.astype(np.int32)}

    def append(self, which: list[int], n: int) -> None:
        parts = [self.rows(self.names[r], self.tokens[r], self.tokens[r] + n) for r in which]
        if self.tokens[which[0]] == 0:
            self.store.start(which, {"mean": mx.array([[[float(self.names[r])] * 7] * HEADS for r in which])})
        self.store.append(which, {k: mx.array(np.stack([p[k] for p in parts])) for k in parts[0]}, n)
        for r in which:
            self.tokens[r] += n

    def check(self) -> None:
        store = self.store
        assert store.tokens == self.tokens
        assert sorted(p for owned in store.owned for p in owned) == list(range(store.used))
        for r, (name, n) in enumerate(zip(self.names, self.tokens, strict=True)):
            want = self.rows(name, 0, n)
            for field in store.layout.paged if n else ():
                pages = [np.array(store.paged[field.name][p]) for p in store.owned[r]]
                got = np.concatenate(pages, axis=1 + (field.axis or 0))
                used = store.layout.units(field, n)
                index = (slice(None),) * (1 + (field.axis or 0))
                np.testing.assert_array_equal(got[(*index, slice(0, used))], want[field.name])
                assert not got[(*index, slice(used, None))].any(), "places behind the last token are zero"
            if n:
                assert np.array(store.sequence["mean"][r]).tolist() == [[float(name)] * 7] * HEADS
        for array in store.paged.values():
            assert array.shape[0] == store.capacity


def test_appends_of_any_size_give_the_same_pages() -> None:
    for sizes in ([64], [4] * 16, [12, 20, 4, 28], [16, 16, 32]):
        twin = Twin(1)
        for n in sizes:
            twin.append([0], n)
            twin.check()
        assert twin.store.owned == [[0, 1, 2, 3]]


def test_rows_grow_apart_and_join_again() -> None:
    twin = Twin(3)
    for which, n in (([0, 1, 2], 8), ([0, 2], 4), ([1], 40), ([0, 2], 16), ([2], 8), ([0], 4)):
        twin.append(which, n)
        twin.check()


def test_random_rows() -> None:
    rng = np.random.default_rng(5)
    twin = Twin(4)
    for _ in range(60):
        fill = int(rng.integers(0, PAGE // BLOCK)) * BLOCK
        which = [r for r in range(4) if twin.tokens[r] % PAGE == fill and rng.random() < 0.8]
        which = [r for r in which if bool(twin.tokens[r]) == bool(twin.tokens[which[0]])]
        if which:
            twin.append(which, BLOCK * int(rng.integers(1, 9)))
        twin.check()


@pytest.mark.parametrize("page", (16, 128))
def test_spare_capacity_is_bounded(page: int) -> None:
    """At most the larger of 128 tokens and 3%, one row, at every length."""
    twin = Twin(1, page)
    for _ in range(300):
        twin.append([0], BLOCK)
        n = twin.tokens[0]
        assert twin.store.capacity * page - n <= max(128, 0.03 * n)
    twin.append([0], 20000)
    assert twin.store.capacity * page - 21200 <= 0.03 * 21200
    assert sum(a.nbytes for a in twin.store.arrays()) == twin.store.nbytes()
    assert twin.store.nbytes(True) + twin.store.nbytes(False) == twin.store.nbytes()


@pytest.mark.parametrize("keep", [[20, 8, 4], [0, 48, 0], [4, 4, 4], [32, 16, 48], [0, 0, 0]])
def test_cut(keep: list[int]) -> None:
    twin = Twin(3)
    twin.append([0, 1, 2], 32)
    twin.append([1, 2], 16)
    twin.store.cut(keep)
    twin.tokens = keep
    twin.check()
    assert twin.store.capacity * PAGE - sum(keep) <= max(128, 3 * PAGE)
    for r in range(3):
        if keep[r]:
            twin.append([r], 12)
            twin.check()


def test_select_and_join() -> None:
    twin = Twin(3)
    twin.append([0, 1, 2], 8)
    twin.append([2], 40)
    before = [np.array(a) for a in twin.store.arrays()]
    for rows in ([2], [1, 0], [2, 2, 0], [0, 1, 2]):
        part = Twin(len(rows))
        part.store, part.names, part.tokens = twin.store.select(rows), list(rows), [twin.tokens[r] for r in rows]
        part.check()
        both = Twin(len(rows) + 3)
        both.store = PageStore.join([part.store, twin.store])
        both.names, both.tokens = [*rows, 0, 1, 2], [*part.tokens, *twin.tokens]
        both.check()
        both.append([len(rows) + 2], 20)
        both.check()
    twin.check()
    for array, was in zip(twin.store.arrays(), before, strict=True):
        np.testing.assert_array_equal(np.array(array), was)


def test_copy_shares_arrays_until_it_grows() -> None:
    twin = Twin(1)
    twin.append([0], 24)
    other = twin.store.copy()
    assert [id(a) for a in other.arrays()] == [id(a) for a in twin.store.arrays()]
    old = [np.array(a) for a in other.arrays()]
    twin.append([0], 4)  # into the open page
    twin.append([0], 64)
    twin.check()
    for array, was in zip(other.arrays(), old, strict=True):
        np.testing.assert_array_equal(np.array(array), was)


def test_widening_keeps_what_was_stored() -> None:
    twin = Twin(2)
    twin.append([0, 1], 8)
    rows = {k: mx.array(v[None]) for k, v in twin.rows(1, 8, 12).items()}
    rows["wide"] = mx.full((1, HEADS, 3, 4), 70000.0, mx.float32)
    twin.store.append([1], rows, 4)
    assert twin.store.paged["wide"].dtype == mx.float32
    page = np.array(twin.store.paged["wide"][twin.store.owned[1][0]])
    np.testing.assert_array_equal(page[..., :8], twin.rows(1, 0, 8)["wide"])
    assert (page[..., 8:12] == 70000).all()
    twin.append([0], 4)  # narrow rows into the wide field
    assert twin.store.paged["wide"].dtype == mx.float32


def test_a_view_is_kept_until_the_next_write_and_holds_no_copy() -> None:
    twin = Twin(1)
    twin.append([0], 24)
    view = twin.store.view()
    assert (view.count, view.depth, view.row) == (2, 2, None)
    twin.append([0], 4)
    assert twin.store.view().count == 2
    np.testing.assert_array_equal(np.array(view.tile["wide"][1, :, :, 8:12]), 0)
    assert not np.array_equal(np.array(twin.store.view().tile["wide"][1, :, :, 8:12]), np.zeros((HEADS, 3, 4)))
