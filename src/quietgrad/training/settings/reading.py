"""A table of a configuration file is a frozen record of the library: which one, its keys, and the
way there and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quietgrad.checks import listed, nearest
from quietgrad.records import conformed, hints_of


@dataclass(frozen=True)
class Table:
    """What may stand in a table.

    Attributes:
        kinds: word -> record; the first without a word. A field of the record is a key.
        key: whose word picks the record; "" where there is one alone.
    """

    kinds: Mapping[str, Any]
    key: str = ""

    def keys(self) -> list[str]:
        """Of all its records."""
        own = dict.fromkeys(name for kind in self.kinds.values() for name in hints_of(kind))
        return [self.key, *own] if self.key else list(own)

    def read(self, table: str, values: Mapping[str, Any]) -> Any:
        """The record that a file's table is.

        Raises:
            ValueError: naming key, value and remedy.
        """
        given = dict(values)
        word = given.pop(self.key, None) if self.key else None
        if word is None:
            word = next(iter(self.kinds))
        if not isinstance(word, str) or word not in self.kinds:
            hint = nearest(str(word), self.kinds)
            raise ValueError(f"{table}.{self.key}={word!r} is unknown{hint}")
        kind = self.kinds[word]
        hints = hints_of(kind)
        for key, value in given.items():
            if key not in hints:
                raise ValueError(self._unknown(table, key, value, word))
            given[key] = conformed(f"{table}.{key}", value, hints[key])
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:  # begins with the field's name
            raise ValueError(f"{table}.{error}") from None

    def written(self, record: Any) -> dict[str, Any]:
        """What reads back to the record; keys without a value are left out."""
        kind: Any = type(record)
        word = next(word for word, known in self.kinds.items() if known is kind)
        values = {key: getattr(record, key) for key in hints_of(kind)}
        picked = {self.key: word} if self.key else {}
        return picked | {key: value for key, value in values.items() if value is not None}

    def _unknown(self, table: str, key: str, value: object, word: str) -> str:
        owners = [other for other, kind in self.kinds.items() if key in hints_of(kind)]
        if not owners:
            return f"unknown key {table}.{key}{nearest(key, self.keys())}"
        valid = hints_of(self.kinds[word])
        has = f"whose keys are {listed(valid, 'and')}" if valid else "which has no keys"
        return (
            f"{table}.{key}={value!r} is no key of {table}.{self.key}={word!r}, {has}; it belongs "
            f"to {listed(map(repr, owners))}: take it out, or set another {self.key}"
        )


def one(kind: type) -> Table:
    """A table that is always the same record."""
    return Table({"": kind})
