"""Names: one canonical spelling, no silent winner, nothing that is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_two_distributions_with_one_name(site: Any) -> None:
    site.add_good("twin", "acme-one")
    site.add_good("twin", "acme-two", version="2.0")
    child = site.list()
    for distribution in ("acme-one", "acme-two"):
        record = child.record("twin", distribution)
        assert record["status"] == "shadowed"
        assert "acme-one 1.2.3 and acme-two 2.0 each offer 'twin'" in record["reason"]
        assert "choose with acme-one:twin or acme-two:twin" in record["reason"]

    refused = site.run("info", "twin")
    assert refused.code == 2
    assert "method 'twin' is ambiguous" in refused.err
    assert "acme-two:twin" in refused.err

    chosen = site.run("info", "acme-two:twin")
    assert chosen.code == 0, chosen.err
    assert "acme-two 2.0" in chosen.out

    assert "acme-one offers" not in site.run("info", "acme-three:twin").err
    assert "distribution 'acme-three' offers no method 'twin'" in site.run("info", "acme-three:twin").err


def test_switching_one_of_two_off_chooses_the_other(site: Any) -> None:
    site.add_good("twin", "acme-one")
    site.add_good("twin", "acme-two")
    child = site.list(VQ_DISABLE="acme_one")
    assert child.record("twin", "acme-one")["status"] == "disabled"
    assert child.record("twin", "acme-two")["status"] == "ok"
    chosen = site.run("info", "twin", VQ_DISABLE="acme-one")
    assert chosen.code == 0, chosen.err
    assert "acme-two" in chosen.out


def test_a_good_method_does_not_win_over_a_broken_namesake(site: Any) -> None:
    site.add_good("twin", "acme-one")
    site.add("acme-two", {"twin": "acme_two"}, {"acme_two": "raise ValueError('x')"})
    child = site.list()
    assert child.record("twin", "acme-one")["status"] == "shadowed"
    broken = child.record("twin", "acme-two")
    assert broken["status"] == "broken"
    assert "ValueError: x" in broken["reason"]
    assert "acme-one:twin" in broken["reason"]
    assert site.run("info", "acme-one:twin").code == 0
    assert "is broken: ValueError: x" in site.run("info", "acme-two:twin").err


def test_disabled_methods_are_not_imported(site: Any) -> None:
    site.add("acme-loud", {"loud": "acme_loud"}, {"acme_loud": "raise ValueError('imported')"})
    for switch in ("loud", "other, LOUD", "acme-loud", "Acme.Loud"):
        child = site.list(VQ_DISABLE=switch)
        record = child.record("loud")
        assert record["status"] == "disabled"
        assert f"VQ_DISABLE={switch}" in record["reason"]
        assert "acme_loud" not in child.imported
    used = site.run("info", "loud", VQ_DISABLE="loud")
    assert used.code == 2
    assert "take it out of VQ_DISABLE" in used.err


def test_one_distribution_seen_twice_is_one(site: Any) -> None:
    site.add_good("fine")
    (site.root / "lib64").symlink_to(site.path[0], target_is_directory=True)
    site.path.append(site.root / "lib64")
    assert site.list().record("fine")["status"] == "ok"


def test_one_module_under_two_names(site: Any, source: Any) -> None:
    site.add("acme-pair", {"first": "acme_pair", "second": "acme_pair"}, {"acme_pair": source("first")})
    child = site.list()
    assert child.record("first")["status"] == "ok"
    second = child.record("second")
    assert second["status"] == "broken"
    assert "the entry point is called 'second' but acme_pair calls its method 'first'" in second["reason"]


def test_one_distribution_with_one_name_twice(site: Any, source: Any) -> None:
    modules = {"acme_a": source("same_name"), "acme_b": source("same_name")}
    site.add("acme-same", {"same_name": "acme_a", "Same-Name": "acme_b"}, modules)
    records = [record for record in site.list().json() if record["name"] == "same_name"]
    assert [record["status"] for record in records] == ["broken", "broken"]
    assert "acme-same offers the name 'same_name' more than once (acme_a and acme_b)" in records[0]["reason"]


@pytest.mark.parametrize("spelling", ["my_method", "My-Method", "MY_METHOD", "my.method"])
def test_spellings_are_one_name(site: Any, source: Any, spelling: str) -> None:
    site.add("acme-spelt", {spelling: "acme_spelt"}, {"acme_spelt": source(spelling)})
    assert site.list().record("my_method")["status"] == "ok"
    for asked in ("my_method", "MY-METHOD", "acme_spelt:My.Method"):
        child = site.run("info", asked)
        assert child.code == 0, child.err


def test_a_slip_of_the_pen_is_answered_with_the_near_miss(site: Any) -> None:
    site.add_good("mymethod")
    child = site.run("info", "my-methd")
    assert child.code == 2
    assert "unknown method 'my_methd'; installed:" in child.err
    assert "Did you mean 'mymethod'?" in child.err
    assert "Settings are written mymethod:bits=VALUE" in site.run("info", "mymethod:bits").err


def test_settings_are_checked_by_info(site: Any) -> None:
    site.add_good("fine")
    shown = site.run("info", "fine:bits=4")
    assert shown.code == 0, shown.err
    assert "fine:bits=4" in shown.out
    assert "one of 2, 4" in shown.out
    assert "Bits a number." in shown.out
    assert "bits must be one of 2, 4" in site.run("info", "fine:bits=5").err
    assert "has no setting 'bit'; it has: bits" in site.run("info", "fine:bit=4").err


def test_a_source_folder_is_not_an_installed_method(site: Any, source: Any, tmp_path: Path) -> None:
    """From a repository's root, a folder imports as an empty namespace package."""
    root = tmp_path / "repository"
    (root / "vq_ghost" / "src" / "vq_ghost").mkdir(parents=True)
    (root / "vq_ghost" / "src" / "vq_ghost" / "method.py").write_text(source("ghost"))
    prelude = "import importlib.util; assert importlib.util.find_spec('vq_ghost') is not None\n"
    child = site.list(prelude=prelude, cwd=root)
    assert "ghost" not in [record["name"] for record in child.json()]
    assert "unknown method 'ghost'" in site.run("info", "ghost", cwd=root).err
