"""``quietgrad settings``: what the keys of a configuration file are, from the records that read it,
so that nothing is said twice.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table as Shown

from quietgrad.checks import ELSEWHERE
from quietgrad.cli.output import console, print_json
from quietgrad.records import described, hints_of
from quietgrad.training.settings.config import TABLES
from quietgrad.training.settings.reading import Table

ENTRY = re.compile(r"    (\w+(?:, \w+)*): +(.*)")
SEE = re.compile(r"see ``(\w+)``\.?")


@dataclass(frozen=True)
class Setting:
    """A key of a table.

    Attributes:
        table, key: its name.
        kind: what it may be, in words.
        default: where nothing is said; None is nothing.
        meaning: from the record's docstring.
        words: which of the table's methods have it so; empty: all, or the table has none.
    """

    table: str
    key: str
    kind: str
    default: Any
    meaning: str
    words: list[str] = field(default_factory=list)


def run_settings(key: str | None, as_json: bool) -> None:
    """See ``quietgrad settings --help``."""
    found = chosen(key)
    if as_json:
        print_json({"settings": [dataclasses.asdict(setting) for setting in found]})
        return
    target = console(False)
    for name in dict.fromkeys(setting.table for setting in found):
        of_table = [setting for setting in found if setting.table == name]
        shown = Shown(title=f"[{name}]".replace("[", r"\["), title_justify="left", pad_edge=False)
        shown.add_column("key", style="bold", overflow="fold")
        shown.add_column("what it may be", overflow="fold", ratio=2)
        shown.add_column("default", overflow="fold", ratio=1)
        shown.add_column("what it means", overflow="fold", ratio=4)
        for setting in of_table:
            picks = TABLES[name].key
            only = f"with {picks} {', '.join(setting.words)}: " if setting.words else ""
            row = (setting.key, setting.kind, _shown(setting.default), only + setting.meaning)
            shown.add_row(*(cell.replace("[", r"\[") for cell in row))
        target.print(shown)


def chosen(key: str | None) -> list[Setting]:
    """All settings, those of a table, or a key of any table that has it.

    Raises:
        ValueError: for a name that is none of these, with the nearest.
    """
    every = [setting for name in TABLES for setting in settings_of(name)]
    if key is None:
        return every
    found = [s for s in every if key in (s.table, s.key, f"{s.table}.{s.key}")]
    if not found:
        names = [*TABLES, *(name for s in every for name in (s.key, f"{s.table}.{s.key}"))]
        meant = [f"{s.table}.{s.key}" for s in every if s.key == ELSEWHERE.get(key)]
        close = meant or difflib.get_close_matches(key, dict.fromkeys(names), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "`quietgrad settings` has them all"
        raise ValueError(f"KEY={key!r} is no setting; {hint}")
    return found


def settings_of(name: str) -> list[Setting]:
    """Of one table; a key that differs by method stands there once for each."""
    table = TABLES[name]
    found = [_method(name, table)] if table.key else []
    for key in dict.fromkeys(k for kind in table.kinds.values() for k in hints_of(kind)):
        owners = {word: kind for word, kind in table.kinds.items() if key in hints_of(kind)}
        different: list[Setting] = []
        for word, kind in owners.items():
            said = _setting(name, key, kind)
            same = next((s for s in different if dataclasses.replace(s, words=[]) == said), None)
            if same is None:
                different.append(dataclasses.replace(said, words=[word]))
            else:
                same.words.append(word)
        for setting in different:
            everywhere = setting.words == list(table.kinds)
            found.append(dataclasses.replace(setting, words=[]) if everywhere else setting)
    return found


def _method(name: str, table: Table) -> Setting:
    words = {word: _first_sentence(kind) for word, kind in table.kinds.items()}
    return Setting(
        name,
        table.key,
        " or ".join(map(repr, words)),
        next(iter(words)),
        "; ".join(f"{word}: {meaning}" for word, meaning in words.items()),
    )


def _setting(table: str, key: str, kind: Any) -> Setting:
    known = next(f for f in dataclasses.fields(kind) if f.name == key)
    default = known.default
    if known.default_factory is not dataclasses.MISSING:
        default = known.default_factory()
    return Setting(table, key, described(hints_of(kind)[key]), default, meaning_of(kind, key))


def meaning_of(kind: Any, key: str) -> str:
    """What a record's docstring, or that of a record it is made from, says of a field."""
    for record in kind.__mro__:
        said = _attributes(record).get(key, "")
        see = SEE.fullmatch(said)
        other = next((k for k in _records() if see and k.__name__ == see.group(1)), None)
        if other is not None:
            return meaning_of(other, key)
        if said:
            return said.replace("``", "`")
    return ""


def _attributes(record: Any) -> dict[str, str]:
    """Field -> text of the section "Attributes:", wrapped lines joined."""
    found: dict[str, str] = {}
    names: list[str] = []
    _, _, section = inspect.cleandoc(record.__doc__ or "").partition("\nAttributes:\n")
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        if entry := ENTRY.fullmatch(line):
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2))
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def _records() -> Iterator[Any]:
    return (kind for table in TABLES.values() for kind in table.kinds.values())


def _first_sentence(kind: Any) -> str:
    if kind is type(None):
        return "nothing of the kind"
    text = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("``", "`").rstrip(".")


def _shown(default: Any) -> str:
    return "none" if default is None else json.dumps(default, ensure_ascii=False)
