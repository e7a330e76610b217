"""How long the rooms of the house are: lines, lines of code, statements.

    python scripts/lines_by_room.py                       # rooms of src/quietgrad
    python scripts/lines_by_room.py src/quietgrad/training
    python scripts/lines_by_room.py OTHER_CHECKOUT/src/quietgrad

Lines of code leave out blank lines, comments and docstrings. Statements do not depend on how wide
lines may be, so that a tree of long lines can be compared with one of short lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def described(tree: ast.AST) -> list[ast.stmt]:
    """The docstrings of a module, as statements."""
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None
    ]


def measure(text: str) -> tuple[int, int, int]:
    """(lines, lines of code, statements) of a module."""
    tree = ast.parse(text)
    docstrings = described(tree)
    prose = {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(docstrings)
    return len(text.splitlines()), len(code - prose), statements


def main() -> None:
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", nargs="?", type=Path)
    default = Path(__file__).resolve().parents[1] / "src" / "quietgrad"
    folder: Path = parser.parse_args().folder or default
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0]
        for place, number in enumerate((1, *measure(path.read_text(encoding="utf-8")))):
            rooms[room][place] += number
    total = [sum(numbers) for numbers in zip(*rooms.values())]
    print("| room | files | lines | lines of code | statements |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for room, numbers in [*sorted(rooms.items()), ("all", total)]:
        print(f"| {room.removesuffix('.py')} | {' | '.join(f'{n:,}' for n in numbers)} |")


if __name__ == "__main__":
    main()
