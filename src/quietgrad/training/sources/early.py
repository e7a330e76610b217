"""What a configuration's file says that can be refused before torch is loaded, which alone takes
seconds: no such file, a wrong key or value, a name of Hugging Face's hub that leads nowhere,
torchvision where it is not installed.

What passes here is judged again with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quietgrad.training.settings.overrides import (
    Tree,
    default_config_path,
    read_toml,
    value_of,
    with_overrides,
)
from quietgrad.training.settings.reading import each_table, outlined
from quietgrad.training.sources.hub import is_hub_name, require_data, require_model
from quietgrad.training.sources.rows import FILES

OWN = ("packaged", "torchvision")  # of sources, before the colon


def look_early(
    path: Path | None,
    overrides: Sequence[str] = (),
    data: bool = True,
    keys: bool = True,
    ignored: Sequence[str] = (),
) -> None:
    """Looks at keys and values, and at the names of model and records.

    Args:
        path: a TOML file; None: the embedded default.
        overrides: of ``--set``.
        data: whether the records of the configuration are going to be read; where not, the model is
            a finished run's, with weights of its own.
        keys: whether the file is a whole configuration; a comparison's is one with a variant's keys
            alone.
        ignored: tables that are not this command's.

    Raises:
        ValueError: for a file that is missing or no TOML; for keys and values that no
            configuration has; for names that lead nowhere.
    """
    tree = read_toml(default_config_path() if path is None else path)
    if keys:
        require_keys({name: tree[name] for name in tree if name not in ignored}, overrides)

    def said(table: str, key: str) -> str:
        value = value_of(tree, overrides, table, key, alone=table == "data")
        return value if isinstance(value, str) else ""

    if model := said("model", "name"):
        require_model("model.name", model, said("model", "weights") if data else "saved")
    for key in ("source", "test_source") if data else ():
        source = said("data", key)
        name = source.partition(":")[0]
        if Path(source).suffix.lower() in FILES:
            if not Path(source).exists():
                raise ValueError(f"data.{key}={source!r}: no such file")
        elif is_hub_name(name) and name not in OWN and not Path(source).exists():
            require_data(f"data.{key}", source)


def require_keys(tree: Tree, overrides: Sequence[str] = ()) -> None:
    """Judges keys and values in the words of ``load_config``, which makes the records too.

    Raises:
        ValueError: for a table, key or value that no configuration has.
    """
    tables = outlined()
    whole = with_overrides(tree, overrides, {name: table.keys() for name, table in tables.items()})
    for name, table, values in each_table(whole, tables):
        table.judged(name, values)
