"""docs/command_line.md runs as it stands, one block after the other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.slow("nine commands at the page's size; the tutorial of a table has most of them")
def test_the_blocks_of_the_page_run(
    quietgrad: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(python|sh)\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    blocks, others = blocks[:5], blocks[5:]  # of other data: test_pages_of_commands.py
    assert [kind for kind, _ in others] == ["sh", "sh"]
    assert [kind for kind, _ in blocks] == ["python", "sh", "sh", "sh", "python"]
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
            continue
        for line in block.splitlines():
            name, *arguments = shlex.split(line)
            assert name == "quietgrad"
            code, out, err = quietgrad(*arguments)
            assert (code, err) == (0, ""), (line, err)
            if arguments[0] == "runs":
                assert "first" in out and "finished" in out
    labels = capsys.readouterr().out.splitlines()[-1]
    assert set(re.findall(r"\w+", labels)) <= {"high", "low"}
    assert {p.name for p in tmp_path.iterdir()} == {
        "people.csv", "people.toml", "runs", "predictions.csv", "model.pt2"
    }  # fmt: skip


def test_the_pages_of_completion_are_true(quietgrad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    out = quietgrad("--help")[1]
    assert "--install-completion" in out and "--show-completion" in out and "--version" in out
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, out, _ = quietgrad("--show-completion", "bash")
    assert code == 0 and "complete" in out and "COMP_WORDS" in out


def test_the_list_of_commands_breaks_no_line_twice(
    quietgrad: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    shown = quietgrad("export", "--help")[1]
    assert "It takes any batch size and length, and holds the label names." in shown
