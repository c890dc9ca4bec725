"""A package's own kernels: equal to their references in every configuration, and caught when they are broken.

:class:`KernelConformance` runs some configurations of what a method offers; these two run all, and show that parity can
fail.  A test file subclasses them and names the kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest

from vq_core.kernels.golden import differences
from vq_core.kernels.growth import grows
from vq_core.kernels.kernel import Case, Kernel
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.simulator.program import Contract
from vq_core.kernels.verify import Verdict, build_ahead, verify
from vq_core.plugins.offered import offered_kernels

CONTRACTS: tuple[Contract, ...] = ("off", "fast")


class KernelParity:
    """Each kernel in the simulator, bit for bit its reference; its text.

    Attributes:
        kernels: All that the package has.
        configurations: Of each kernel at least so many.
        runs: Contraction of multiply and add, an order of lanes and threadgroups, and how many configurations are run
            with both; ``None``: all.
        variants: Of a kernel at most so many texts.
        golden: Methods, and of each the folder that ``python -m vq_core.kernels.golden METHOD FOLDER`` has filled.
    """

    kernels: ClassVar[Sequence[Kernel]]
    configurations: ClassVar[int] = 72
    runs: ClassVar[Sequence[tuple[Contract, int, int | None]]] = (
        ("off", 0, None), ("off", 1, 24), ("fast", 1, None), ("fast", 0, 24)
    )  # fmt: skip
    variants: ClassVar[int] = 24
    golden: ClassVar[Sequence[tuple[str, Path]]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Spread ``contract``, ``kernel`` and ``golden_of``."""
        if "contract" in metafunc.fixturenames:
            metafunc.parametrize("contract", list(dict.fromkeys(contract for contract, _, _ in self.runs)))
        if "kernel" in metafunc.fixturenames:
            metafunc.parametrize("kernel", self.kernels, ids=lambda kernel: kernel.name)
        if "golden_of" in metafunc.fixturenames:
            metafunc.parametrize("golden_of", self.golden, ids=[method for method, _ in self.golden])

    @classmethod
    @cache
    def _compiled(cls, contract: Contract) -> None:
        """All variants of all kernels in one unit."""
        build_ahead(cls.kernels, contract)

    def test_parity(self, contract: Contract, kernel: Kernel) -> None:
        """All configurations."""
        self._compiled(contract)
        for seed, limit in ((seed, limit) for name, seed, limit in self.runs if name == contract):
            verdict = verify(kernel.name, kernel, "simulator", Simulated(seed, contract), limit)
            assert verdict.passed and verdict.identical and verdict.max_difference == 0, verdict
            assert verdict.configurations >= (limit or self.configurations), verdict

    def test_the_text_does_not_grow(self, kernel: Kernel) -> None:
        """No length is compiled anew."""
        assert grows(kernel) == ""
        assert len(kernel.variants) <= self.variants

    def test_golden_text(self, golden_of: tuple[str, Path]) -> None:
        """The method's kernels, and fused attention with itself, or a partner, for one shape."""
        method, folder = golden_of
        found = differences(_offered(method), folder)
        assert not found, "\n".join([*found, f"if this is meant: python -m vq_core.kernels.golden {method} {folder}"])

    def test_every_kernel_is_offered(self) -> None:
        """And has golden text: nothing is compared here that no method uses."""
        assert {kernel for method, _ in self.golden for kernel in _offered(method)} >= set(self.kernels)


def _offered(method: str) -> list[Kernel]:
    return [one.kernel for one in offered_kernels(method, one_pass=True)[0]]


@attrs.frozen
class Break:
    """A wrong text.

    Attributes:
        what: It does.
        kernels: In which.
        old, new: What is put in the place of what, everywhere in header and body.
        contract: Contraction with which it is run.
        among: For :meth:`BrokenKernels.few`: in which configurations it shows.
        error: Words of the simulator's error that catches it, such as ``"has one writer"``; empty: results differ.
    """

    what: str
    kernels: tuple[Kernel, ...]
    old: str
    new: str
    contract: Contract = "off"
    among: str = ""
    error: str = ""


class BrokenKernels:
    """Parity can fail: each kernel's text broken in many ways, each break seen in few configurations.

    Attributes:
        kernels: All that the package has.
        breaks: At least six of each.
        configurations: Of each kernel at least so many are left, which it passes unbroken.
        contracts: Contraction with which it passes them.
        order: Of lanes and threadgroups.
        at_once: Configurations that are run at a time, up to the first that fails; ``None``: all, in one unit.
    """

    kernels: ClassVar[Sequence[Kernel]]
    breaks: ClassVar[Sequence[Break]]
    configurations: ClassVar[int] = 12
    contracts: ClassVar[Sequence[Contract]] = CONTRACTS
    order: ClassVar[int] = 0
    at_once: ClassVar[int | None] = None

    def few(self, kernel: Kernel, among: str) -> Iterable[Case]:
        """The configurations that breaks are to be seen in: few variants, which is less to compile and to run."""
        return kernel.cases()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Spread ``kernel``, ``contract`` and ``broken``."""
        if "contract" in metafunc.fixturenames:
            metafunc.parametrize("contract", self.contracts)
        if "kernel" in metafunc.fixturenames:
            metafunc.parametrize("kernel", self.kernels, ids=lambda kernel: kernel.name)
        if "broken" in metafunc.fixturenames:
            pairs = [(item, kernel) for item in self.breaks for kernel in item.kernels]
            metafunc.parametrize("broken", pairs, ids=[f"{item.what}, {kernel.name}" for item, kernel in pairs])

    def _narrowed(self, kernel: Kernel, among: str = "") -> Kernel:
        return attrs.evolve(kernel, cases=lambda: iter(self.few(kernel, among)))

    def _broken(self, item: Break, kernel: Kernel) -> Kernel:
        text = kernel.header + kernel.body
        assert item.old in text, f"{kernel.name} holds no {item.old!r}"
        header, body = (part.replace(item.old, item.new) for part in (kernel.header, kernel.body))
        return attrs.evolve(self._narrowed(kernel, item.among), header=header, body=body)

    @classmethod
    @cache
    def _compiled(cls, contract: Contract) -> None:
        """All of them in one unit."""
        mine = cls()
        some = [mine._broken(item, k) for item in mine.breaks for k in item.kernels if item.contract == contract]
        whole = [mine._narrowed(kernel) for kernel in mine.kernels if contract in mine.contracts]
        build_ahead([*some, *whole], contract)

    def _judged(self, kernel: Kernel, contract: Contract) -> Verdict:
        self._compiled(contract)
        cases, counted = list(kernel.cases()), 0
        step = self.at_once or len(cases)
        for begin in range(0, len(cases), step):
            some = attrs.evolve(kernel, cases=partial(iter, cases[begin : begin + step]))
            verdict = verify(kernel.name, some, "simulator", Simulated(self.order, contract))
            counted += verdict.configurations
            if not verdict.passed:
                break
        return attrs.evolve(verdict, configurations=counted)

    def test_unbroken_it_passes(self, kernel: Kernel, contract: Contract) -> None:
        """So that what fails below fails for its one change."""
        verdict = self._judged(self._narrowed(kernel), contract)
        assert verdict.passed and verdict.identical and verdict.configurations >= self.configurations, verdict

    def test_broken_it_fails(self, broken: tuple[Break, Kernel]) -> None:
        """By other results, not because it cannot be compiled; or by the simulator's error where one is named."""
        item, kernel = broken
        verdict = self._judged(self._broken(item, kernel), item.contract)
        assert not verdict.passed and not verdict.identical, verdict
        if item.error:
            assert item.error in verdict.error, verdict
        else:
            assert "differs by" in verdict.first and verdict.differing > 0, verdict

    def test_every_kernel_is_broken_in_six_ways(self) -> None:
        """At least; and every break is of kernels that are named."""
        counts = {kernel.name: sum(kernel in item.kernels for item in self.breaks) for kernel in self.kernels}
        assert all(count >= 6 for count in counts.values()), counts
        assert {kernel for item in self.breaks for kernel in item.kernels} == set(self.kernels)


def variants(kernel: Kernel, **parameters: Any) -> Iterator[Case]:
    """Configurations of some parameters, each a value or a tuple of those that are taken."""
    for case in kernel.cases():
        found = kernel.resolve(case.inputs, case.parameters).parameters
        if all(found[name] in (some if isinstance(some, tuple) else (some,)) for name, some in parameters.items()):
            yield case
