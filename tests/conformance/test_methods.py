"""The kit over every method of the repository, and over three that an outsider wrote in at most 40 lines."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from vq_core.testing import (
    AttentionConformance,
    CodecConformance,
    DeterminismConformance,
    MethodConformance,
    NumbersConformance,
    ProtocolConformance,
    load_plugin,
)

METHODS = Path(__file__).parent.parent / "methods"
EXAMPLE = METHODS.parent.parent / "plugins/vq_example/src/vq_example/method.py"


class TestIdentity(MethodConformance):
    method = "identity"
    plugin = load_plugin(METHODS / "identity.py")
    fused_shapes = ((80, "bfloat16"),)


class TestCentred(MethodConformance):
    method = "centred"
    plugin = load_plugin(METHODS / "centred.py")
    fused_shapes = ((80, "bfloat16"), (64, "float32"))


class TestPicky(MethodConformance):
    method = "picky"
    plugin = load_plugin(METHODS / "picky.py")
    fused_shapes = ((64, "float16"), (128, "float32"))


class TestLearnt(CodecConformance, NumbersConformance, DeterminismConformance, ProtocolConformance):
    """Constants from calibration: the kit makes a stand-in of no model."""

    method = "learnt"
    variants = ("learnt:levels=15",)
    ladder = ("learnt:levels=15", method)
    plugin = load_plugin(METHODS / "learnt.py")


class TestSignSketchWithKivi(MethodConformance):
    method = "sign_sketch:sketch=128"
    variants = ("sign_sketch", "sign_sketch:sketch=64")
    plugin = load_plugin(METHODS / "sign_sketch.py")
    values = "kivi:bits=4"


class TestKivi(MethodConformance):
    method = "kivi:bits=4,group_size=64"
    fused_shapes = ((80, "float16"),)


class TestKiviOfAllWidths(CodecConformance, NumbersConformance, AttentionConformance):
    """Codec, numbers and attention of every width; the cache is run with 2 bits by vq-kivi and with 4 above."""

    method = "kivi:bits=3"
    variants = tuple(f"kivi:bits={b},group_size={g}" for b, g in ((2, 32), (3, 64), (8, 32), (2, 128)))
    ladder = tuple(f"kivi:bits={bits}" for bits in (2, 3, 4, 8))


class TestExample(MethodConformance):
    method = "example:bits=2"
    fused_shapes = ((64, "bfloat16"),)


def code_lines(path: Path, hook: str = "", without: str = "") -> int:
    """Lines of a file that hold code: no blank lines, comments, docstrings, imports or decorators.

    Of one hook only, or of all but one.
    """
    text = path.read_text()
    left_out: set[int] = set()
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        prose = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if prose or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        left_out |= {mark.lineno for mark in getattr(node, "decorator_list", ())}
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for t in tokens if t.type not in silent for n in range(t.start[0], t.end[0] + 1)} - left_out

    def of(name: str) -> set[int]:
        return set(range(functions[name].lineno, (functions[name].end_lineno or 0) + 1))

    return len(lines & of(hook) if hook else lines - of(without) if without else lines)


@pytest.mark.parametrize(
    "path",
    [
        *(METHODS / f"{name}.py" for name in ("identity", "sign_sketch", "centred")),
        EXAMPLE,
    ],
    ids=lambda path: path.stem,
)
def test_an_outsider_needs_forty_lines(path: Path) -> None:
    assert code_lines(path, without="vq_snippet") <= 40


@pytest.mark.parametrize(
    "path",
    [*(METHODS / f"{name}.py" for name in ("identity", "sign_sketch", "centred", "picky")), EXAMPLE],
    ids=lambda path: path.stem,
)
def test_a_snippet_needs_thirty_lines(path: Path) -> None:
    assert code_lines(path, hook="vq_snippet") <= 30
