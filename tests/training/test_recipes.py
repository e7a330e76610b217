"""Every recipe is a configuration that today's commands take, and committed results are of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quietgrad.comparing.comparison import read_results
from quietgrad.comparing.table import load_comparison
from quietgrad.training.settings.config import load_config
from quietgrad.training.settings.overrides import read_toml

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))


def is_comparison(path: Path) -> bool:
    return "comparison" in read_toml(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_taken(path: Path) -> None:
    if is_comparison(path):
        load_comparison(path)
    else:
        load_config(path)


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if is_comparison(p)], ids=lambda path: path.stem
)
def test_committed_results_are_of_the_recipe_beside_them(path: Path) -> None:
    comparison = load_comparison(path)
    if not comparison.results.is_file():
        return
    results = read_results(comparison)
    assert len(results) == len(comparison.results.read_text().splitlines())
