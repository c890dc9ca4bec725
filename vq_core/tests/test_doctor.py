"""The supported range of mlx-lm is stated once and meant."""

from __future__ import annotations

from importlib.metadata import requires

import pytest

from vq_core.cli.doctor import MLX_LM_SUPPORTED, supported_mlx_lm


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.31.9", False), ("0.32.0", True), ("0.32.2", True), ("0.32.10.dev1", True), ("0.33.0", False), ("1.0", False)],
)
def test_supported_versions(version: str, supported: bool) -> None:
    assert supported_mlx_lm(version) is supported


def test_the_host_speaks_the_same_range() -> None:
    from vq_core.hosts.mlx_lm.versions import BELOW, OLDEST

    assert tuple(bound[:2] for bound in MLX_LM_SUPPORTED) == (OLDEST, BELOW)


def test_the_range_is_the_requirement() -> None:
    requirement = next(line for line in requires("vq-core") or [] if line.startswith("mlx-lm"))
    low, high = MLX_LM_SUPPORTED
    assert f">={'.'.join(map(str, low))}" in requirement
    assert f"<{'.'.join(map(str, high)).removesuffix('.0')}" in requirement
