"""One bad plugin stops nothing: every kind in a child process, alone and all together."""

from __future__ import annotations

import re
from typing import Any

import pytest

ENCODE = "def vq_encode(state, x):"
BROKEN = {
    "import_error": ("raise ImportError('no such thing')", "broken", "ImportError: no such thing"),
    "missing_module": ("import surely_not_installed", "broken", "pip install --upgrade acme-missing_module"),
    "syntax_error": ("def (:\n", "broken", r"SyntaxError: .*acme_syntax_error_method\.py, line 1"),
    "value_error": ("raise ValueError('two\\nlines')", "broken", "ValueError: two$"),
    "system_exit": ("import sys; sys.exit(3)", "broken", r"SystemExit: acme_system_exit_method calls sys\.exit\(3\)"),
    "missing_attribute": (None, "broken", "AttributeError: .*has no attribute 'plugin'"),
    "other_api": ("api", "incompatible", "written for API version 99, this vq-core has API version 1: pip install"),
    "wrong_signature": ("signature", "broken", "PluginValidationError: .*vq_encode.*'colour'.*vq_core.hookspecs"),
}


def add_broken(site: Any, source: Any, kind: str) -> None:
    text = BROKEN[kind][0]
    module = f"acme_{kind}_method"
    value = module
    if text == "api":
        text = source(kind, api=99)
    elif text == "signature":
        text = source(kind).replace(ENCODE, "def vq_encode(state, x, colour):")
    elif text is None:
        text, value = source(kind), f"{module}:plugin"
    site.add(f"acme-{kind}", {kind: value}, {module: text})


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_becomes_a_record(site: Any, source: Any, kind: str) -> None:
    site.add_good("fine")
    add_broken(site, source, kind)
    child = site.list()
    assert child.record("fine")["status"] == "ok"
    record = child.record(kind)
    assert (record["status"], record["distribution"], record["version"]) == (BROKEN[kind][1], f"acme-{kind}", "1.2.3")
    assert re.search(BROKEN[kind][2], record["reason"]), record["reason"]
    assert "\n" not in record["reason"]


def test_all_kinds_together_and_strict(site: Any, source: Any) -> None:
    site.add_good("fine")
    for kind in BROKEN:
        add_broken(site, source, kind)
    site.add_good("twin", "acme-one")
    site.add_good("twin", "acme-two")
    child = site.list()
    status = {(r["name"], r["distribution"]): r["status"] for r in child.json()}
    assert status["fine", "acme-fine"] == "ok"
    assert {kind: status[kind, f"acme-{kind}"] for kind in BROKEN} == {k: v[1] for k, v in BROKEN.items()}
    assert status["twin", "acme-one"] == status["twin", "acme-two"] == "shadowed"
    assert [r["name"] for r in child.json()] == sorted(r["name"] for r in child.json())

    strict = site.run("list-methods", "--json", "--strict")
    assert strict.code == 1
    assert strict.out == child.out

    table = site.run("list-methods")
    assert table.code == 0
    assert "fine" in table.out
    assert "ImportError: no such thing" in table.out


def test_strict_is_content_with_good_and_disabled_methods(site: Any) -> None:
    site.add_good("fine")
    site.add_good("other")
    child = site.run("list-methods", "--strict", VQ_DISABLE="other")
    assert child.code == 0, child.out


def test_what_a_plugin_prints_does_not_spoil_the_json(site: Any, source: Any) -> None:
    site.add("acme-loud", {"loud": "acme_loud"}, {"acme_loud": "print('hello')\n" + source("loud")})
    child = site.list()
    assert child.record("loud")["status"] == "ok"
    assert "hello" in child.err


def test_an_orphaned_editable_install(site: Any) -> None:
    site.add("acme-gone", {"gone": "acme_gone_method"})
    reason = site.list().record("gone")["reason"]
    assert "No module named 'acme_gone_method'" in reason
    assert "pip uninstall acme-gone" in reason


def test_damaged_metadata(site: Any) -> None:
    site.add_good("fine")
    info = site.add_good("hurt")
    (info / "entry_points.txt").write_bytes(b"[vq.methods]\n\xff\xfe = vq.methods\n")
    child = site.list()
    assert child.record("fine")["status"] == "ok"
    assert any("its metadata cannot be read" in record["reason"] for record in child.json())


def test_using_a_broken_method_is_one_line_and_status_two(site: Any, source: Any) -> None:
    add_broken(site, source, "import_error")
    child = site.run("info", "import_error")
    assert child.code == 2
    assert child.out == ""
    assert len(child.err.splitlines()) == 1
    assert "method 'import_error' of acme-import_error 1.2.3 is broken: ImportError: no such thing" in child.err
    assert "vq doctor import_error" in child.err
    assert "Traceback" in site.run("info", "import_error", VQ_DEBUG="1").err


def test_doctor_shows_the_traceback_and_what_to_do(site: Any, source: Any) -> None:
    site.add_good("fine")
    add_broken(site, source, "import_error")
    child = site.run("doctor", VQ_DISABLE="nonsense")
    assert child.code == 0, child.err
    advice = child.out.partition("what to do")[2]
    assert "Traceback" in child.out
    assert "import_error: ImportError: no such thing" in advice
    assert "pip install --upgrade acme-import_error" in advice
    assert "VQ_DISABLE names 'nonsense', which is not installed" in advice
    assert "mlx_lm" not in child.imported

    one = site.run("doctor", "import_error")
    assert one.code == 0, one.err
    assert "Traceback" in one.out
    assert "acme-fine" not in one.out
