"""A method's kernels: equal to their references in the simulator, serving what the hooks give, of one text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import mlx.core as mx
import pytest

from vq_core.api.facts import Side
from vq_core.api.settings import parse_choice
from vq_core.kernels.growth import grows
from vq_core.kernels.kernel import Kernel
from vq_core.kernels.offers import KernelOffer
from vq_core.kernels.simulated import Simulated
from vq_core.kernels.simulator.program import Contract
from vq_core.kernels.verify import build_ahead, relative, same_bits, verify
from vq_core.plugins import binding
from vq_core.plugins.loader import make_manager
from vq_core.plugins.offered import offers_of
from vq_core.plugins.registry import resolve
from vq_core.testing.kit import Kit, decode, pack, whole
from vq_core.testing.observe import gaussian


class KernelConformance(Kit):
    """Skipped for methods without kernels only.

    Attributes:
        kernel_cases: Cases of each kernel that are run, drawn from all.
    """

    kernel_cases: ClassVar[int] = 24

    def offers(self) -> list[KernelOffer]:
        """What the method offers; skips the test where that is nothing."""
        record = resolve(parse_choice(self.method).label)
        offers = list(offers_of(make_manager(record.plugin, record.label), record.label))
        if not offers:
            pytest.skip(f"vq_kernels: {record.name} offers no kernels")
        return offers

    def _kernels(self) -> list[Kernel]:
        return list(dict.fromkeys(kernel for offer in self.offers() for kernel in offer.kernels))

    @pytest.mark.parametrize(("contract", "seed"), [("off", 0), ("fast", 1)])
    def test_kernels_equal_their_references(self, contract: Contract, seed: int) -> None:
        """In the simulator, with and without contraction of multiply and add, in two orders of lanes."""
        kernels = self._kernels()
        build_ahead(kernels, contract, self.kernel_cases)
        for kernel in kernels:
            verdict = verify(self.method, kernel, "simulator", Simulated(seed, contract), self.kernel_cases)
            assert verdict.passed, (
                f"kernel {kernel.name}, contraction {contract}, seed {seed}: "
                f"{verdict.error or f'{verdict.differing} of {verdict.configurations} cases differ: {verdict.first}'}"
            )

    def test_kernel_text_does_not_grow(self) -> None:
        """No kernel would be compiled anew as a sequence grows."""
        for kernel in self._kernels():
            why = grows(kernel)
            assert not why, f"kernel {kernel.name}: {why}"

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_kernels_serve_what_hooks_give(self, side: Side, dtype: str) -> None:
        """Bound with kernels, the method stores and reads what it does without, on data of several scales."""
        offers = self.offers()
        ctx = self.context(side, dtype=dtype)
        plain, quick = (binding.bind(self.method, ctx, "error", kernels) for kernels in ("off", "simulator"))
        for operation, hooks in (("encode+pack", ("vq_encode", "vq_pack")), ("decode", ("vq_decode",))):
            mine = [offer for offer in offers if offer.operation == operation]
            for one in quick.operations:
                if one.name in hooks and mine and not any(offer.declines(quick.state) for offer in mine):
                    assert "(simulator)" in one.implementation, f"{side}: {one.name} is not served: {one.declined}"
        tolerance = max((k.tolerance for offer in offers for k in offer.kernels if not k.exact), default=0.0)
        n = whole(plain, 70)
        for scale in (1.0, 100.0):
            x = (gaussian((2, self.kv_heads, n, self.dim()), "float32", seed=7) * scale + scale).astype(
                getattr(mx, dtype)
            )
            sequence = {
                name: a for name, a in pack(plain, x).items() if name in {f.name for f in plain.layout.sequence}
            }
            for step in (n, plain.layout.block):
                want, got = (pack(bound, x[:, :, :step], 0, sequence) for bound in (plain, quick))
                self._alike(got, want, tolerance, f"{side}, {dtype}, {step} tokens packed")
                what = f"{side}, {dtype}, {step} tokens decoded"
                self._alike({"x": decode(quick, want, step)}, {"x": decode(plain, want, step)}, tolerance, what)

    def _alike(self, got: Mapping[str, Any], want: Mapping[str, Any], tolerance: float, what: str) -> None:
        for name, array in want.items():
            assert got[name].shape == array.shape and got[name].dtype == array.dtype, f"{what}: {name}"
            if same_bits(got[name], array):
                continue
            difference = relative(got[name], array)
            assert difference <= tolerance, f"{what}: {name} differs from the hooks' by {difference:.2e}"
