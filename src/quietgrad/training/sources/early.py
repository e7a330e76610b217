"""What a configuration's file says that can be refused before torch is loaded, which alone takes
seconds: no such file, a name of Hugging Face's hub that leads nowhere.

What passes here is judged again with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quietgrad.training.settings.overrides import default_config_path, read_toml, value_of
from quietgrad.training.sources.hub import is_hub_name, require_data, require_model
from quietgrad.training.sources.rows import FILES

OWN = ("packaged", "torchvision")  # of sources, before the colon


def look_early(path: Path | None, overrides: Sequence[str] = (), data: bool = True) -> None:
    """Looks at the names of model and records.

    Args:
        path: a TOML file; None: the embedded default.
        overrides: of ``--set``.
        data: whether the records of the configuration are going to be read.

    Raises:
        ValueError: for a file that is missing or no TOML; for names that lead nowhere.
    """
    tree = read_toml(default_config_path() if path is None else path)

    def said(table: str, key: str) -> str:
        value = value_of(tree, overrides, table, key, alone=table == "data")
        return value if isinstance(value, str) else ""

    if model := said("model", "name"):
        require_model("model.name", model)
    for key in ("source", "test_source") if data else ():
        source = said("data", key)
        name = source.partition(":")[0]
        if Path(source).suffix.lower() in FILES:
            if not Path(source).exists():
                raise ValueError(f"data.{key}={source!r}: no such file")
        elif is_hub_name(name) and name not in OWN and not Path(source).exists():
            require_data(f"data.{key}", source)
