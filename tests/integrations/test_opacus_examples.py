"""The examples and the page on Opacus run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("examined_once")

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "from_opacus.md"
EXAMPLES = sorted((ROOT / "examples").glob("opacus/*.py"))


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    assert re.search(r"epsilon \d\.\d\d", capsys.readouterr().out)


def cases() -> list[Any]:
    slow = pytest.mark.slow("it imports transformers, and trains one")
    modes = {"text_classifier": ["last-layer", "ghost", "lora"]}
    return [
        pytest.param(
            path,
            ["--mode", mode] if mode else [],
            id=f"opacus/{path.stem}{mode and '-' + mode}",
            marks=[slow] if mode else [],
        )
        for path in EXAMPLES
        for mode in modes.get(path.stem, [""])
    ]


# A batch's own size is 64 now and then, as the generator's is: the alarm is false then.
@pytest.mark.filterwarnings("ignore:another model gets a gradient:UserWarning")
@pytest.mark.grid(2, "nine trainings; they differ in the model")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("path", "options"), cases())
def test_an_example_runs_at_smoke_size(
    path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke", *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(path), run_name="__main__")  # here: torch is imported once
    assert re.search(r"epsilon \d+\.\d\d", capsys.readouterr().out)


def test_there_are_the_examples_of_the_page() -> None:
    assert len(EXAMPLES) >= 7
