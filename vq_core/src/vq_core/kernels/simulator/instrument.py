"""Marks loops and helper calls in a kernel's text, so that lanes which meet at one place in different rounds of a loop,
or through different calls of one helper, are told apart from lanes that are together.

The marks are inserted between the words of the text; its lines stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_COLLECTIVES = (
    r"threadgroup_barrier|simdgroup_barrier|simd_(?:shuffle(?:_xor|_up|_down)?|broadcast|ballot|any|all|sum|min|max|"
    r"prefix_(?:in|ex)clusive_sum)|vq_mma_m16n8k16|vq_transpose_8x8"
)
_COLLECTIVE = re.compile(rf"\b(?:{_COLLECTIVES})\b")
_LOOP = re.compile(r"\b(for|while|do)\b")
_DEFINED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
_CLOSING = {"(": ")", "{": "}"}


def without_comments(text: str) -> str:
    """``text`` with comments blanked; every character keeps its place."""
    return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def helpers_with_collectives(header: str) -> frozenset[str]:
    """Names of the header's functions and macros that hold a collective, or call one that does."""
    text = without_comments(header)
    bodies: dict[str, str] = {}
    for at, name in _top_level_calls(text):
        closing = _close(text, text.index("(", at))
        opening = text.find("{", closing)
        if opening >= 0 and not text[closing:opening].strip():  # else a macro in a list of arguments
            bodies[name] = bodies.get(name, "") + text[opening : _close(text, opening)]
    for macro in re.finditer(r"#[ \t]*define[ \t]+(\w+)((?:\\\n|[^\n])*)", text):
        bodies[macro[1]] = bodies.get(macro[1], "") + macro[2]
    found = {name for name, body in bodies.items() if _COLLECTIVE.search(body)}
    while more := {
        name
        for name, body in bodies.items()
        if name not in found and re.search(rf"\b(?:{'|'.join(found or '-')})\b", body)
    }:
        found |= more
    return frozenset(found)


def instrument(text: str, helpers: frozenset[str], *, header: bool) -> str:
    """``text`` with its marks. ``header``: names before a parenthesis at the outermost level are definitions."""
    plain = without_comments(text)
    holds = re.compile(rf"\b(?:{'|'.join([_COLLECTIVES, *map(re.escape, sorted(helpers))])})\b")
    marks: list[tuple[int, int, str]] = []  # (place, order at that place, mark)
    tails: set[int] = set()  # the while of a do
    for number, found in enumerate(_LOOP.finditer(plain)):
        if found.start() in tails:
            continue
        rounds = f"vq_rounds_{number}"
        start = f"for (vq_rounds {rounds}; {rounds}.once; {rounds}.once = false) "
        if found[1] == "do":
            opening = plain.find("{", found.end())
            if opening < 0 or plain[found.end() : opening].strip():
                continue
            closing = _close(plain, opening)
            if tail := re.compile(r"\s*(while)\b").match(plain, closing):
                tails.add(tail.start(1))
            inside, condition = plain[opening:closing], None
            body_mark = (opening + 1, 1, f" {rounds}.next();")
        else:
            opening = plain.find("(", found.end())
            if opening < 0 or plain[found.end() : opening].strip():
                continue
            closing = _close(plain, opening)
            inside = plain[opening : _statement_end(plain, closing)]
            condition = _condition(plain, found[1], opening, closing)
            if condition is None:
                continue
            body_mark = None
        if not holds.search(inside):
            continue
        marks.append((found.start(), 0, start))
        if body_mark:
            marks.append(body_mark)
        if condition:
            first, last = condition
            # Before the condition: a mark of a call in it ends with it, and would take the round along.
            if plain[first:last].strip():
                marks += [(first, 0, f"{rounds}.next() && ("), (last, 1, ")")]
            else:
                marks.append((first, 0, f" {rounds}.next()"))
    if helpers:
        marks += _call_marks(plain, helpers, header)
    for place, _, mark in sorted(marks, key=lambda mark: mark[:2], reverse=True):
        text = text[:place] + mark + text[place:]
    return text


def _call_marks(plain: str, helpers: frozenset[str], header: bool) -> Iterator[tuple[int, int, str]]:
    calls = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(helpers)))})\s*(?:<[^;(){{}}]*>\s*)?\(")
    defined = {at for at, _ in _top_level_calls(plain)} if header else set()
    for found in calls.finditer(plain):
        line = plain[plain.rfind("\n", 0, found.start()) + 1 : found.start()]
        if found.start() in defined or re.match(r"\s*#", line):
            continue
        yield found.start(), 1, "(vq_call(VQ_SITE), "
        yield _close(plain, found.end() - 1), 0, ")"


def _top_level_calls(text: str) -> Iterator[tuple[int, str]]:
    """Names before a parenthesis outside of all braces: the functions that a header defines."""
    depth, last = 0, 0
    for found in _DEFINED.finditer(text):
        depth += text.count("{", last, found.start()) - text.count("}", last, found.start())
        last = found.start()
        if depth == 0:
            yield found.start(), found[1]


def _close(text: str, opening: int) -> int:
    """The place after the bracket that closes the one at ``opening``; the end of the text where none does."""
    bracket, depth = text[opening], 0
    for at in range(opening, len(text)):
        if text[at] == bracket:
            depth += 1
        elif text[at] == _CLOSING[bracket]:
            depth -= 1
            if depth == 0:
                return at + 1
    return len(text)


def _statement_end(text: str, at: int) -> int:
    """The place after the statement that begins at ``at``."""
    while at < len(text):
        if text[at] == "(":
            at = _close(text, at)
        elif text[at] == ";" or text[at] == "{":
            at = _close(text, at) if text[at] == "{" else at + 1
            following = re.compile(r"\s*else\b").match(text, at)
            if not following:
                return at
            at = following.end()
        else:
            at += 1
    return at


def _condition(text: str, word: str, opening: int, closing: int) -> tuple[int, int] | None:
    """Where a loop's condition begins and ends; None for a loop over a range."""
    if word == "while":
        return opening + 1, closing - 1
    depth, stops = 0, []
    for at in range(opening + 1, closing - 1):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if text[at] == ";" and depth == 0:
            stops.append(at)
    return (stops[0] + 1, stops[1]) if len(stops) == 2 else None
