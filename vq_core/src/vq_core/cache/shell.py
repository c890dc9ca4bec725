"""PackedKVCache: one layer's cache, the same shell for every method."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx

from vq_core.api.facts import Rope
from vq_core.attention import view as views
from vq_core.attention.masks import causal_mask
from vq_core.attention.packed import attend
from vq_core.attention.view import CacheView
from vq_core.cache.history import EVERYTHING, History
from vq_core.cache.policy import Attention, Fallback, Kernels, LayerPolicy
from vq_core.cache.report import LayerReport, describe
from vq_core.cache.rows import joined
from vq_core.cache.shapes import DTYPES, check_pair, shape_of
from vq_core.cache.sides import bind_sides
from vq_core.cache.tagged import Coming, ReadCount, Strictness, tag
from vq_core.cache.trimming import check_cut, methods_trim
from vq_core.errors import CacheStateError, SettingsError, UnsupportedShapeError


class PackedKVCache:
    """A KV cache of one layer that keeps packed codes at rest, with mlx-lm's cache protocol.

    Args:
        method: Method of both sides in text form, such as ``"kivi:bits=4"``; excludes ``keys`` and ``values``.
        keys: Method of the keys.
        values: Method of the values.
        residual: The newest tokens that stay exact, R; R to R + block - 1 do. 0 is allowed.
        sink_tokens: The first tokens of a sequence that stay exact.
        attention: Tier, such as ``"auto"``, see :class:`~vq_core.cache.policy.LayerPolicy`.
        fallback: ``"error"`` or ``"warn"``, see there.
        kernels: ``"auto"``, ``"off"`` or ``"simulator"``, see there.
        sliding: W for a layer that attends to its newest W tokens only, as mlx-lm's ``RotatingKVCache(max_size=W)``:
            older tokens are dropped, whole pages at once. Excludes ``sink_tokens``.

    Raises:
        SettingsError: an unknown method or a value that is not accepted.
        PluginError: a method that is installed but cannot be used.
    """

    def __init__(
        self,
        *,
        method: str | None = None,
        keys: str | None = None,
        values: str | None = None,
        residual: int = 128,
        sink_tokens: int = 0,
        attention: Attention = "auto",
        fallback: Fallback = "error",
        kernels: Kernels = "auto",
        sliding: int | None = None,
    ):
        self._setup(
            LayerPolicy.make(
                method=method,
                keys=keys,
                values=values,
                residual=residual,
                sink_tokens=sink_tokens,
                attention=attention,
                fallback=fallback,
                kernels=kernels,
            ),
            sliding=sliding,
        )

    @classmethod
    def from_policy(
        cls, policy: LayerPolicy, *, layer: int | None = None, rope: Rope | None = None,
        model: str | None = None, strict: bool | Strictness = False, strict_lengths: Collection[int] | None = None,
        sliding: int | None = None, device_form: bool = False,
    ) -> PackedKVCache:  # fmt: skip
        """A cache of a checked policy, with what a host knows of the layer.

        ``strict``: ``update_and_fetch`` returns tags without a dense side, for hosts that know that the model
        hands them to attention and does nothing else with them, or that host's word on it, asked at each update;
        ``strict_lengths``: for chunks of these lengths alone; ``device_form``: see there.
        """
        cache = cls.__new__(cls)
        cache._setup(policy, layer, rope, model, strict, strict_lengths, sliding)
        cache.device_form = device_form
        return cache

    device_form = False
    """Whether pages are held in the order of the device's kernels, where both methods have one."""

    def _setup(
        self, policy: LayerPolicy, layer: int | None = None, rope: Rope | None = None,
        model: str | None = None, strict: bool | Strictness = False, strict_lengths: Collection[int] | None = None,
        sliding: int | None = None,
    ) -> None:  # fmt: skip
        if sliding is not None:
            if isinstance(sliding, bool) or not isinstance(sliding, int) or sliding < 1:
                raise SettingsError(f"sliding must be a window of 1 token or more, or None; got {sliding!r}")
            if policy.sink_tokens:
                raise SettingsError("sink_tokens has no effect in a sliding window: the first tokens leave it; give 0")
        self.policy, self.sliding = policy, sliding
        self.layer, self._rope, self._model, self._strict = layer, rope, model, strict
        self._strict_lengths, self._flushes = strict_lengths, True
        self._history: History | None = None
        self._lasting: tuple[tuple[Any, ...], str] | None = None
        self.reads = ReadCount()

    # ---- growing and reading

    def prepare_for(self, *, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype, rows: int = 1) -> None:
        """Bind the methods to a layer's shape before the first token.

        Raises:
            SettingsError, UnsupportedShapeError: a method refuses the shape.
            PluginError: a method breaks the contract.
        """
        if self._history is not None:
            raise CacheStateError("the cache is bound already")
        self._history = self._bind(kv_heads, key_dim, value_dim, dtype, rows)

    def _bind(self, kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype, rows: int) -> History:
        name = str(dtype).removeprefix("mlx.core.")
        if name not in DTYPES:
            raise UnsupportedShapeError(f"keys and values of {name}: accepted are {', '.join(DTYPES)}")
        shape = {"kv_heads": kv_heads, "key_dim": key_dim, "value_dim": value_dim, "dtype": name}
        shape |= {"rope": self._rope, "model": self._model}
        sides = bind_sides(self.policy, shape, self.layer, self.device_form)
        residual = self.policy.residual if self._flushes else EVERYTHING
        return History(sides[0], sides[1], residual, self.policy.sink_tokens, rows, self.sliding)

    def hold_all(self) -> None:
        """Pack nothing, whatever comes: for a trial run, in which a method must not look at numbers."""
        self._flushes = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append tokens and return all of them, tagged so that attention finds the packed codes.

        Args:
            keys: (B, H, L, D_k), after the rotary embedding.
            values: (B, H, L, D_v).

        Returns:
            Two arrays (B, H, T, D) whose dense value exists only if somebody asks for it. The L new tokens are
            exact in them. In a sliding window of W, T is what L queries attend to together, W - 1 + L at most.

        Raises:
            UnsupportedShapeError: shapes or dtypes that do not fit each other or the cache; nothing has changed.
        """
        # All on a window or a history apart and one assignment: what fails or is interrupted has not happened.
        history, policy = self._history, self.policy
        made: tuple[History, CacheView | Coming] | None = None if history is None else history.step(keys, values)
        if made is None:
            draft = self._draft(keys, values)
            made = draft, draft.update(keys, values)
        known = self._strict_lengths is None or keys.shape[2] in self._strict_lengths
        tags = tag(made[1], policy.attention, self.reads, known and self._strict, policy.fallback)
        self._history = made[0]
        self.reads.updates += 1
        return tags

    def _draft(self, keys: mx.array, values: mx.array) -> History:
        """A history to append checked tokens to."""
        self._check(keys, values)
        history = self._history
        if history is None or (self.empty() and self._shape() != shape_of(keys, values)):
            # Not bound yet, or bound ahead of the first token to what the layer has turned out not to be.
            history = self._bind(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.shape[0])
        return history.draft()

    def _check(self, keys: mx.array, values: mx.array) -> None:
        check_pair(keys, values)
        had, now = self._shape(), shape_of(keys, values)
        if not self.empty() and had != now:
            names = ("B", "H", "D of the keys", "D of the values", "dtype")
            changed = ", ".join(f"{n} {a} -> {b}" for n, a, b in zip(names, had, now, strict=True) if a != b)
            raise UnsupportedShapeError(f"the cache holds another shape: {changed}; start a new cache for a new shape")

    def _shape(self) -> tuple[Any, ...]:
        """B, H, D of the keys, D of the values and dtype that the cache is bound to; empty if it is not."""
        if self._history is None:
            return ()
        ctx = self._history.bound["keys"].ctx
        return (self._history.rows, ctx.kv_heads, ctx.key_dim, ctx.value_dim, ctx.dtype)

    def keys_and_values(self) -> tuple[Any, Any]:
        """All tokens, tagged, without adding any; what models that share a layer's cache read.

        Of a sliding window those that the last update gave.

        Raises:
            CacheStateError: the cache is empty, or the sliding window has dropped some of those tokens since.
        """
        self.reads.fetches += 1
        self._view()
        assert self._history is not None
        return tag(self._history.latest(), self.policy.attention, self.reads, self._strict, self.policy.fallback)

    def decode(self) -> tuple[mx.array, mx.array]:
        """All tokens in order as plain arrays (B, H, T, D) in the model's dtype; rows are aligned at the right.

        Raises:
            CacheStateError: the cache is empty.
        """
        view = self._view()
        return views.dense(view, view.keys), views.dense(view, view.values)

    def attend(
        self,
        queries: mx.array,
        *,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attention over all tokens as they are stored; see :func:`vq_core.attention.packed.attend`.

        ``sinks`` are the model's learned attention sinks, (H_q,).
        """
        policy = self.policy
        return attend(
            self._view(), queries, scale=scale, mask=mask, sinks=sinks, tier=policy.attention, fallback=policy.fallback
        )

    def _view(self) -> CacheView:
        if self._history is None or self.empty():
            raise CacheStateError("the cache is empty: call update_and_fetch first")
        return self._history.view()

    # ---- mlx-lm's protocol

    @property
    def keys(self) -> mx.array | None:
        """A handle without keys in it, for ``cache.keys = mx.depends(cache.keys, x)``; ``None`` while empty.

        Models write so to have x evaluated with this cache. :meth:`decode` gives the keys.
        """
        return None if self._history is None or self.empty() else mx.zeros((0,), mx.uint8)

    @keys.setter
    def keys(self, handle: mx.array) -> None:
        if self._history is None or self.empty() or not isinstance(handle, mx.array) or handle.shape != (0,):
            raise CacheStateError(
                "keys of a packed cache cannot be set: only what mx.depends made of its own keys is accepted, after "
                "the first update; update_and_fetch adds tokens"
            )
        draft = self._history.draft()
        draft.window.depend(handle)
        self._history = draft

    @property
    def offset(self) -> int:
        """Tokens of the longest row; the rotary position of the next token of an even batch."""
        history = self._history
        return 0 if history is None else history.longest

    def size(self) -> int:
        """Tokens that the next token can attend to."""
        return self.offset if self.sliding is None else min(self.offset, self.sliding)

    def empty(self) -> bool:
        """Whether no token is held."""
        return not self.offset

    @property
    def nbytes(self) -> int:
        """Bytes of every array held, spare capacity included; the methods' shared constants are apart."""
        return 0 if self._history is None else self._history.nbytes

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be dropped, now and later.

        False from the start where a method cannot be trimmed: mlx-lm asks once, on empty caches, before it speculates.
        False once tokens have left a sliding window for good.
        """
        history = self._history
        return methods_trim(self.policy, history) and not (history is not None and any(history.dropped))

    def trim(self, n: int) -> int:
        """Drop the newest n tokens, at most all of the shortest row; returns how many were dropped.

        Of a method that cannot be trimmed the tokens of the exact window can still be dropped.

        Raises:
            SettingsError: a negative count.
            CacheStateError: the cut reaches packed tokens of a method that cannot be trimmed.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise SettingsError(f"trim({n!r}): the count must be a whole number of tokens, 0 or more")
        if self._history is None or self.empty():
            return 0
        n = min(n, min(self._history.lengths))
        check_cut(self.policy, self._history, n)
        if n:
            draft = self._history.draft()
            draft.trim(n)
            # A lazy array belongs to the thread that made it; the next to generate may be another.
            mx.async_eval(draft.arrays())  # type: ignore[no-untyped-call]
            self._history = draft
        return n

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The causal mask of N new tokens, as mlx-lm's caches make it."""
        if N == 1 and window_size is None:
            return None
        return causal_mask(N, self.offset, self.sliding, window_size, return_array)

    @property
    def state(self) -> list[Any]:
        """One text leaf that says what this is, then every array; enough to make the cache again."""
        from vq_core.cache.state import dump

        return dump(self)

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        from vq_core.cache.state import restore

        made = type(self).__new__(type(self))  # so that a state that is refused changes nothing
        made.device_form = self.device_form
        restore(made, value)
        self.__dict__.update(made.__dict__)

    @classmethod
    def from_state(cls, state: Sequence[Any], meta_state: Any = None) -> PackedKVCache:
        """A cache from what :attr:`state` gave.

        ``meta_state`` is what caches of mlx-lm before 0.32 were made from as well; nothing of ours has one.

        Raises:
            FormatError, SettingsError, PluginError: as :func:`vq_core.cache.state.rebuild`.
            HostError: a ``meta_state`` was given.
        """
        if meta_state is not None:
            from vq_core.hosts.mlx_lm.versions import other_protocol

            raise other_protocol()
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedKVCache:
        """A copy that shares the arrays, which are never changed in place: it costs no memory until it grows."""
        new = type(self).__new__(type(self))
        new._setup(self.policy, self.layer, self._rope, self._model, self._strict, self._strict_lengths, self.sliding)
        new.device_form = self.device_form
        new._history = None if self._history is None else self._history.copy()
        return new

    # ---- rows of a batch

    @classmethod
    def join(cls, caches: Sequence[PackedKVCache]) -> PackedKVCache:
        """One batch of the rows of several caches of one policy and shape, in order.

        Raises:
            SettingsError: caches of different policies or shapes, or none at all.
        """
        caches = list(caches)
        if not caches or not all(isinstance(c, PackedKVCache) for c in caches):
            raise SettingsError("join needs a list of at least one PackedKVCache, and nothing else")
        new = caches[0].__deepcopy__({})
        new._history = joined([((c.policy, c.sliding), c._history) for c in caches])
        return new

    def select(self, rows: Sequence[int]) -> PackedKVCache:
        """A cache of its own with some rows, in the order given."""
        if self._history is None or self.empty():
            raise CacheStateError("select: the cache is empty, it has no rows")
        try:
            rows = [operator.index(r) for r in rows]
        except TypeError:
            raise SettingsError(f"select({rows!r}): give a list of row numbers") from None
        if not rows or any(not 0 <= r < self._history.rows for r in rows):
            raise SettingsError(f"select({rows}): the cache has rows 0 to {self._history.rows - 1}")
        new = self.__deepcopy__({})
        assert self._history is not None
        new._history = self._history.select(rows)
        return new

    def split(self) -> list[PackedKVCache]:
        """One cache a row."""
        return [self.select([row]) for row in range(0 if self.empty() else self._history.rows)]  # type: ignore[union-attr]

    # ---- telling

    def report(self) -> LayerReport:
        """What is held, where and how; see :class:`~vq_core.cache.report.LayerReport`."""
        return describe(self.policy, self._history, self.reads, self.layer, self.sliding)
