"""Makes notebooks of the gallery's scripts, into build/notebooks.

    python scripts/notebooks.py [--folder build/notebooks] [--smoke]

The scripts are the only copy that is kept: a notebook is a script whose ``main`` is unfolded into
cells, so that its values can be looked at. First its docstring, then where it stands and which
options it is given, its imports, a cell for every function and class, and one for every stretch of
``main``. Needs nbformat (the extra ``dev``). To read and run them: any program for notebooks, with
quietgrad in its environment.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "examples" / "gallery"
FOLDER = ROOT / "build" / "notebooks"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
LONG = (ast.With, ast.For, ast.FunctionDef)  # what begins a cell of its own in ``main``


def cells_of(path: Path, folder: Path, smoke: bool) -> tuple[str, list[str]]:
    """What a script says of itself, and its code in cells, to be run from ``folder``.

    Args:
        path: a script: docstring, imports, functions and classes, a ``main`` without arguments
            that returns nothing, and the call of it.
        folder: where the notebook stands.
        smoke: a few seconds in place of a minute or two.

    Raises:
        ValueError: for a script that does not have that form.
    """
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    told, *statements, call = tree.body
    main = statements.pop()
    if not (
        isinstance(told, ast.Expr)
        and isinstance(call, ast.If)
        and isinstance(main, ast.FunctionDef)
        and main.name == "main"
        and not any(isinstance(node, ast.Return) for node in main.body)
    ):
        raise ValueError(f"{path.name}: use a docstring, and at the end main() and its call")
    lines = source.splitlines()
    options = ', "--smoke"' if smoke else ""
    here = Path(os.path.relpath(path, folder)).as_posix()
    cells = [
        f"# Where the script stands from here, and the options that it is given.\n"
        f'import sys\n\n__file__ = "{here}"\nsys.argv = [__file__{options}]'
    ]
    cells += _grouped(lines, told.end_lineno or 0, statements, DEFINITIONS)
    cells += _grouped(lines, main.lineno, main.body, LONG)
    return ast.get_docstring(tree) or "", cells


def _grouped(
    lines: list[str], above: int, statements: list[ast.stmt], alone: tuple[type[ast.stmt], ...]
) -> list[str]:
    """The text of statements in cells, comments included: those that are ``alone``, and what stands
    between them. ``above`` is the line before the first one.
    """
    found: list[list[str]] = []
    before_alone = True  # the next statement begins a cell
    for statement in statements:
        by_itself = isinstance(statement, alone)
        if by_itself or before_alone:
            found.append([])
        end = statement.end_lineno or above
        tail = lines[above:end]
        found[-1] += tail
        above, before_alone = end, by_itself
    return [textwrap.dedent("\n".join(cell)).strip("\n") for cell in found]


def write_notebook(path: Path, folder: Path, smoke: bool = False) -> Path:
    """Writes a script's notebook into ``folder``, checked against the format's own schema."""
    import nbformat

    told, cells = cells_of(path, folder, smoke)
    title = path.stem.replace("_", " ").capitalize()
    form = nbformat.v4
    made = form.new_notebook(
        cells=[form.new_markdown_cell(f"# {title}\n\n{told}"), *map(form.new_code_cell, cells)],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    for number, cell in enumerate(made.cells):
        cell["id"] = f"{path.stem}-{number}".replace("_", "-")  # the same at every making
    nbformat.validate(made)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{path.stem}.ipynb"
    nbformat.write(made, target)
    return target


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description="Makes notebooks of the gallery's scripts.")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    if importlib.util.find_spec("nbformat") is None:
        sys.exit(
            "notebooks: nbformat is missing; pip install nbformat (the lock has it from 3.11 on)"
        )
    for path in sorted(GALLERY.glob("*.py")):
        print(write_notebook(path, asked.folder.resolve(), asked.smoke))


if __name__ == "__main__":
    main()
