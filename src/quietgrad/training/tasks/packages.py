"""Files that ordinary packages carry (a small model, a data set), found through the package's
metadata: the package itself is never imported.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def packaged_file(package: str, ending: str, setting: str, install: str, holds: str) -> Path:
    """The file of an installed package whose name ends so.

    Args:
        package: its name on the index.
        ending: of the file's name.
        setting: "table.key='value'", for what it is needed.
        install: what to type where the package is missing.
        holds: what the file is, in a word or two.

    Raises:
        ValueError: if the package or the file is missing, with the remedy.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"{setting} needs the package {package}: {install}") from error
    found = [f for f in files if f.name.endswith(ending)]
    if not found:
        raise ValueError(
            f"the installed package {package} holds no {holds}; reinstall it: {install}"
        )
    return Path(str(found[0].locate()))
