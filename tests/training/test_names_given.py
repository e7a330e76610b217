"""What a newcomer types in place of a name: a key as another library calls it, records in place of
their configuration, and a folder that is no run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (("plan", "--set", "lr=0.1"), "did you mean 'optimizer.learning_rate'?"),
        (("plan", "--set", "training.lr=0.1"), "did you mean 'optimizer.learning_rate'?"),
        (("train", "--set", "epsilon=3"), "did you mean 'privacy.target_epsilon'?"),
        (("train", "--set", "optimizer.wd=0.1"), "did you mean 'optimizer.weight_decay'?"),
        (("settings", "lr"), "did you mean optimizer.learning_rate?"),
        (("settings", "delta"), "did you mean privacy.target_delta?"),
    ],
)
def test_a_key_as_others_call_it(command: tuple[str, ...], part: str, quietgrad: Run) -> None:
    """`--set lr=0.1` asked whether noise.floor was meant."""
    code, _, err = quietgrad(*command)
    assert code == 2 and err.count("\n") == 1 and part in err


@pytest.mark.parametrize("command", ["train", "plan", "audit", "compare", "spectrum"])
def test_records_in_place_of_a_configuration(
    command: str, quietgrad: Run, csv_file: Path, tmp_path: Path
) -> None:
    """They were called invalid TOML, with a line and a column of it."""
    code, _, err = quietgrad(command, csv_file)
    assert code == 2 and err.count("\n") == 1
    assert f"is a file of records; `quietgrad init {csv_file} -o reviews.toml` writes" in err
    gone = tmp_path / "gone.csv"
    assert "no such file" in quietgrad(command, gone)[2]


@pytest.mark.parametrize(
    "arguments", ['"predict", "people.csv", "people.csv"', '"export", "people.csv", "-o", "m.pt2"']
)
def test_a_run_that_is_none_is_refused_before_torch(arguments: str, tmp_path: Path) -> None:
    """The two arguments of ``predict`` were read in the other order after seconds of loading."""
    (tmp_path / "people.csv").write_text("age,income\n30,low\n")
    code = (
        "import sys\n"
        f"sys.argv = ['quietgrad', {arguments}]\n"
        "from quietgrad.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: RUN_DIR='people.csv' is a file; name the directory of a run (training.run_dir)\n"
    )
