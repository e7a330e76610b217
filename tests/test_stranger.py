"""What a stranger meets first: how long an import takes, and whether types hold in a file of their
own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BEST_OF = 3  # of processor time: other work on the machine only adds


def processor_seconds(*arguments: str) -> float:
    """Of a Python process, the least of a few."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(BEST_OF))


def test_the_package_and_its_help_are_there_at_once() -> None:
    assert processor_seconds("-c", "import quietgrad") < 0.3
    assert processor_seconds("-m", "quietgrad", "--help") < 1.0
    assert processor_seconds("-c", "import torch") > 0.3  # the limits would see it


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
