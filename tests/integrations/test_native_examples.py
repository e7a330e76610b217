"""A private script is an ordinary one with a few lines changed: each example in examples/native has
its twin without privacy in examples/plain, and runs.
"""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("examined_once")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NATIVE = sorted((EXAMPLES / "native").glob("*.py"))
OPACUS = sorted((EXAMPLES / "opacus").glob("*.py"))
MOST, MOST_OF_OPACUS = 15, 5
QUIET = "quietgrad.integrations.opacus"


def name_of(path: Path) -> str:
    return path.stem


def changed(one: list[str], other: list[str]) -> int:
    """Lines that were changed, taken out or put in; a line put in place of another counts once."""
    edits = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in edits if kind != "equal")


def test_changed_lines_are_counted() -> None:
    assert changed(["a", "b", "c"], ["a", "x", "c"]) == 1
    assert changed(["a", "b"], ["a", "x", "y", "b"]) == 2
    assert changed(["a", "b", "c"], ["a"]) == 2


def test_the_twins_are_the_same_scripts() -> None:
    plain = [path.name for path in sorted((EXAMPLES / "plain").glob("*.py"))]
    assert plain == [path.name for path in NATIVE] and len(plain) >= 7


@pytest.mark.parametrize("path", NATIVE, ids=name_of)
def test_a_private_script_is_its_plain_twin_with_few_lines_changed(path: Path) -> None:
    plain = (EXAMPLES / "plain" / path.name).read_text(encoding="utf-8")
    assert "quietgrad" not in plain
    private = path.read_text(encoding="utf-8")
    assert 0 < changed(plain.splitlines(), private.splitlines()) <= MOST


@pytest.mark.parametrize("path", OPACUS, ids=name_of)
def test_an_opacus_script_differs_by_its_imports_alone(path: Path) -> None:
    ours = path.read_text(encoding="utf-8")
    code = ast.parse(ours)
    documentation = ast.get_docstring(code, clean=False) or ""
    ours = ours.replace(documentation, "", 1)
    theirs = ours.replace(QUIET, "opacus")
    assert "quietgrad" not in theirs
    assert 0 < changed(theirs.splitlines(), ours.splitlines()) <= MOST_OF_OPACUS
    lines = {n.lineno for n in ast.walk(code) if isinstance(n, ast.Import | ast.ImportFrom)}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if QUIET in line and number > documentation.count("\n") + 1:
            assert number in lines


@pytest.mark.grid(3, "seven scripts, each a training; they differ in the model")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("path", NATIVE, ids=name_of)
def test_a_private_script_runs_at_smoke_size(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(path), run_name="__main__")  # here: torch is imported once
    shown = [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", capsys.readouterr().out)]
    assert shown and 0 < max(shown) <= 8.0
