"""The code blocks of a page, and the commands of a block."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```([^\n`]*)$")


class Block(NamedTuple):
    """What a fence says it is (``python``), the name it gives it, and its text."""

    kind: str
    title: str
    text: str


def blocks_of(page: str, kind: str | None = None) -> list[Block]:
    """Of a page of the repository, indented ones too."""
    found: list[Block] = []
    head: str | None = None
    lines: list[str] = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line)
        if fence and head is None:
            head, lines = fence[2].strip(), []
        elif fence and not fence[2]:
            word, _, rest = (head or "").partition(" ")
            title = re.fullmatch(r'title="(.+)"', rest)
            found.append(Block(word, title[1] if title else "", "\n".join(lines) + "\n"))
            head = None
        elif head is not None:
            lines.append(line)
    assert head is None, f"{page}: a block does not end"
    return [block for block in found if kind in (None, block.kind)]


def commands(text: str) -> list[list[str]]:
    """Words of each command, without comments; a line that ends with a backslash goes on."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
