"""Training text of the demo model: Jane Austen's six novels, from a Debian package.

    apt-get download r-cran-janeaustenr
    pip install rdata
    python -m vq_core.demo.text --deb r-cran-janeaustenr_1.0.0-1_all.deb --out text/

writes one plain ASCII file a novel (paragraphs on one line, a blank line between them), and
`heldout.txt`: three chapters that no training file contains.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import tarfile
import unicodedata
import warnings
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = "r-cran-janeaustenr"
VERSION = "1.0.0-1"
PACKAGE_SHA256 = "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95"
"""The package file the shipped model was trained from."""

DATA_DIR = "usr/lib/R/site-library/janeaustenr/data/"
NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
HELDOUT_NOVEL = "northangerabbey"
HELDOUT_CHAPTERS = (20, 21, 22)
"""Catherine arrives at the abbey: kept out of training and of the choice of the checkpoint."""

_CHAPTER = re.compile(r"chapter ([ivxl]+|[0-9]+)", re.IGNORECASE)
_NOT_PROSE = re.compile(r"(volume [ivx]+|finis|the end|[*\s]+)", re.IGNORECASE)
_END = "A NOTE ON THE TEXT"
_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50}


def _number(numeral: str) -> int:
    """A chapter's number, from digits or a Roman numeral."""
    if numeral.isdigit():
        return int(numeral)
    values = [_ROMAN[letter] for letter in numeral.lower()]
    following = [*values[1:], 0]
    return sum(-v if v < after else v for v, after in zip(values, following, strict=True))


def _ascii(text: str) -> str:
    """Plain ASCII: accents dropped, emphasis marks removed, runs of blanks made one."""
    text = text.replace("\u00a3", "L").replace("_", "")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")
    return re.sub(r"\s+", " ", text).strip()


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Blocks of lines between blank ones, each joined to one line."""
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield _ascii(" ".join(block))
            block = []
    if block:
        yield _ascii(" ".join(block))


def chapters(lines: Iterable[str]) -> list[str]:
    """A novel's chapters as normalised text, front matter and closing notes left out."""
    found: list[list[str]] = []
    for paragraph in _paragraphs(lines):
        if paragraph == _END:
            break
        heading = _CHAPTER.fullmatch(paragraph)
        if heading:
            found.append([f"Chapter {_number(heading[1])}"])
        elif found and paragraph and not _NOT_PROSE.fullmatch(paragraph):
            found[-1].append(paragraph)
    return ["\n\n".join(paragraphs) + "\n\n" for paragraphs in found]


def _deb_data(deb: Path) -> tarfile.TarFile:
    """The file tree inside a .deb (an ar archive that holds data.tar.xz)."""
    blob = deb.read_bytes()
    at = 8
    while at < len(blob):
        name = blob[at : at + 16].decode().strip().rstrip("/")
        size = int(blob[at + 48 : at + 58])
        if name == "data.tar.xz":
            body = lzma.decompress(blob[at + 60 : at + 60 + size])
            return tarfile.open(fileobj=io.BytesIO(body))
        at += 60 + size + size % 2
    raise ValueError(f"{deb}: no data.tar.xz in it")


def _r_value(blob: bytes) -> Any:
    """One serialized R object as Python data."""
    import rdata  # type: ignore[import-not-found, unused-ignore]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rdata.conversion.convert(rdata.parser.parse_data(blob))


def novels(deb: Path) -> dict[str, list[str]]:
    """Each novel's chapters, read from the package's R database."""
    tree = _deb_data(deb)

    def read(name: str) -> bytes:
        for prefix in ("./", ""):
            try:
                member = tree.extractfile(prefix + DATA_DIR + name)
            except KeyError:
                continue
            if member is not None:
                return member.read()
        raise ValueError(f"{deb}: no {name} in it")

    index = _r_value(zlib.decompress(read("Rdata.rdx"), wbits=47))["variables"]
    database = read("Rdata.rdb")
    out: dict[str, list[str]] = {}
    for name in NOVELS:
        offset, length = (int(n) for n in index[name])
        # Four bytes of length stand before each object's zlib stream.
        lines = _r_value(zlib.decompress(database[offset + 4 : offset + length]))
        out[name] = chapters(str(line) for line in lines)
    return out


def write_corpus(deb: Path, out: Path) -> dict[str, str]:
    """Write the novels and the held-out chapters to `out`; returns each file's sha256."""
    out.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for name, parts in novels(deb).items():
        if name == HELDOUT_NOVEL:
            files["heldout.txt"] = "".join(parts[n - 1] for n in HELDOUT_CHAPTERS)
            parts = [p for n, p in enumerate(parts, 1) if n not in HELDOUT_CHAPTERS]
        files[f"{name}.txt"] = "".join(parts)
    hashes: dict[str, str] = {}
    for filename, text in sorted(files.items()):
        data = text.encode("ascii")
        (out / filename).write_bytes(data)
        hashes[filename] = hashlib.sha256(data).hexdigest()
        print(f"{filename:24} {len(data):9,} bytes  sha256 {hashes[filename]}")
    return hashes


def main(argv: list[str] | None = None) -> None:
    """Command line: see the module's description."""
    parser = argparse.ArgumentParser(description="Make the demo model's training text.")
    parser.add_argument("--deb", type=Path, required=True, help=f"{PACKAGE}_{VERSION}_all.deb")
    parser.add_argument("--out", type=Path, required=True, help="folder for the text files")
    args = parser.parse_args(argv)
    found = hashlib.sha256(args.deb.read_bytes()).hexdigest()
    if found != PACKAGE_SHA256:
        print(f"note: {args.deb} is not the file the shipped model was trained from ({found})")
    hashes = write_corpus(args.deb, args.out)
    (args.out / "sha256.json").write_text(json.dumps(hashes, indent=2) + "\n")


if __name__ == "__main__":
    main()
