"""Every installed method's fused kernels against the plain operations that they stand for.

A method is asked for its offers (``vq_kernels``) and bound twice, with kernels and without; both do the same work
through the same calls that a cache makes.  Bytes are those of the arrays that are read and written, and a copy kernel
runs beside them in the same turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.api.facts import SIDES, PrepareContext, Side
from vq_core.api.layout import Layout
from vq_core.api.settings import build_settings, format_choice, parse_choice
from vq_core.bench.busy import Machine, look
from vq_core.bench.clock import POOL, Comparison, compare, environment, queue_length
from vq_core.bench.inputs import Item, Timed, arm, bytes_read, differs, item_of, nbytes, noise
from vq_core.calibration.stand_in import completed
from vq_core.errors import HostError, PluginError, SettingsError, VQError
from vq_core.kernels.offers import KernelOffer
from vq_core.plugins import fused
from vq_core.plugins.binding import BoundSide, bind
from vq_core.plugins.loader import make_manager
from vq_core.plugins.records import MethodRecord
from vq_core.plugins.registry import list_methods, resolve

OPERATIONS: tuple[Timed, Timed] = ("encode+pack", "decode")
SERVES = {"encode+pack": "vq_pack", "decode": "vq_decode"}
DTYPES = ("float16", "bfloat16", "float32")
COPY = "mx.negative of float16: reads an array, writes another"
MEMORY = 8 << 30
"""Bytes of results that one evaluation may leave, at most: a queue of calls holds all of theirs."""
BEYOND_CACHES = 256 << 20
"""Bytes that a pool of inputs is made to exceed, up to 32 of them."""
NO_CLOCK = "the simulator is not a clock"
Bits = int | float | str | None
"""As a method's settings give it: 4, 2.5, "2+2"."""


@attrs.frozen
class Wanted:
    """What to measure.

    Attributes:
        methods: Texts such as ``"kivi"`` or ``"kivi:bits=8"``; empty: every installed method that offers kernels.
        tokens: Sequence lengths, made up to whole blocks of all the method's sides.
        bits: Values of a setting ``bits``, where a method has one that its text does not give.
        dtype, heads, head_dim: Of the numbers, B = 1.
        rounds: Turns of a comparison; single calls, which take less time and vary more, get four times as many.
        calls: Calls queued before one evaluation, at least.
        shares: Of the operation in a whole step, for estimates of what the step gains at most.
        copied: Bytes of one array of the large copy.
    """

    methods: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (32, 2048, 32768)
    bits: tuple[int, ...] = (2, 4)
    dtype: str = "float16"
    heads: int = 8
    head_dim: int = 128
    rounds: int = 24
    calls: int = 20
    shares: tuple[float, ...] = ()
    copied: int = 128 << 20

    def __attrs_post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("heads", "head_dim", "rounds", "calls", "copied")}
        counts |= {f"tokens {n}": n for n in self.tokens} | {f"bits {n}": n for n in self.bits}
        wrong = [name for name, value in counts.items() if value < 1]
        if wrong or not self.tokens or not self.bits:
            raise SettingsError(f"{', '.join(wrong) or 'tokens, bits'}: at least one number, each 1 or more, is needed")
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype {self.dtype!r}: accepted are {', '.join(DTYPES)}")
        for share in self.shares:
            if not 0 <= share <= 1:
                raise SettingsError(f"share {share!r}: the operation's part of a whole step is from 0 to 1")


@attrs.frozen(eq=False)
class Served:
    """A method that was bound, with kernels and without."""

    method: str
    bits: Bits
    plain: Mapping[Side, BoundSide]
    kernel: Mapping[Side, BoundSide]
    offers: Sequence[KernelOffer]

    def said(self, operation: Timed, side: Side) -> str:
        """Which kernels serve a side, for the record; empty where none does."""
        name = SERVES[operation]
        said = next(found.implementation for found in self.kernel[side].operations if found.name == name)
        plain = next(found.implementation for found in self.plain[side].operations if found.name == name)
        return "" if said == plain else said

    def declined(self, operation: Timed, side: Side) -> str:
        """Why none does."""
        name = SERVES[operation]
        return "; ".join(next(found.declined for found in self.kernel[side].operations if found.name == name))

    def tolerance(self, operation: Timed) -> float:
        """What its kernels state: 0 where all are exact."""
        kernels = [kernel for offer in self.offers if offer.operation == operation for kernel in offer.kernels]
        return max((kernel.tolerance for kernel in kernels if not kernel.exact), default=0.0)


def measure(
    wanted: Wanted, *, kernels: str = "auto", tell: Callable[[str], None] = lambda line: None,
    machine: Callable[[], Machine] = look,
) -> dict[str, Any]:  # fmt: skip
    """Measure and return the record, as JSON can hold it: environment, what was asked for, copy, rows, left out.

    Args:
        wanted: What.
        kernels: As a policy's; with ``"simulator"`` everything runs, and no ratio is given.
        tell: Gets a line about each thing that is measured next.
        machine: For tests.

    Raises:
        SettingsError: a method or a setting that is not accepted; no method offers kernels.
        HostError: a device without kernels.
    """
    facts = environment()
    chosen, left_out = choices(wanted)
    backend, why_not = fused.backend_for(kernels)
    if backend is None:
        raise HostError(
            f"nothing to measure: {why_not}, and the simulator is not a clock; "
            "run this on a machine with an Apple or NVIDIA GPU"
        )
    refuse = (NO_CLOCK,) if backend == "simulator" else ()
    bench = _Bench(wanted, refuse, machine, tell)
    served = [s for text, bits, offers in chosen for s in _bound(wanted, text, bits, offers, kernels, left_out)]
    rows = [row for one in served for tokens in wanted.tokens for row in bench.rows(one, tokens, left_out)]
    if not rows:
        reasons = "; ".join(dict.fromkeys(f"{entry['method']}: {entry['reason']}" for entry in left_out))
        raise SettingsError(f"nothing to measure: {reasons or 'no methods are installed, see `vq list-methods`'}")
    return {
        "environment": facts,
        "backend": backend,
        "wanted": attrs.asdict(wanted),
        "copy": bench.copy.record(),
        "rows": rows,
        "left_out": left_out,
    }


def choices(wanted: Wanted) -> tuple[list[tuple[str, Bits, Sequence[KernelOffer]]], list[dict[str, str]]]:
    """Methods with their settings, bits and offers; and those that are left out, with the reason."""
    left_out: list[dict[str, str]] = []
    found: list[tuple[str, Bits, Sequence[KernelOffer]]] = []
    for text in wanted.methods or [record.label for record in list_methods() if record.status == "ok"]:
        parsed = parse_choice(text)
        record = resolve(parsed.label)
        assert record.facts is not None
        cls = record.facts.settings
        try:
            offers = _offers(record)
            given = dict(parsed.options)
            # A text such as 2+2 is no number to go through.
            sweep = "bits" not in given and isinstance(_default(cls, "bits"), int | float)
            for bits in wanted.bits if sweep else (None,):
                options = parsed.options + ((("bits", str(bits)),) if bits is not None else ())
                settings = build_settings(record.name, cls, options)
                found.append((format_choice(parsed.label, settings), getattr(settings, "bits", None), offers))
        except VQError as error:
            if wanted.methods:
                raise
            left_out.append({"method": record.name, "reason": str(error)})
    return found, left_out


def _default(cls: type, name: str) -> Any:
    """Of a setting; nothing where there is none of that name."""
    return getattr(attrs.fields_dict(cls).get(name), "default", None)


def _offers(record: MethodRecord) -> Sequence[KernelOffer]:
    try:
        offers = make_manager(record.plugin, record.name).hook.vq_kernels() or ()
    except Exception as error:  # whatever a stranger's code raises becomes one typed error that names it
        raise PluginError(f"method {record.name!r}: vq_kernels failed with {type(error).__name__}: {error}") from error
    offers = [offer for offer in offers if offer.operation in OPERATIONS and offer.run is not None]
    if not offers:
        raise SettingsError(f"method {record.name!r} offers no kernels for {' or '.join(OPERATIONS)}")
    return offers


def _bound(
    wanted: Wanted, text: str, bits: Bits, offers: Sequence[KernelOffer], kernels: str,
    left_out: list[dict[str, str]],
) -> list[Served]:  # fmt: skip
    record = resolve(parse_choice(text).label)
    assert record.facts is not None
    plain: dict[Side, BoundSide] = {}
    kernel: dict[Side, BoundSide] = {}
    for side in (side for side in SIDES if side in record.facts.sides):
        ctx = PrepareContext(side, wanted.heads, wanted.head_dim, wanted.head_dim, wanted.dtype)
        try:
            text = completed(text, [(wanted.heads, wanted.head_dim)])
            plain[side] = bind(text, ctx, kernels="off")
            kernel[side] = bind(text, ctx, kernels=kernels)
        except VQError as error:
            if wanted.methods:
                raise
            left_out.append({"method": text, "reason": f"{side}: {error}"})
    return [Served(text, bits, plain, kernel, offers)]


@attrs.frozen(eq=False)
class Copy:
    """The large copy: bytes read and written a call, and how long it takes."""

    moved: int
    found: Comparison

    @property
    def rate(self) -> float:
        """Bytes a second, read and written together."""
        return self.moved / self.found.arms["copy"].median

    def record(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"kernel": COPY, "bytes_read_and_written": self.moved, "bytes_per_second": round(self.rate)}
        return facts | self.found.as_dict()


class _Bench:
    """One run: what it was asked for, and the copy that its rates are set against."""

    def __init__(
        self, wanted: Wanted, refuse: Sequence[str], machine: Callable[[], Machine], tell: Callable[[str], None]
    ):
        self.wanted, self.refuse, self.machine, self.tell = wanted, refuse, machine, tell
        self._copy: Copy | None = None

    @property
    def copy(self) -> Copy:
        """Measured when it is first needed."""
        if self._copy is None:
            self.tell(f"copy of {self.wanted.copied} bytes")
            pool = [noise((self.wanted.copied // 2,), "float16", i) for i in range(POOL)]
            moved = 2 * pool[0].nbytes
            self._copy = Copy(moved, self._compare({"copy": mx.negative}, pool, moved // 2, built=True))
        return self._copy

    def rows(self, served: Served, tokens: int, left_out: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Each operation, of each side that a kernel serves, and of both together."""
        found = []
        for operation in OPERATIONS:
            sides = [side for side in served.kernel if served.said(operation, side)]
            for side in served.kernel:
                reason = served.declined(operation, side) or "no kernel is offered"
                entry = {"method": served.method, "reason": f"{operation} of {side}: {reason}"}
                if side not in sides and entry not in left_out:
                    left_out.append(entry)
            for group in [(side,) for side in sides] + ([tuple(sides)] if len(sides) > 1 else []):
                found.append(self._row(served, operation, group, tokens))
        return found

    def _row(self, served: Served, operation: Timed, sides: tuple[Side, ...], tokens: int) -> dict[str, Any]:
        tokens = whole(tokens, [bound.layout for bound in served.plain.values()])
        self.tell(f"{served.method}, {tokens} tokens, {operation} of {' and '.join(sides)}")
        plain, kernel = (arm(operation, sides, bound) for bound in (served.plain, served.kernel))
        pool = self._pool(served, operation, sides, tokens)
        wrong = differs(sides, kernel(pool[0]), plain(pool[0]), served.tolerance(operation))
        read, written = bytes_read(pool[0], operation, sides), nbytes(plain(pool[0]))
        arms = {"plain": plain, "kernel": kernel}
        queued = self._compare(arms, pool, written, wrong)
        copied = {"kernel": kernel, "copy": lambda item: mx.negative(item.copied)}
        built = self._compare(copied, pool, written, wrong, built=True)
        single = self._compare(arms, pool, written, wrong, queue=False)
        del pool
        mx.clear_cache()
        return {
            "method": served.method,
            "bits": served.bits,
            "operation": operation,
            "side": "+".join(sides),
            "tokens": tokens,
            "heads": self.wanted.heads,
            "head_dim": self.wanted.head_dim,
            "dtype": self.wanted.dtype,
            "kernels": {side: served.said(operation, side) for side in sides},
            "agrees": not wrong,
            "bytes_read": read,
            "bytes_written": written,
            "queued": _figures(queued),
            "single": _figures(single),
            "bandwidth": self._bandwidth(built, read + written),
            "whole_step": [queued.end_to_end("kernel", share) for share in self.wanted.shares],
        }

    def _pool(self, served: Served, operation: Timed, sides: tuple[Side, ...], tokens: int) -> list[Item]:
        """Inputs, evaluated: more than caches hold, where that takes no more than 32."""
        first = item_of(served.plain, operation, sides, tokens, 0)
        count = max(POOL, min(32, math.ceil(BEYOND_CACHES / bytes_read(first, operation, sides))))
        return [first, *(item_of(served.plain, operation, sides, tokens, i) for i in range(1, count))]

    def _compare(
        self, arms: Mapping[str, Callable[[Any], Any]], pool: Sequence[Any], left: int, wrong: str = "",
        queue: bool = True, built: bool = False,
    ) -> Comparison:  # fmt: skip
        most = max(1, min(100, min(MEMORY, mx.get_memory_limit() // 4) // max(1, left)))
        inner = queue_length(arms, pool, least=self.wanted.calls, most=most) if queue else 1
        refuse = (*self.refuse, wrong) if wrong else self.refuse
        rounds = self.wanted.rounds * (1 if queue else 4)
        attempts = 1 if self.refuse else 3
        return compare(
            arms, pool, rounds=rounds, inner=inner, built=built, attempts=attempts, refuse=refuse,
            machine=self.machine,
        )  # fmt: skip

    def _bandwidth(self, built: Comparison, moved: int) -> dict[str, Any]:
        """Of the kernel, and over that of the faster of two copies: of as many bytes, and of many.

        The calls are built before the clock starts: what Python costs is in the other clocks.
        """
        time = built.arms["kernel"].median
        equal = moved / built.arms["copy"].median
        refused = built.refused("kernel", "copy") + self.copy.found.refused("copy")
        fastest = max(equal, self.copy.rate)
        return {
            "bytes_per_second": round(moved / time),
            "copy_of_as_many_bytes_per_second": round(equal),
            "large_copy_bytes_per_second": round(self.copy.rate),
            "fraction_of_copy": None if refused else round(moved / time / fastest, 4),
            "noise_floor": round(max(built.floor("kernel", "copy"), self.copy.found.noise), 4),
            "refused": list(dict.fromkeys(refused)),
        }


def whole(tokens: int, layouts: Sequence[Layout]) -> int:
    """Tokens made up to whole blocks of every layout."""
    block = math.lcm(*(layout.block for layout in layouts))
    return -(-tokens // block) * block


def _figures(found: Comparison) -> dict[str, Any]:
    ratio = found.ratio("kernel")
    return {
        "times_as_fast": None if ratio is None else round(1 / ratio, 4),
        "noise_floor": round(found.floor("kernel"), 4),
        "inside_noise": found.inside_noise("kernel"),
        "refused": list(found.refused("kernel")),
        "said": found.said("kernel"),
        "comparison": found.as_dict(),
    }
