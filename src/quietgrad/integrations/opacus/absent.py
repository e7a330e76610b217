"""Names and modules of Opacus that have no counterpart here: importing one says what there is
instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
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


class AbsentModules(MetaPathFinder):
    """Finds nothing: the import of a module that is not here ends in a line of its own.

    Args:
        package: that the modules would be in.
        modules: name within it -> what to use instead.
    """

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._modules = {f"{package}.{name}": remedy for name, remedy in modules.items()}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raises:
        ModuleNotFoundError: for one of the modules.
        """
        if fullname in self._modules:
            package, _, name = fullname.rpartition(".")
            remedy = self._modules[fullname]
            raise ModuleNotFoundError(f"{package} has no {name!r}: {remedy}", name=fullname)


def let_imports_say(package: str, modules: Mapping[str, str]) -> None:
    """Modules of ``package`` that are not there say what there is instead, from now on."""
    sys.meta_path.append(AbsentModules(package, modules))
