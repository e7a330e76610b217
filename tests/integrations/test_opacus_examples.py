"""The examples and the page on Opacus run as they stand."""

from __future__ import annotations

import re
import runpy
import shutil
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
@pytest.mark.grid(2, "ten trainings; they differ in the model")
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


def last_epsilon(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> float:
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(path), run_name="__main__")
    return float(re.findall(r"epsilon (\d+\.\d+)", capsys.readouterr().out)[-1])


@pytest.mark.grid(2, "seven trainings, twice; they differ in the model")
@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize("name", [p.stem for p in EXAMPLES if p.stem != "text_classifier"])
def test_with_the_import_back_it_runs_on_opacus_and_spends_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ``tests/integrations/test_native_examples.py`` counts lines against is a script that
    runs.
    """
    for shared in (ROOT / "examples").glob("*.py"):
        shutil.copy(shared, tmp_path)
    ours, theirs = ROOT / "examples" / "opacus" / f"{name}.py", tmp_path / "opacus" / f"{name}.py"
    theirs.parent.mkdir()
    script = ours.read_text(encoding="utf-8").replace("quietgrad.integrations.opacus", "opacus")
    theirs.write_text(script, encoding="utf-8")
    spent = [last_epsilon(path, monkeypatch, capsys) for path in (theirs, ours)]
    if name == "dcgan":  # Opacus counts two releases on one batch as two batches
        assert spent[1] > 1.2 * spent[0]
    else:
        assert spent[1] == pytest.approx(spent[0], rel=0.01)


def test_there_are_the_examples_of_the_page() -> None:
    assert len(EXAMPLES) >= 8
