"""Encode, pack, decode: shapes, head sizes, blocks and rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vq_core.api.facts import Side
from vq_core.api.settings import format_choice, parse_choice
from vq_core.errors import PluginError, SettingsError, UnsupportedShapeError
from vq_core.plugins.binding import state_arrays
from vq_core.testing.kit import Kit, decode, pack, round_trip, skip, whole
from vq_core.testing.observe import assert_same, floats, gaussian, raw


class CodecConformance(Kit):
    """The method's functions called as the shell calls them."""

    def test_settings_round_trip(self, text: str, side: Side) -> None:
        """The text form with every setting spelt out means the same method."""
        choice = self.bind(text, side).choice
        again = self.bind(format_choice(choice.label, choice.settings), side).choice
        assert again == choice

    def test_head_size(self, side: Side, head_size: int) -> None:
        """A head size is served, shape and dtype kept, or refused before the first token by an error that names it."""
        accepted = self.capabilities().head_dims
        declared = accepted is None or head_size in accepted
        plain = parse_choice(self.method).label
        needs_artifact = self.capabilities().needs_calibration
        for text in dict.fromkeys((self.method if needs_artifact else plain, self.method, *self.variants)):
            try:
                bound = self.bind(text, side, dim=head_size)
            except (UnsupportedShapeError, SettingsError) as error:
                assert str(head_size) in str(error), (
                    f"{text!r} refuses head size {head_size} without naming it: {error}"
                )
                # Some settings may exclude a head size that the method serves with others.
                assert not declared or text != plain, f"{text!r} declares head size {head_size} and refuses it: {error}"
                continue
            assert declared, f"{text!r} takes head size {head_size}, which its capabilities do not name: {accepted}"
            x = gaussian((1, self.kv_heads, whole(bound, 33), head_size))
            got = round_trip(bound, x)
            assert got.shape == x.shape and got.dtype == mx.float32
            assert np.isfinite(floats(got)).all()

    def test_broken_head_size_is_typed(self, side: Side) -> None:
        """A head size of 1 is served, or refused by a typed error that names it; no method may crash on it."""
        try:
            bound = self.bind(self.method, side, dim=1)
        except PluginError:
            raise
        except (UnsupportedShapeError, SettingsError) as error:
            assert "1" in str(error)
            return
        assert round_trip(bound, gaussian((1, self.kv_heads, whole(bound, 3), 1))).shape[-1] == 1

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_round_trip(self, text: str, side: Side, dtype: str) -> None:
        """Shape kept, float32 out, bit-equal where the method is exact, for every dtype a model can have."""
        bound = self.bind(text, side, dtype=dtype)
        x = gaussian((2, self.kv_heads, whole(bound, 40), self.dim()), dtype)
        got = round_trip(bound, x)
        assert got.shape == x.shape and got.dtype == mx.float32
        assert np.isfinite(floats(got)).all()
        if self.capabilities().exact:
            assert_same(got.astype(x.dtype), x, f"{text} declares exact, {dtype}")

    def test_blocks_one_by_one(self, text: str, side: Side) -> None:
        """n blocks at once give the bytes of the blocks one by one, and of two unequal parts."""
        bound = self.bind(text, side)
        layout, block = bound.layout, bound.layout.block
        n = whole(bound, 20) if block < 20 else 5 * block
        x = gaussian((2, self.kv_heads, n, self.dim()), seed=3)
        at_once = pack(bound, x)
        sequence = {f.name: at_once[f.name] for f in layout.sequence}
        for step in (block, 3 * block):
            parts = [pack(bound, x[:, :, i : i + step], i, sequence) for i in range(0, n, step)]
            for field in layout.paged:
                joined = mx.concatenate([part[field.name] for part in parts], axis=2 + (field.axis or 0))
                assert_same(joined, at_once[field.name], f"{text}, {side}, {step} tokens at a time, {field.name}")
        both = decode(bound, at_once, n)
        first = decode(bound, pack(bound, x[:, :, :block], 0, sequence), block)
        assert_same(both[:, :, :block], first, f"{text}, {side}, first block decoded alone")

    @pytest.mark.parametrize("heads", [1, 2, 3, 8])
    def test_rows_and_heads_alone(self, text: str, side: Side, heads: int) -> None:
        """A sequence alone and in a batch of 4 has equal bytes; no head shows in another.

        Each head has a constant of its own, so that a head that leaks is far off.
        """
        bound = self.bind(text, side, heads=heads)
        n, dim = whole(bound, 32), self.dim()
        offsets = mx.array([3.0 * (h + 1) * (-1) ** h for h in range(heads)]).reshape(1, heads, 1, 1)
        x = (gaussian((4, heads, n, dim), "float32", seed=5) + offsets).astype(mx.float16)
        together = pack(bound, x)
        for row in (0, 3):
            alone = pack(bound, x[row : row + 1])
            for name, array in alone.items():
                assert_same(together[name][row : row + 1], array, f"{text}, {side}, row {row} of 4, {name}")
        same = pack(bound, mx.broadcast_to(x[1:2], x.shape))
        for name, array in same.items():
            assert_same(array[3], together[name][1], f"{text}, {side}, one row four times, {name}")
        if heads == 1:
            return
        changed = mx.concatenate([x[:, :1], x[:, 1:] * 3 - 2], axis=1)
        for name, array in pack(bound, changed).items():
            assert_same(array[:, 0], together[name][:, 0], f"{text}, {side}, head 0 after others changed, {name}")

    def test_layout_tells_the_bytes(self, text: str, side: Side) -> None:
        """A page of tokens takes the bytes that the layout says, and the prepared state keeps no tokens."""
        bound = self.bind(text, side)
        layout = bound.layout
        before = sum(a.nbytes for a in state_arrays(bound.state))
        x = gaussian((1, self.kv_heads, layout.page, self.dim()), seed=7)
        packed = pack(bound, x)
        for field in layout.fields:
            wide = packed[field.name].dtype.size // getattr(mx, field.dtype).size
            assert packed[field.name].nbytes == field.nbytes * self.kv_heads * wide
        assert sum(a.nbytes for a in state_arrays(bound.state)) == before, "the method's state grew while encoding"
        assert any(f.codes for f in layout.fields), "no field is marked codes=True: the byte report would show none"

    def test_key_and_value_sizes_differ(self) -> None:
        """Keys of one head size and values of another keep their own."""
        accepted = self.capabilities().head_dims
        sizes = [d for d in (192, 128, 64, 80, 256) if accepted is None or d in accepted][:2]
        if len(sizes) < 2:
            skip(f"head_dims={accepted}", "needs two head sizes")
        cache = self.cache(residual=16)
        k, v = (gaussian((1, self.kv_heads, 140, d), seed=d) for d in sizes)
        cache.update_and_fetch(k, v)
        keys, values = cache.decode()
        assert (keys.shape, values.shape) == (k.shape, v.shape)
        assert np.array_equal(raw(keys[:, :, -16:]), raw(k[:, :, -16:]))

    def test_calibration(self, side: Side) -> None:
        """A method that needs an artifact refuses to be bound without one."""
        if not self.capabilities().needs_calibration:
            skip("needs_calibration=False")
        with pytest.raises(SettingsError):
            self.bind(parse_choice(self.method).label, side)
