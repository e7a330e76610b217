"""Writes down what the keys of a configuration file may hold, for ``quietgrad train`` to refuse a
wrong one before torch is loaded.

    python scripts/keys.py

The records that read a file say it; ``tests/training/test_known_keys.py`` holds what is written
against them.
"""

from __future__ import annotations

import json
from pathlib import Path

from quietgrad.records import hints_of, plain
from quietgrad.training.settings import config

KEYS = Path(config.__file__).with_name("keys.json")


def text_of_keys() -> str:
    """The file's text: a key a line."""
    told = {
        name: {
            "key": table.key,
            "kinds": {
                word: {key: json.dumps(plain(hint)) for key, hint in hints_of(kind).items()}
                for word, kind in table.kinds.items()
            },
        }
        for name, table in config.TABLES.items()
    }
    lines = json.dumps(told, indent=1)
    for table in told.values():
        for hints in table["kinds"].values():
            for hint in hints.values():
                lines = lines.replace(json.dumps(hint), hint)
    return lines + "\n"


def main() -> None:
    KEYS.write_text(text_of_keys(), encoding="utf-8")
    print(f"{KEYS.name}: {len(config.TABLES)} tables")


if __name__ == "__main__":
    main()
