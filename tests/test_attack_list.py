"""The pages of docs/attacks/ name the test that runs each attack: the names are real, and the list
of broken mechanisms is long enough.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRONT = ROOT / "docs" / "attacks.md"
PAGES = sorted((ROOT / "docs" / "attacks").glob("*.md"))
BROKEN = ROOT / "docs" / "attacks" / "broken.md"


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def rows() -> list[str]:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    return [
        line
        for line in lines
        if line.startswith("| ") and not line.startswith(("| ---", "| what "))
    ]


def broken() -> str:
    return BROKEN.read_text(encoding="utf-8").split("## Broken mechanisms")[1].split("\n## ")[0]


def test_the_first_page_leads_to_every_subject() -> None:
    front = FRONT.read_text(encoding="utf-8")
    assert len(PAGES) > 8
    assert [page.name for page in PAGES if f"(attacks/{page.name})" not in front] == []


def test_every_test_that_the_page_names_exists() -> None:
    everywhere = {name for path in (ROOT / "tests").rglob("test_*.py") for name in names_in(path)}
    named = [
        name for row in rows() for name in re.findall(r"\btest_\w+", row) if f"{name}.py" not in row
    ]
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    mentioned = {name for row in rows() for name in re.findall(r"\btest_\w+\.py", row)}
    assert len(named) > 60
    assert sorted(set(named) - everywhere) == []
    assert sorted(mentioned - files) == []


def test_every_row_names_a_test_or_says_what_is_not_seen() -> None:
    silent = [
        row
        for row in rows()
        if "test_" not in row and "[" not in row.split("|")[-2] and "::" not in row
    ]
    allowed = ("the same", "see above", "not noticed", "stated", "documented")
    assert [row for row in silent if not any(word in row for word in allowed)] == []


def test_at_least_thirty_broken_mechanisms_are_listed() -> None:
    counted = sum(
        int(found[-1]) if (found := re.findall(r"\((\d+)\) \|", line)) else 1
        for line in broken().splitlines()
        if line.startswith("| ") and "---" not in line and "what is broken" not in line
    )
    assert counted >= 30


def test_make_test_catches_every_broken_mechanism() -> None:
    """Slow tests are left to ``make test-all``: none of them is the only one that notices."""
    slow = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any("mark.slow" in ast.unparse(mark) for mark in node.decorator_list)
    }
    assert len(slow) > 2
    only_slow = []
    for row in rows():
        named = re.findall(r"\btest_\w+\b(?!\.py)", row)
        if named and set(named) <= slow:
            only_slow.append(row)
    assert only_slow == []


def test_no_grid_leaves_out_a_broken_mechanism() -> None:
    """``make test`` runs some cases of a grid: those of a mutant are all run."""
    grids = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any("mark.grid" in ast.unparse(mark) for mark in node.decorator_list)
    }
    mutants = set(re.findall(r"\b(?:test_\w+)\b(?!\.py)", broken()))
    assert len(grids) > 20 and len(mutants) > 20
    assert grids & mutants == set()
