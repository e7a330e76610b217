"""Pages for strangers: none is long, the table of symbols names what the code has, and the map of
rooms has every room.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from test_house_rules import ROOMS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LONGEST = 1500
# Diaries of experiments; pages made from code are not written to disk at all.
LONG = "notes/"
PAGES = sorted(p for p in DOCS.rglob("*.md") if not str(p.relative_to(DOCS)).startswith(LONG))
SYMBOLS = "".join(
    (DOCS / name).read_text(encoding="utf-8") for name in ("symbols/beside.md", "symbols.md")
)
KNOWN_BY = ("public", "released", "private")


def words(text: str) -> int:
    """What ``wc -w`` counts, without code blocks and without what draws a table: its pipes, and the
    row of dashes below its head.
    """
    text = re.sub(r"^ *```.*?^ *```[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|[|\s:-]+$", "", text, flags=re.MULTILINE)
    return len(text.replace("|", " ").split())


def test_words_are_counted_as_stated() -> None:
    page = "# One two\n\n| a | b |\n| --- | --- |\n| c d | |\n\n```sh\nno no\n```\n- x\n"
    assert words(page) == 9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_page_is_long(page: Path) -> None:
    count = words(page.read_text(encoding="utf-8"))
    assert count <= LONGEST, (
        f"{page.relative_to(ROOT)} has {count} words, above {LONGEST}: give a subject a page of "
        "its own, or move what was measured to docs/notes/"
    )


def rows() -> list[list[str]]:
    """Rows of the tables of letters: symbol, meaning, unit, names, who may know."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in SYMBOLS.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| symbol "))
    ]
    return [row for row in cells if len(row) == 5]


def public() -> dict[str, Any]:
    """Public names without their module: the value."""
    found = {}
    for line in (ROOT / "tests" / "public_names.txt").read_text().split():
        module, _, name = line.rpartition(".")
        if "integrations" not in module:
            found[name] = getattr(importlib.import_module(module), name)
    return found


def member(value: Any, name: str) -> bool:
    """Whether a class, record, function or module has a field, method, parameter or name."""
    if hasattr(value, name):
        return True
    if dataclasses.is_dataclass(value):
        return name in {field.name for field in dataclasses.fields(value)}
    if name in getattr(value, "__annotations__", {}):
        return True
    return callable(value) and name in inspect.signature(value).parameters


def exists(name: str, names: dict[str, Any]) -> bool:
    """``Public.field``, or a path below the package."""
    first, *rest = name.split(".")
    if first in names:
        return all(member(names[first], part) for part in rest)
    value: Any = importlib.import_module("quietgrad")
    path = "quietgrad"
    for index, part in enumerate(name.split(".")):
        path += f".{part}"
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError:
            if not member(value, part):
                return False
            left = name.split(".")[index + 1 :]
            value = getattr(value, part, None)
            return all(member(value, one) for one in left)
    return True


def test_the_table_of_symbols_names_what_the_code_has() -> None:
    names = public()
    named = [name for row in rows() for name in re.findall(r"`([\w.]+)`", row[3])]
    assert len(named) > 60
    assert [name for name in named if not exists(name, names)] == []
    assert not exists("PrivacyConfig.no_such_field", names)
    assert not exists("accounting.one_step.no_such_function", names)
    assert not exists("NoSuchClass.steps", names)


def test_every_symbol_has_a_name_in_code_and_says_who_may_know_it() -> None:
    for row in rows():
        assert all(row), row
        assert "`" in row[3], row
        assert row[4].startswith(KNOWN_BY), row


def test_letters_are_in_the_table() -> None:
    wanted = "epsilon delta N B n q T t C sigma tau mu K k D b R Z theta kappa nu eta W X"
    symbols = {part.strip() for row in rows() for part in re.split(r"[,(]", row[0])}
    assert sorted(set(wanted.split(" ")) - symbols) == []


def test_what_the_events_state_is_in_the_table() -> None:
    """Every number of a privacy event: a new one gets a letter, or at least a row."""
    from quietgrad.events import PoissonGaussian, RandomizedClipping, SideRelease

    words_beside = {"clipping", "beside", "envelope", "name"}
    for record in (PoissonGaussian, RandomizedClipping, SideRelease):
        for field in dataclasses.fields(record):
            if field.name not in words_beside:
                assert f"`{record.__name__}.{field.name}`" in SYMBOLS


def test_letters_with_several_meanings_are_listed() -> None:
    said = SYMBOLS.split("## Letters with several meanings")[1]
    seen: dict[str, int] = {}
    for row in rows():
        for part in row[0].split(","):
            letter = re.sub(r" \(of .*\)", "", part.strip())
            if re.fullmatch(r"[A-Za-z]|mu|eta|alpha|beta|theta|kappa|nu|tau|sigma", letter):
                seen[letter] = seen.get(letter, 0) + 1
    twice = {letter for letter, count in seen.items() if count > 1}
    assert len(twice) > 5
    assert sorted(letter for letter in twice if f"\n| {letter} |" not in said) == []


def test_the_map_has_every_room() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert [room for room in ROOMS if f"\n| `{room}" not in page] == []
