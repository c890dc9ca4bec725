"""The kernels that methods offer, and the core's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pluggy

from vq_core.errors import PluginError, SettingsError, VQError
from vq_core.kernels.kernel import Kernel
from vq_core.kernels.offers import KernelOffer
from vq_core.plugins.device import forms_of
from vq_core.plugins.loader import make_manager
from vq_core.plugins.records import MethodRecord
from vq_core.plugins.registry import list_methods, resolve

CORE = "core"


@attrs.frozen(eq=False)
class Offered:
    """A kernel and whose it is.

    Attributes:
        method: The method's name, or ``"core"``.
        version: Distribution and version.
        kernel: The kernel.
    """

    method: str
    version: str
    kernel: Kernel


def offered_kernels(
    method: str | None = None, one_pass: bool = False, attention: bool = True
) -> tuple[list[Offered], list[str]]:
    """Every kernel of every usable method and of the core, each once, and why some methods have none to show.

    A method with snippets has a pass kernel for each of the usual head sizes and dtypes, with itself on both sides.

    Args:
        method: Only this one's; ``"core"`` for the core's own.
        one_pass: Of each method's pass kernels only the first, as in golden text.
        attention: Whether pass kernels are among them: on a GPU it takes minutes to bind what they are made of.

    Raises:
        SettingsError: a method that is not installed or offers no kernels.
        PluginError: the method that was asked for is broken.
    """
    if method == CORE:
        return _core(), []
    if method is not None:
        record = resolve(method)
        found, failed = _of(record, one_pass, attention)
        if not found and not failed:
            raise SettingsError(
                f"method {method!r} offers no kernels; without a method all that are installed are taken"
            )
        return found, failed
    found, failed = _core(), []
    for record in list_methods():
        if record.plugin is None:
            failed.append(f"{record.label} is {record.status}: {record.reason}")
            continue
        try:
            more, refused = _of(record, one_pass, attention)
        except VQError as error:
            failed.append(str(error))
        else:
            found, failed = found + more, failed + refused
    return found, failed


def offers_of(manager: pluggy.PluginManager, name: str) -> Sequence[KernelOffer]:
    """What a method's ``vq_kernels`` returns, checked; empty where it has none.

    Raises:
        PluginError: it fails, or returns anything but offers.
    """
    try:
        found: Any = manager.hook.vq_kernels()
    except VQError:
        raise
    except Exception as error:  # whatever a stranger's code raises becomes one typed error that names it
        raise PluginError(f"method {name!r}: vq_kernels failed with {type(error).__name__}: {error}") from error
    if found is None:
        return ()
    if not isinstance(found, Sequence) or not all(isinstance(offer, KernelOffer) for offer in found):
        what = [type(offer).__name__ for offer in found] if isinstance(found, list | tuple) else type(found).__name__
        raise PluginError(f"method {name!r}: vq_kernels must return a sequence of KernelOffer objects, it gave {what}")
    return found


def _of(record: MethodRecord, one_pass: bool, attention: bool) -> tuple[list[Offered], list[str]]:
    from vq_core.attention.verifying.installed import passes

    kernels: dict[Kernel, None] = {}  # each once, in the order of the offers
    for offer in offers_of(make_manager(record.plugin, record.label), record.label):
        kernels.update(dict.fromkeys(offer.kernels))
    for form in forms_of(record):
        kernels.update(dict.fromkeys(form.kernels))
    fused, refused = passes(record, one_pass) if attention else ([], [])
    kernels.update(dict.fromkeys(fused))
    return [Offered(record.name, f"{record.distribution} {record.version}", kernel) for kernel in kernels], refused


def _core() -> list[Offered]:
    import vq_core
    from vq_core.kernels.skeleton.kernels import KERNELS
    from vq_core.kernels.standard import bits, hadamard

    return [
        Offered(CORE, f"vq-core {vq_core.__version__}", kernel)
        for kernel in (*bits.KERNELS, *hadamard.KERNELS, *KERNELS)
    ]
