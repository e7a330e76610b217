"""A private script is an ordinary one with a few lines changed: each example in examples/native has
its twin without privacy in examples/plain; both run, the text classifier in each of its ways.
"""

from __future__ import annotations

import ast
import difflib
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("examined_once")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLAIN = sorted((EXAMPLES / "plain").glob("*.py"))
NATIVE = sorted((EXAMPLES / "native").glob("*.py"))
OPACUS = sorted((EXAMPLES / "opacus").glob("*.py"))
MOST, MOST_OF_OPACUS = 15, 5
QUIET = "quietgrad.integrations.opacus"


def name_of(path: Path) -> str:
    return path.stem


def marked(one: Path, other: Path) -> int:
    """Lines that ``diff one other | grep -c '^[<>]'`` counts: one that is replaced counts twice."""
    found = subprocess.run(["diff", one, other], capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    return sum(line.startswith(("<", ">")) for line in found.stdout.splitlines())


def changed(one: list[str], other: list[str]) -> int:
    """Lines that were changed, taken out or put in; a line put in place of another counts once."""
    edits = difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in edits if kind != "equal")


def test_changed_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("a\nb\nc\n")
    for text, wanted in (("a\nx\nc\n", 2), ("a\nb\nx\n\nc\n", 2), ("a\n", 2), ("a\nb\nc\n", 0)):
        (tmp_path / "other").write_text(text)
        assert marked(tmp_path / "one", tmp_path / "other") == wanted
    assert changed(["a", "b", "c"], ["a", "x", "c"]) == 1
    assert changed(["a", "b"], ["a", "x", "y", "b"]) == 2
    assert changed(["a", "b", "c"], ["a"]) == 2


def test_the_twins_are_the_same_scripts() -> None:
    plain = [path.name for path in PLAIN]
    assert plain == [path.name for path in NATIVE] and len(plain) >= 8
    assert set(plain) == {path.name for path in OPACUS}


@pytest.mark.parametrize("path", NATIVE, ids=name_of)
def test_a_private_script_is_its_plain_twin_with_few_lines_changed(path: Path) -> None:
    plain = EXAMPLES / "plain" / path.name
    assert "quietgrad" not in plain.read_text(encoding="utf-8")
    assert 0 < marked(plain, path) <= MOST


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


def ways(paths: list[Path]) -> list[Any]:
    """Every script, and the text classifier in each of its three ways."""
    found = []
    for path in paths:
        modes = ["last-layer", "full", "lora"] if path.stem == "text_classifier" else [""]
        for mode in modes:
            options = ["--mode", mode] if mode else []
            found.append(pytest.param(path, options, id="-".join([path.stem, *options[1:]])))
    return found


def run(path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--smoke", *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(path), run_name="__main__")  # here: torch is imported once


@pytest.mark.grid(4, "ten trainings; they differ in the model")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("path", "options"), ways(NATIVE))
def test_a_private_script_runs_at_smoke_size(
    path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(path, options, monkeypatch)
    shown = [float(number) for number in re.findall(r"epsilon (\d+\.\d+)", capsys.readouterr().out)]
    assert shown and 0 < max(shown) <= 8.0


@pytest.mark.grid(2, "ten trainings; they differ in the model")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("path", "options"), ways(PLAIN))
def test_its_plain_twin_runs_too(
    path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(path, options, monkeypatch)
    assert re.search(r"epoch 0: (test accuracy|a made image)", capsys.readouterr().out)
