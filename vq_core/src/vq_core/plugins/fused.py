"""A method's kernels in the place of its hooks: chosen, probed and, where they fail, latched off.

MLX compiles a kernel when its result is evaluated, far from the call and inside somebody else's ``mx.eval``.  So each
is run once, on a small input, when a cache is bound, and its result compared with that of the plain hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

from vq_core.errors import PluginError, VQError
from vq_core.kernels.backends import device_backend
from vq_core.kernels.offers import KernelOffer
from vq_core.kernels.verify import relative, same_bits

_latched: dict[tuple[str, str, str], str] = {}


@attrs.frozen(eq=False)
class Fused:
    """What serves one operation.

    Attributes:
        run: The offer's, with the backend filled in; ``None``: the plain hooks do.
        said: Names of the kernels and the backend, for the report.
        declined: Offers that do not serve, and why.
    """

    run: Callable[..., Any] | None
    said: str = ""
    declined: tuple[str, ...] = ()


def backend_for(kernels: str) -> tuple[str | None, str]:
    """The backend that a policy's ``kernels`` means on this device, and why there is none."""
    if kernels == "off":
        return None, "kernels='off'"
    if kernels == "simulator":
        return "simulator", ""
    found = device_backend()
    return found, "" if found else f"no kernels on {mx.default_device()}"


def choose(
    method: str, operation: str, offers: Sequence[KernelOffer], state: Any, kernels: str, fallback: str,
    wanted: Mapping[str, mx.array], call: Callable[[KernelOffer, str], Mapping[str, mx.array]],
) -> Fused:  # fmt: skip
    """The first offer for an operation that serves this layer side and gives what the plain hooks give.

    Args:
        method: For messages.
        operation: ``"encode+pack"`` or ``"decode"``.
        offers: The method's.
        state: The method's, of this side.
        kernels, fallback: The policy's.
        wanted: What the plain hooks gave for the probe's input.
        call: Runs an offer on that input.

    Raises:
        PluginError: a kernel fails its probe, and ``fallback`` is not ``"warn"``.
    """
    backend, why_not = backend_for(kernels)
    declined: list[str] = []
    for offer in offers:
        if offer.operation != operation or offer.run is None:
            continue
        name = offer.name
        reason = why_not or _elsewhere(offer, backend) or _declined(method, offer, state)
        if not reason and backend is not None:
            run = offer.run
            key = (method, name, backend)
            reason = _latched.get(key, "") if fallback == "warn" else ""
            reason = reason or _probe(key, offer, backend, fallback, wanted, call)
            if not reason:
                return Fused(_with_backend(run, backend), f"kernel {name} ({backend})", tuple(declined))
        declined.append(f"kernel {name}: {reason}")
    return Fused(None, "", tuple(declined))


def _elsewhere(offer: KernelOffer, backend: str | None) -> str:
    for kernel in offer.kernels:
        if backend is not None and backend not in kernel.backends:
            return f"it runs on {', '.join(kernel.backends)}, not on {backend}"
    return ""


def _declined(method: str, offer: KernelOffer, state: Any) -> str:
    try:
        return offer.declines(state)
    except VQError:
        raise
    except Exception as error:  # a stranger's code
        said = f"{type(error).__name__}: {error}"
        raise PluginError(f"method {method!r}: kernel {offer.name} cannot say whether it declines: {said}") from error


def _with_backend(run: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        return run(backend=backend, **kwargs)

    return call


def _probe(
    key: tuple[str, str, str], offer: KernelOffer, backend: str, fallback: str,
    wanted: Mapping[str, mx.array], call: Callable[[KernelOffer, str], Mapping[str, mx.array]],
) -> str:  # fmt: skip
    """Why a kernel must not be used; nothing if it may."""
    method, name, _ = key
    try:
        reason = _differs(offer, call(offer, backend), wanted)
    except VQError as error:
        reason = str(error)
    except Exception as error:  # MLX's words for a text that does not compile, or whatever a stranger's code raises
        reason = f"it does not run: {type(error).__name__}: {error}"
    if not reason:
        return ""
    message = f"method {method!r}: kernel {name} on {backend}: {reason}"
    if fallback != "warn":
        raise PluginError(f"{message}; report it to {method!r}'s author, or use fallback='warn' or kernels='off'")
    _latched[key] = reason
    warnings.warn(f"{message}; plain operations do its work from now on", RuntimeWarning, stacklevel=2)
    return reason


def _differs(offer: KernelOffer, got: Mapping[str, mx.array], wanted: Mapping[str, mx.array]) -> str:
    tolerance = max((k.tolerance for k in offer.kernels if not k.exact), default=0.0)
    for name, want in wanted.items():
        have = got.get(name)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            return f"{name} is {None if have is None else (have.shape, have.dtype)}, not {want.shape} {want.dtype}"
        if not same_bits(have, want) and not relative(have, want) <= tolerance:
            return f"{name} differs from the reference by {relative(have, want):.2e}, stated are {tolerance:.0e}"
    return ""
