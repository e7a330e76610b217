"""Pages lead somewhere: every relative link of README and docs/ is a file of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Made from the code when the site is built, which checks links to it (tests/test_docs_site.py).
MADE = "reference/"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page: Path) -> None:
    found = LINK.findall(page.read_text(encoding="utf-8"))
    links = [link for link in found if "://" not in link and not link.startswith(MADE)]
    assert [link for link in links if not (page.parent / link).exists()] == []


NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|json|md|png))")
# Of runs, of a reader's own, and of other repositories.
ELSEWHERE = ("run/", "runs/", "RUN_DIR/", "path/", "data/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """In the repository, or in the package: pages say ``clipping/bound.py`` for
    src/quietgrad/clipping/bound.py.
    """
    named = {
        n for n in NAMED.findall(page.read_text(encoding="utf-8")) if not n.startswith(ELSEWHERE)
    }
    roots = (
        ROOT,
        ROOT / "src" / "quietgrad",
        ROOT / "docs",
        ROOT / "tests",
        ROOT / "benchmarks" / "results",
    )
    assert sorted(n for n in named if not any((root / n).exists() for root in roots)) == []
