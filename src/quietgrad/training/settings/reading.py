"""A table of a configuration file is a frozen record of the library: which one, its keys, and the
way there and back.

The records' modules import torch, which takes seconds. ``keys.json`` beside this file, written by
``scripts/keys.py``, says what their keys may hold, so that a wrong one is refused before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.checks import listed, nearest
from quietgrad.records import Outline, conformed, hint_from, hints_of

OF_TRAINING = Path(__file__).with_name("keys.json")
# What a key is called in other libraries, whose names are nearer to the wrong ones here.
ELSEWHERE = {
    "model.name": ("model", "model_name", "model_name_or_path", "base_model"),
    "model.lora_rank": ("lora_r", "r"),
    "data.source": ("data", "dataset", "train_file", "data_path", "dataset_name"),
    "data.text": ("text_column",),
    "data.label": ("target", "label_column", "target_column"),
    "data.user": ("user_column", "user_id", "group_by"),
    "privacy.target_epsilon": ("epsilon", "eps"),
    "privacy.target_delta": ("delta",),
    "privacy.noise_multiplier": ("sigma", "multiplier"),
    "privacy.max_grad_norm": ("clip", "clip_norm", "max_norm", "l2_norm_clip"),
    "optimizer.name": ("optimizer", "optim"),
    "optimizer.learning_rate": ("lr",),
    "optimizer.weight_decay": ("wd",),
    "optimizer.schedule": ("scheduler", "lr_scheduler", "lr_scheduler_type"),
    "performance.max_physical_batch_size": (
        "physical_batch_size",
        "micro_batch_size",
        "per_device_train_batch_size",
    ),
    "training.expected_batch_size": ("batch",),
    "training.epochs": ("num_train_epochs", "max_epochs", "n_epochs"),
    "training.precision": ("bf16", "fp16", "dtype", "torch_dtype"),
    "training.run_dir": ("output_dir", "out_dir", "save_dir"),
}


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
        kind, given = self.judged(table, values)
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:  # begins with the field's name
            raise ValueError(f"{table}.{error}") from None

    def judged(self, table: str, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(kind of the record, its fields as they are annotated); what they say together is for the
        record to judge.

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
        return kind, given

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
            return f"unknown key {table}.{key}{here(key) or nearest(key, self.keys())}"
        valid = hints_of(self.kinds[word])
        has = f"whose keys are {listed(valid, 'and')}" if valid else "which has no keys"
        return (
            f"{table}.{key}={value!r} is no key of {table}.{self.key}={word!r}, {has}; it belongs "
            f"to {listed(map(repr, owners))}: take it out, or set another {self.key}"
        )


def one(kind: type) -> Table:
    """A table that is always the same record."""
    return Table({"": kind})


def here(key: str) -> str:
    """What a key of another library is called here, as the end of a message; "" for no such."""
    return next((f"; did you mean {own!r}?" for own, said in ELSEWHERE.items() if key in said), "")


def meant(table: str, key: str, keys: Mapping[str, Iterable[str]]) -> str:
    """``nearest`` of a table's keys, and the same key of another table, as the end of a message.

    Args:
        table, key: what was given.
        keys: of each table.
    """
    close = here(key) or nearest(key, keys[table])
    owners = [f"'{other}.{key}'" for other, names in keys.items() if key in names]
    if not owners:
        return close
    start = f"{close[:-1]}, or" if close.endswith("?") else "; did you mean"
    return f"{start} {listed(owners)}?"


def each_table(
    tree: Mapping[str, Any], tables: Mapping[str, Table]
) -> Iterator[tuple[str, Table, Mapping[str, Any]]]:
    """(name, what may stand there, what does) of a file's tables, one after the other.

    Raises:
        ValueError: for one that is unknown, or no table, or that has another one's key.
    """
    for name, values in tree.items():
        if name not in tables and not isinstance(values, Mapping):
            raise ValueError(
                f"key {name!r} stands outside of a table; put it below the name of its own, such "
                "as [training]"
            )
        if name not in tables:
            raise ValueError(f"unknown table [{name}]{nearest(name, tables)}")
        if not isinstance(values, Mapping):
            raise ValueError(f"{name}={values!r} must be a table of keys")
        known = {other: table.keys() for other, table in tables.items()}
        for key in values:
            if key not in known[name] and any(key in keys for keys in known.values()):
                raise ValueError(f"unknown key {name}.{key}{meant(name, key, known)}")
        yield name, tables[name], values


def outlined(path: Path = OF_TRAINING) -> dict[str, Table]:
    """The tables of a configuration (a training's where no other is named), with outlines in place
    of the records.

    Args:
        path: what ``scripts/keys.py`` wrote of them.
    """
    told = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Table(
            {
                word: Outline({key: hint_from(hint) for key, hint in hints.items()})
                for word, hints in table["kinds"].items()
            },
            table["key"],
        )
        for name, table in told.items()
    }
