"""`vq verify`: the table, JSON rows, exit statuses, and methods that cannot be verified."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from vq_core.attention.verifying import installed
from vq_core.kernels import device_backend
from vq_core.plugins import registry
from vq_core.testing import registered

from ..conformance.test_broken_kernels import BODY, kernel, tripled
from ..host_mlx_lm.conftest import IDENTITY

KERNELS = {
    "core": ["attend_merge", "attend_merge_apart", "attend_merge_turned", "pack_bits", "sign_hadamard", "unpack_bits"],
    "example": ["attend_example_2_4_8_example_1_4_8_64_64_h_u32hfu32hf"],
    "kivi": [
        *(f"attend_kivi_keys_{b}_32_kivi_values_{b}_32_64_64_h_u32hhu32hh" for b in (2, 3, 4, 8)),
        *(f"attend_matrix_kivi{b}_k64_kivi{b}_v64_float16" for b in (2, 4, 8)),
        *(f"kivi_{what}_{side}" for what in ("device_pack", "pack", "round", "unpack") for side in ("keys", "values")),
        *(f"matrix_kivi{bits}_k128_kivi{bits}_v128" for bits in (2, 4)),
    ],
}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fused attention nothing, or one shape: all are minutes of compilation; tests/test_passes.py has the list.

    And two methods: each distribution's own tests verify its kernels.
    """
    two = [record for record in registry.list_methods() if record.distribution in ("vq-kivi", "vq-example")]
    monkeypatch.setattr(registry, "_records", two)
    monkeypatch.setattr(installed, "HEAD_DIMS", ())
    monkeypatch.setattr(installed, "DTYPES", ("float16",))
    monkeypatch.setattr(installed, "MATRIX", ())


@pytest.mark.skipif(device_backend() is not None, reason="this device runs kernels")
def test_without_a_device_it_says_what_to_give(vq: Any) -> None:
    status, out, err = vq("verify")
    assert (status, out) == (2, "") and err.count("\n") == 1 and "give --backend simulator" in err
    status, out, err = vq("verify", "--backend", "cuda")
    assert (status, out) == (2, "") and "backend 'cuda'" in err


def test_every_kernel_of_every_method(vq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "HEAD_DIMS", (64,))
    monkeypatch.setattr(installed, "MATRIX", ((64, "float16"),))
    status, out, err = vq("verify", "--backend", "simulator", "--limit", 4, "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)
    for method, names in KERNELS.items():
        assert sorted(row["kernel"] for row in rows if row["method"] == method) == names
    for row in rows:
        same, fused = row["identical"] is True and row["max_difference"] == 0, row["stands_for"] == "attend"
        bound = 4e-3 if "matrix_" in row["kernel"] else 1e-4
        assert row["passed"] is True and (same or (fused and row["max_difference"] < bound))
        assert (row["backend"], row["configurations"]) == ("simulator", 4)
        assert row["package"] and row["mlx"] and row["device"]


def test_the_table(vq: Any) -> None:
    status, out, _ = vq("verify", "--backend", "simulator", "--limit", 2, "--method", "core")
    assert status == 0
    head, *rows = [line.split() for line in out.splitlines() if line]
    assert head == ["method", "kernel", "stands", "for", "configurations", "result", "backend"]
    assert ["core", "pack_bits", "pack", "2", "identical", "simulator"] in rows
    assert "6 kernels, all right" in out and "kivi" not in out


def test_a_long_name_leaves_room_for_the_result(vq: Any) -> None:
    name = "attend_" + 80 * "x"
    with registered(tripled(kernel(name=name))):
        status, out, _ = vq("verify", "--backend", "simulator", "--limit", 1, "--method", "tripled")
    assert status == 0 and "identical" in out and "simulator" in out and "configurations" in out
    assert name in "".join(line[8:].split()[0] for line in out.splitlines()[1:] if "x" in line[8:])


def test_a_kernel_that_differs_is_exit_status_1(vq: Any) -> None:
    with registered(tripled(kernel(body=BODY.replace("3.0f", "2.0f")))):
        status, out, _ = vq("verify", "--backend", "simulator", "--method", "tripled")
        assert status == 1 and "differs by" in out and "1 of 1 kernels wrong" in out
        assert "tripled triple: 60 differ, the first: (1, 2, 1, 16): y differs by" in out
        status, out, _ = vq("verify", "--backend", "simulator", "--method", "tripled", "--limit", 3, "--json")
    (row,) = json.loads(out)
    assert status == 1 and row["identical"] is False and 0.1 < row["max_difference"] < 10 and row["configurations"] == 3


def test_a_difference_within_the_tolerance_is_told_and_passes(vq: Any) -> None:
    with registered(tripled(kernel(body=BODY.replace("1.0f)", "1.0001f)"), exact=False, tolerance=1e-3))):
        status, out, _ = vq("verify", "--backend", "simulator", "--method", "tripled")
    assert status == 0 and "within its tolerance" in out and "all right" in out


@pytest.mark.parametrize(
    ("body", "said"),
    [(BODY.replace("if (i < count) ", ""), "Missing bound check"), (BODY.replace("x[i]", "z[i]"), "z")],
)
def test_a_kernel_that_does_not_run(vq: Any, body: str, said: str) -> None:
    with registered(tripled(kernel(body=body))):
        status, out, _ = vq("verify", "--backend", "simulator", "--limit", 4)
    assert status == 1 and "did not run" in out and said in out
    assert out.count("identical") + out.count("within its") == 16, "the others are verified all the same"


def test_a_broken_method_is_listed_and_stops_nothing(vq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.list_methods()
    lost = attrs.evolve(
        registry.resolve("example"), name="lost", status="broken", reason="no [such]\nmodule", plugin=None
    )
    monkeypatch.setattr(registry, "_records", [*registry._records, lost])  # type: ignore[misc]
    status, out, err = vq("verify", "--backend", "simulator", "--limit", 1)
    assert status == 0 and "16 kernels, all right" in out
    assert err == "not verified: vq-example:lost is broken: no [such] module\n"


def test_methods_that_cannot_be_verified(vq: Any) -> None:
    with registered(IDENTITY):
        status, out, err = vq("verify", "--backend", "simulator", "--method", "identity")
    assert (status, out) == (2, "") and "method 'identity' offers no kernels" in err
    status, out, err = vq("verify", "--backend", "simulator", "--method", "kiwi")
    assert (status, out) == (2, "") and "Did you mean 'kivi'?" in err
    status, _, err = vq("verify", "--backend", "vulkan")
    assert status == 2 and "simulator" in err
    status, _, err = vq("verify", "--backend", "simulator", "--limit", 0)
    assert status == 2 and "--limit" in err


def test_parts_of_what_is_not_attention_are_all_of_it(vq: Any) -> None:
    """In N processes side by side; what is no part is one clear refusal."""
    names = []
    for part in ("1/3", "2/3", "3/3"):
        status, out, err = vq(
            "verify", "--backend", "simulator", "--limit", 1, "--no-attention", "--method", "kivi", "--part", part,
            "--json",
        )  # fmt: skip
        assert (status, err) == (0, "")
        names += [row["kernel"] for row in json.loads(out)]
    assert sorted(names) == sorted(name for name in KERNELS["kivi"] if not name.startswith("attend_"))
    for wrong in ("0/3", "4/3", "a/b", "3"):
        status, out, err = vq("verify", "--part", wrong)
        assert status == 2 and out == "" and "K/N" in err
