"""A byte a number between the smallest and the largest of its channel, which are learnt from a model."""

import attrs
import mlx.core as mx

from vq_core.api import Capabilities, Field, Layout, MethodFacts, SettingsError, hookimpl, setting

LEAST = 16


@attrs.frozen
class Settings:
    levels: int = setting(255, accepted=(15, 255), help="steps between the smallest and the largest")
    artifact: str = setting("", help="what calibration made")


@hookimpl
def vq_method():
    capabilities = Capabilities(needs_calibration=True, gaussian_error=lambda settings, dim: 0.5 / settings.levels)
    return MethodFacts("learnt", "bytes between learnt bounds", Settings, per_layer=True, capabilities=capabilities)


@hookimpl
def vq_calibrate(settings, calibration):
    tokens = calibration.samples.shape[1]
    if tokens < LEAST:
        raise SettingsError(f"{tokens} tokens are too few: at least {LEAST} are needed")
    low, high = mx.minimum(calibration.low, 0), mx.maximum(calibration.high, 0)
    step = mx.maximum((high - low) / settings.levels, 1e-6)
    return {"low": mx.round(low / step) * step, "step": step}  # zero is one of the levels


@hookimpl
def vq_prepare(ctx, settings, artifact):
    low, step = (artifact.arrays[name][:, None] for name in ("low", "step"))
    return low, step, settings.levels, ctx.head_dim


@hookimpl
def vq_layout(state):
    return Layout(1, (Field("codes", "uint8", (128, state[3]), codes=True),))


@hookimpl
def vq_encode(state, x):
    low, step, levels, _ = state
    codes = mx.round((x.astype(mx.float32) - low) / step)
    return mx.where(codes >= 0, mx.minimum(codes, levels), 0).astype(mx.uint8)


@hookimpl
def vq_pack(codes):
    return {"codes": codes}


@hookimpl
def vq_decode(state, packed):
    return packed["codes"].astype(mx.float32) * state[1] + state[0]
