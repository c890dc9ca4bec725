"""Every kernel against its reference: what ``vq verify`` runs, and every method's test suite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

from vq_core.errors import KernelError, PluginError, VQError
from vq_core.kernels.backends import Runner
from vq_core.kernels.kernel import Case, Kernel
from vq_core.kernels.simulated import instance, program
from vq_core.kernels.simulator import Program, build
from vq_core.kernels.simulator.program import Contract


@attrs.frozen
class Verdict:
    """One kernel on one backend.

    Attributes:
        method: Whose it is; ``"core"`` for the core's own.
        kernel: Its name.
        stands_for: The operation.
        backend: Where it ran.
        configurations: Cases that were compared.
        identical: Whether all of them were, bit for bit (any NaN equals any other).
        max_difference: The largest difference over the largest magnitude of its reference, 0 where identical.
        passed: Identical, or within the tolerance that the kernel states.
        differing: Cases that did not pass.
        first: The first of them, with its output, in words.
        error: What stopped it, if anything did.
    """

    method: str
    kernel: str
    stands_for: str
    backend: str
    configurations: int = 0
    identical: bool = True
    max_difference: float = 0.0
    passed: bool = True
    differing: int = 0
    first: str = ""
    error: str = ""


def verify(method: str, kernel: Kernel, backend: str, runner: Runner, limit: int | None = None) -> Verdict:
    """Run a kernel's cases (at most ``limit``, see :func:`spread`) and compare with the reference, made on the CPU."""
    verdict = Verdict(method, kernel.name, kernel.stands_for, backend)
    case = Case(())
    try:
        for case in spread(kernel.cases(), limit):
            got = kernel.run_on(runner, *case.inputs, **case.parameters)
            with mx.stream(mx.cpu):
                want = tuple(kernel.equals(*case.inputs, **case.parameters))
                mx.eval(want)
            mx.eval(got)
            names = tuple(kernel.outputs)
            if kernel.compared is not None:
                got = tuple(kernel.compared(*got))
                names = tuple(f"what is compared of it ({i})" for i in range(len(got)))
            verdict = _add(verdict, kernel, case, got, want, names)
    except Exception as error:  # MLX's for a failed compilation, or a stranger's cases and reference
        said = str(error) if isinstance(error, VQError) else f"{type(error).__name__}: {error}"
        return attrs.evolve(verdict, passed=False, identical=False, error=f"{case.name}: {said}".removeprefix(": "))
    if not verdict.configurations:
        return attrs.evolve(verdict, passed=False, identical=False, error="it has no cases: nothing was compared")
    return verdict


def build_ahead(kernels: Iterable[Kernel], contract: Contract = "off", limit: int | None = None) -> None:
    """Compile for the simulator, in one unit, the variants that :func:`verify` will run: one by one takes longer.

    What does not compile fails where it is run.
    """
    wanted: dict[Program, list[tuple[object, ...]]] = {}
    for kernel in kernels:
        try:
            calls = [kernel.resolve(case.inputs, case.parameters) for case in spread(kernel.cases(), limit)]
        except Exception:  # a stranger's cases; the verdict of `verify` on this kernel tells what they raise
            continue
        wanted[program(kernel)] = list(dict.fromkeys(instance(call) for call in calls))
    with contextlib.suppress(KernelError):
        build(wanted, contract=contract)


def _add(
    verdict: Verdict, kernel: Kernel, case: Case, got: Sequence[mx.array], want: Sequence[mx.array],
    names: Sequence[str],
) -> Verdict:  # fmt: skip
    worst, said = 0.0, ""
    identical = True
    if not len(names) == len(got) == len(want):
        raise PluginError(f"its reference gives {len(want)} arrays; it has {len(names)} outputs")
    for name, a, b in zip(names, got, want, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            worst, identical, said = float("inf"), False, f"{name} is {a.shape} {a.dtype}, not {b.shape} {b.dtype}"
            break
        if same_bits(a, b):
            continue
        identical = False
        difference = relative(a, b)
        if difference >= worst:
            worst, said = difference, f"{name} differs by {difference:.2e}"
    passed = identical or (not kernel.exact and worst <= kernel.tolerance)
    return attrs.evolve(
        verdict,
        configurations=verdict.configurations + 1,
        identical=verdict.identical and identical,
        max_difference=max(verdict.max_difference, worst),
        passed=verdict.passed and passed,
        differing=verdict.differing + (not passed),
        first=verdict.first or ("" if passed else f"{case.name}: {said}"),
    )


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays of one shape and dtype hold the same bits, any NaN being as good as another."""
    x, y = _numbers(a), _numbers(b)
    equal = _bits(a) == _bits(b)
    if mx.issubdtype(a.dtype, mx.floating):
        equal |= np.isnan(x) & np.isnan(y)
    return bool(equal.all())


def relative(a: mx.array, b: mx.array) -> float:
    """The largest difference over the largest finite magnitude of ``b``; infinite where one has a NaN or Inf alone."""
    x, y = _numbers(a).astype(np.float64), _numbers(b).astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    with np.errstate(invalid="ignore"):
        alike = finite | (x == y) | (np.isnan(x) & np.isnan(y))
    if not alike.all():
        return float("inf")
    if not finite.any():
        return 0.0
    x, y = x[finite], y[finite]
    return float(np.abs(x - y).max() / max(float(np.abs(y).max()), 1e-30))


def _numbers(a: mx.array) -> np.ndarray[Any, Any]:
    return np.array(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a)


def _bits(a: mx.array) -> np.ndarray[Any, Any]:
    unsigned = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    return np.array(a.view(unsigned))


def spread(cases: Iterable[Case], limit: int | None) -> list[Case]:
    """At most ``limit`` of the cases, drawn from all, the same at each call: a step would meet one dtype only."""
    found = list(cases)
    if limit is None or limit >= len(found):
        return found
    chosen = np.random.default_rng(0).permutation(len(found))[:limit]
    return [found[i] for i in sorted(chosen)]
