"""A model told from another by its parameters, without reading them all."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from vq_core.files import jsontext
from vq_core.files.jsontext import shown

SAMPLED, ROWS, COLUMNS = 64, 3, 16


def fingerprint(model: Any) -> dict[str, Any]:
    """What tells a model from another: class, layers, every parameter's name, shape and dtype, some values.

    At most 64 parameters are sampled, 48 values of each: a model that differs elsewhere alone has the same
    fingerprint.
    """
    flat: Any = tree_flatten(model.parameters())
    parameters: list[tuple[str, mx.array]] = sorted(flat, key=lambda item: item[0])
    names = "\n".join(f"{name} {array.shape} {array.dtype}" for name, array in parameters)
    filled = [array for _, array in parameters if array.size]
    step = max(1, -(-len(filled) // SAMPLED))
    parts = [_sample(array) for array in filled[::step]]
    mx.eval(parts)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(memoryview(part))  # type: ignore[arg-type]
    kind = getattr(getattr(model, "args", None), "model_type", None) or getattr(model, "model_type", None)
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model_type": kind if isinstance(kind, str) else None,
        "layers": len(model.layers),
        "parameters": len(parameters),
        "shapes": hashlib.sha256(names.encode()).hexdigest(),
        "values": digest.hexdigest(),
    }


def identity(model: Any) -> str:
    """One line that tells a model from another as far as its :func:`fingerprint` does: of whom constants are learnt."""
    found = fingerprint(model)
    kind = found["model_type"] or type(model).__name__
    return f"{kind} {hashlib.sha256(jsontext.dump(found).encode()).hexdigest()}"


def _sample(array: mx.array) -> mx.array:
    rows = array.reshape(array.shape[0], -1) if array.ndim else array.reshape(1, 1)
    picked = [i * (rows.shape[0] - 1) // (ROWS - 1) for i in range(ROWS)]
    return mx.contiguous(rows[mx.array(picked), :COLUMNS]).reshape(-1).view(mx.uint8)


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What tells two models apart, in words."""
    plain = [f"{name} {shown(was.get(name))}, the model's is {shown(now[name])}" for name in list(now)[:4]
             if was.get(name) != now[name]]  # fmt: skip
    if not plain and was.get("shapes") != now["shapes"]:
        plain.append("names, shapes or dtypes of the parameters")
    elif was.get("values") != now["values"] and not plain:
        plain.append("the values of the parameters: other weights of the same architecture")
    return [f"saved with another model: {each}" for each in plain]
