"""The pass kernels that ``vq verify`` runs for an installed method: with itself, or with the core's partner."""

from __future__ import annotations

import itertools

from vq_core.api.facts import SIDES, PrepareContext, Side
from vq_core.attention.verifying import COMMONEST, pass_kernel
from vq_core.attention.verifying.decoding import decoding_kernels
from vq_core.attention.verifying.matrix import matrix_kernel
from vq_core.calibration.stand_in import completed
from vq_core.errors import UnsupportedShapeError
from vq_core.kernels.backends import device_backend
from vq_core.kernels.kernel import Kernel
from vq_core.plugins import binding, partner
from vq_core.plugins.binding import BoundSide
from vq_core.plugins.loader import make_manager
from vq_core.plugins.records import MethodRecord

HEAD_DIMS = (COMMONEST, 64, 80)
DTYPES = ("float16", "bfloat16", "float32")


def passes(record: MethodRecord, only_one: bool = False) -> tuple[list[Kernel], list[str]]:
    """A usable method's pass kernels, each once, and the head sizes that it or the skeleton refuses, with the reason.

    Args:
        record: The method's.
        only_one: The first that there is, as for golden text.

    Raises:
        SettingsError: settings that the method does not accept.
        PluginError: the method breaks the contract.
    """
    assert record.facts is not None
    found: dict[str, Kernel] = {}
    refused: dict[str, None] = {}
    if not make_manager(record.plugin, record.label).hook.vq_snippet.get_hookimpls():
        return [], []
    for settings in record.facts.verified or ("",):
        text = f"{record.label}:{settings}" if settings else record.label
        for dim, dtype in itertools.product(HEAD_DIMS, DTYPES):
            if found and only_one:
                break
            try:
                keys, values = (_bound(record, text, side, dim, dtype) for side in SIDES)
                if keys.snippet is None or values.snippet is None:
                    continue  # a method may have none for a setting, as for a side: plain operations serve it
                kernels = [pass_kernel(keys, values)]
                if (dim, dtype) == (COMMONEST, "float16") and not only_one:
                    kernels += _decoding(keys, values)
                if dim == COMMONEST and (keys.layout.widens or values.layout.widens):
                    kernels.append(pass_kernel(keys, values, wide=True))
            except UnsupportedShapeError as error:
                refused[f"{text}, head size {dim}: {error}"] = None
            else:
                for kernel in kernels:
                    found.setdefault(kernel.name, kernel)
    return [*found.values(), *([] if only_one else on_tensor_cores(record))], list(refused)


def _decoding(keys: BoundSide, values: BoundSide) -> tuple[Kernel, ...]:
    """The kernels for long queries; none where a side's numbers are in a basis of their own."""
    try:
        return decoding_kernels(keys, values)
    except UnsupportedShapeError:
        return ()


MATRIX = ((COMMONEST, "float16"), (COMMONEST, "bfloat16"), (64, "float16"), (256, "float16"))
"""Head sizes and dtypes for which the passes on tensor cores are run."""


def on_tensor_cores(record: MethodRecord) -> list[Kernel]:
    """A usable method's passes on tensor cores, each once; none where it has no form for them."""
    assert record.facts is not None
    if not make_manager(record.plugin, record.label).hook.vq_device.get_hookimpls() or len(record.facts.sides) < 2:
        return []
    kernels = "auto" if device_backend() == "cuda" else "simulator"
    found: dict[str, Kernel] = {}
    for settings, (dim, dtype) in itertools.product(record.facts.verified or ("",), MATRIX):
        text = f"{record.label}:{settings}" if settings else record.label
        try:
            contexts = [PrepareContext(side, kv_heads=2, key_dim=dim, value_dim=dim, dtype=dtype) for side in SIDES]
            text = completed(text, [(2, dim)])
            kernel = matrix_kernel(*(binding.bind(text, ctx, kernels=kernels, device=True) for ctx in contexts))
        except UnsupportedShapeError:
            continue  # these settings have none, as the report of a cache says
        found.setdefault(kernel.name, kernel)
    return list(found.values())


def _bound(record: MethodRecord, text: str, side: Side, dim: int, dtype: str) -> BoundSide:
    ctx = PrepareContext(side, kv_heads=2, key_dim=dim, value_dim=dim, dtype=dtype)
    assert record.facts is not None
    if side not in record.facts.sides:
        return partner.bound(ctx)
    return binding.bind(completed(text, [(2, dim)]), ctx, kernels="off")
