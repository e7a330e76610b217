"""What a comparison's file says that can be refused before torch is loaded, which alone takes
seconds: its parts, their keys and values, and what a variant may change.

What passes here is judged again with everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.checks import nearest
from quietgrad.training.settings.overrides import Tree, read_toml
from quietgrad.training.settings.reading import each_table, outlined

KEYS = Path(__file__).with_name("keys.json")
# What a variant may change; the rest is prepared once for all runs.
VARIED_TABLES = ("privacy", "clipping", "noise", "denoising", "optimizer", "users")
FIXED = ("privacy.target_epsilon", "privacy.noise_multiplier", "privacy.target_delta")
VARIED_KEYS = ("training.expected_batch_size", "training.steps", "training.epochs")


@dataclass(frozen=True)
class Parts:
    """A comparison's file, nothing of it judged but that it is one.

    Attributes:
        comparison, accounted: tables; the second is empty where the file has none.
        search: table; None where there is none.
        variants: name -> {"table.key": value}.
        base: the other tables, which all runs share.
    """

    comparison: Any
    accounted: Any
    search: Any
    variants: dict[str, dict[str, Any]]
    base: Tree


def parts_of(path: str | Path) -> Parts:
    """Reads a comparison's file.

    Raises:
        ValueError: missing or malformed file, no comparison, variants that are no tables of keys.
    """
    tree = read_toml(path)
    if "comparison" not in tree or "variants" not in tree:
        raise ValueError(
            f"config={str(path)!r} has no [comparison] or no [variants.NAME] table; `quietgrad "
            "train` takes single runs"
        )
    comparison, variants = tree.pop("comparison"), tree.pop("variants")
    if not isinstance(variants, Mapping):
        raise ValueError(f"variants={variants!r} must be tables, such as [variants.plain]")
    flat = {name: _flat(name, values) for name, values in variants.items()}
    return Parts(comparison, tree.pop("accounted", {}), tree.pop("search", None), flat, tree)


def require_comparison(path: str | Path, accounted: bool = False) -> None:
    """Judges keys and values in the words of ``load_comparison``, which makes the records too.

    Args:
        path: a comparison's file.
        accounted: whether its choice is paid for, so that its records may be private.

    Raises:
        ValueError: for a table, key or value that no comparison has; a reference that is no
            variant; records that were not declared public; a variant that changes what all share.
    """
    parts, tables = parts_of(path), outlined(KEYS)
    search = {}
    if isinstance(parts.search, Mapping):
        search = {"search": {k: v for k, v in parts.search.items() if k != "ranges"}}
        ranges = parts.search.get("ranges")
        for key, values in ranges.items() if isinstance(ranges, Mapping) else ():
            if isinstance(values, Mapping) and "key" not in values:
                tables["ranges"].judged(f'search.ranges."{key}"', values)
    own = {"comparison": parts.comparison, "accounted": parts.accounted, **search}
    for name, table, values in each_table(own, tables):
        table.judged(name, values)
    if "reference" in parts.comparison:
        require_reference(parts.comparison["reference"], parts.variants)
    if not accounted:
        require_public(path, parts.base)
    figure = parts.comparison.get("figure")
    if figure is not None and Path(figure).suffix.lower() != ".png":
        raise ValueError(f"comparison.figure={figure!r} must end in .png: the figure is a PNG file")
    for variant, changed in parts.variants.items():
        for name in changed:
            require_varied(f"variants.{variant}.{name}", name)
    known = outlined()
    for changed in ({}, *parts.variants.values()):
        for name, table, values in each_table(changed_by(parts.base, changed.items()), known):
            table.judged(name, values)


def changed_by(base: Tree, changed: Iterable[tuple[str, Any]]) -> Tree:
    """Tables with other values of some keys, each "table.key"."""
    tree = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for name, value in changed:
        table, _, key = name.partition(".")
        values = tree.setdefault(table, {})
        if isinstance(values, dict):  # what is none is refused by whoever reads it
            values[key] = value
    return tree


def require_reference(reference: str, variants: Iterable[str]) -> None:
    if reference not in (names := list(variants)):
        raise ValueError(
            f"comparison.reference={reference!r} is no variant{nearest(reference, names)}"
        )


def require_public(path: str | Path, base: Tree) -> None:
    declared = base.get("data", {})
    if not (isinstance(declared, Mapping) and declared.get("public") is True):
        raise ValueError(
            f"config={str(path)!r}: a comparison makes many runs with known seeds on the same "
            "records, which no single epsilon covers; compare on records that are public, and say "
            "so with "
            "data.public = true, or let --accounted draw the runs and pay for the choice"
        )


def require_varied(shown: str, name: str) -> None:
    """That a variant, or a search, may change a key.

    Args:
        shown: where it is changed, for the message.
        name: "table.key".
    """
    varied = name.partition(".")[0] in VARIED_TABLES or name in VARIED_KEYS
    if name in FIXED or not varied:
        raise ValueError(
            f"{shown} cannot vary: data, model and cached states are shared by all runs; "
            "vary one of "
            f"{', '.join((*VARIED_TABLES, *VARIED_KEYS))}, or make a comparison of its own"
        )


def _flat(variant: str, values: Any) -> dict[str, Any]:
    """{"denoising": {"method": "paper"}} to {"denoising.method": "paper"}."""
    if not isinstance(values, Mapping):
        raise ValueError(f"variants.{variant}={values!r} must be a table of keys")
    for table, keys in values.items():
        if not isinstance(keys, Mapping):
            raise ValueError(
                f"variants: {table}={keys!r} must be a key of a table, such as denoising.method"
            )
    return {
        f"{table}.{key}": value for table, keys in values.items() for key, value in keys.items()
    }
