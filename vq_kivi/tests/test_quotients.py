"""Codes are found without a division: every pair of numbers for which that could matter, through the kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from vq_core.api import SIDES, Side
from vq_kivi.kernels import PACK, ROUND

NEAR = 16
"""Largest r below: twice as far from the middle as ``kivi_quotient`` could be off, 2**-46 of a product under 2**49."""


def _pairs() -> npt.NDArray[np.float32]:
    """Every (d, step) of float32 whose quotient lies near the middle of a half k + 1/2, k < 255, and its neighbour.

    The middle is m * 2**e with an odd m of 25 bits, d and step are whole numbers a and b of 24 bits: what is asked for
    are all a * 2**s = m * b - r with a small r, where s is 24 or 25.  To each r belongs one b modulo 2**s.
    """
    found = []
    for k in range(255):
        half = np.float32(k + 0.5)
        significand = int(half.view(np.uint32)) & 0x7FFFFF | 0x800000
        for m in (2 * significand - 1, 2 * significand + 1):
            for s in (24, 25):
                inverse = pow(m, -1, 1 << s)
                for r in range(-NEAR, NEAR + 1):
                    b = r * inverse % (1 << s)
                    a = (m * b - r) >> s
                    if 1 << 23 <= a < 1 << 24 and 1 << 23 <= b < 1 << 24:
                        found.append((a * 2.0 ** round(np.log2(half * b / a)), b))
    return np.array(found, np.float32)


@pytest.mark.parametrize("side", SIDES)
def test_codes_are_a_divisions(side: Side) -> None:
    d, step = _pairs().T
    # The largest number of a group that starts at 0 and has that step.
    largest = step * np.float32(255)
    near = np.stack([np.nextafter(largest, np.float32(way)) for way in (0, np.inf)])
    for other in near:
        largest = np.where(largest / np.float32(255) == step, largest, other)
    kept = largest / np.float32(255) == step
    d, step, largest = d[kept], step[kept], largest[kept]
    wanted = np.rint(d / step)
    product = d * (np.float32(1) / step)
    assert len(d) > 4000 and (np.abs(d / step - np.floor(d / step) - 0.5) < 1e-4).all()
    assert (np.rint(product) != wanted).sum() > 100, "a product alone must not do"
    groups = np.stack([np.zeros_like(d), largest, *[d] * 30], axis=-1)
    x = mx.array(groups.T if side == "keys" else groups)[None, None]
    given = {"bits": 8, "size": 32, "M": "float32", "backend": "simulator"}
    codes, scale, zero = PACK[side](x, **given)
    assert (np.array(scale).ravel() == step).all() and not np.array(zero).any()
    assert (np.array(codes).view(np.uint8).reshape(-1, 32)[:, 2:] == wanted[:, None]).all()
    (y,) = ROUND[side](x, **given)
    rounded = np.array(y)[0, 0].T if side == "keys" else np.array(y)[0, 0]
    assert (rounded[:, 2:] == (wanted * step)[:, None]).all()
