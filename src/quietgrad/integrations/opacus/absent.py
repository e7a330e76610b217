"""Names of Opacus that have no counterpart here: importing one says what there is instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def absent(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``.

    Args:
        module: its ``__name__``.
        names: what to use instead of each.

    Returns:
        A function that raises ImportError for those names (``from ... import`` would put words of
        its own over an AttributeError's), and AttributeError for all others.
    """

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module} has no {name!r}: {names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
