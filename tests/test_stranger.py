"""What a stranger meets first: what an import loads, whether help fits a screen, and whether types
hold in a file of their own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quietgrad.cli.app import app

HERE = Path(__file__).parent
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "scipy", "numpy", "dp_accounting")
LINES, COLUMNS = 40, 80  # of a screen
ROOT: Any = typer.main.get_command(app)
WAYS = [(), *((name,) for name in ROOT.commands)]


def loaded_after(code: str) -> list[str]:
    """What is heavy and there in a fresh process."""
    told = f"; import sys; print('\\nHEAVY', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("HEAVY")[2].split()


def test_the_package_and_its_help_load_nothing_heavy() -> None:
    helped = "from typer.testing import CliRunner; from quietgrad.cli.app import app; "
    helped += "assert CliRunner().invoke(app, ['train', '--help']).exit_code == 0"
    assert loaded_after("import quietgrad") == []
    assert loaded_after(helped) == []
    assert "torch" in loaded_after("import quietgrad; quietgrad.PrivacyConfig")  # it would be seen


def example_of(command: Any) -> str:
    """The line that a help shows."""
    found = re.findall(r"^Example: (.*)$", str(command.help), flags=re.MULTILINE)
    assert len(found) == 1, command.name
    return str(found[0])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0] if way else "root")
def test_help_fits_a_screen_and_shows_an_example(way: tuple[str, ...]) -> None:
    runner = CliRunner(env={"COLUMNS": str(COLUMNS), "TERMINAL_WIDTH": str(COLUMNS)})
    shown = runner.invoke(app, [*way, "--help"], prog_name="quietgrad")
    assert shown.exit_code == 0
    lines = shown.output.splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    words = " ".join(shown.output.split())
    assert f"Example: {example_of(ROOT.commands[way[0]] if way else ROOT)}" in words


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0] if way else "root")
def test_the_example_is_one_that_the_command_reads(way: tuple[str, ...]) -> None:
    """Its options and arguments are the command's own; nothing is run."""
    for line in example_of(ROOT.commands[way[0]] if way else ROOT).split(" && "):
        program, name, *arguments = shlex.split(line)
        assert program == "quietgrad" and (not way or name == way[0])
        context = ROOT.commands[name].make_context(name, list(arguments))
        assert any(value for value in context.params.values())
        with pytest.raises(Exception, match=r"No such option|Missing"):  # of click, or a copy of it
            ROOT.commands[name].make_context(name, [*arguments, "--nowhere"])


@pytest.mark.slow("mypy reads the package once")
def test_a_users_file_is_typed_strictly(tmp_path: Path) -> None:
    good = HERE / "typed_user.py"
    wrong = tmp_path / "wrong.py"
    wrong.write_text(good.read_text().replace("-> float:", "-> str:", 1))
    found = []
    for file in (good, wrong):
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
        command += ["--no-error-summary", "--config-file", os.devnull, str(file)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        found.append(done.stdout.strip())
    assert found[0] == ""
    assert 'expected "str"' in found[1]  # and a wrong type is seen
