"""Writes down what the keys of a configuration file may hold, for ``quietgrad train`` and
``quietgrad compare`` to refuse a wrong one before torch is loaded.

    python scripts/keys.py

The records that read a file say it; ``tests/training/test_known_keys.py`` holds what is written
against them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from quietgrad.comparing import early
from quietgrad.comparing.search import Range, SearchTable
from quietgrad.comparing.table import AccountedTable, ComparisonTable
from quietgrad.records import hints_of, plain
from quietgrad.training.settings.config import TABLES
from quietgrad.training.settings.reading import OF_TRAINING, Table, one

# Of a comparison, beside those that all runs share; ``ranges`` is each [search.ranges."table.key"].
OF_COMPARING = {
    "comparison": one(ComparisonTable),
    "accounted": one(AccountedTable),
    "search": one(SearchTable),
    "ranges": one(Range),
}
FILES: dict[Path, Mapping[str, Table]] = {OF_TRAINING: TABLES, early.KEYS: OF_COMPARING}


def text_of(tables: Mapping[str, Table]) -> str:
    """A file's text: a key a line."""
    told = {
        name: {
            "key": table.key,
            "kinds": {
                word: {key: json.dumps(plain(hint)) for key, hint in hints_of(kind).items()}
                for word, kind in table.kinds.items()
            },
        }
        for name, table in tables.items()
    }
    lines = json.dumps(told, indent=1)
    for table in told.values():
        for hints in table["kinds"].values():
            for hint in hints.values():
                lines = lines.replace(json.dumps(hint), hint)
    return lines + "\n"


def main() -> None:
    for path, tables in FILES.items():
        path.write_text(text_of(tables), encoding="utf-8")
        print(f"{path}: {len(tables)} tables")


if __name__ == "__main__":
    main()
