"""How threads wait for each other under the command line: asked for before torch is loaded, where
nobody else has asked.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quietgrad.cli import OF_THREADS, SPINS

SEEN_BY_TORCH = """
import os, sys
sys.argv = ["quietgrad", "--version"]
{first}
from quietgrad.cli import main
try:
    main()
except SystemExit:
    pass
print({{name: os.environ.get(name) for name in {names!r}}})
"""


def environment_after(first: str = "", **said: str) -> str:
    """What the last line of a process says that asked for the version."""
    given = {k: v for k, v in os.environ.items() if k not in OF_THREADS} | said
    code = SEEN_BY_TORCH.format(first=first, names=OF_THREADS)
    done = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_who_waits_sleeps_soon() -> None:
    assert environment_after() == str({"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": SPINS})


@pytest.mark.parametrize("name", OF_THREADS)
def test_what_a_user_said_is_left_alone(name: str) -> None:
    said = dict.fromkeys(OF_THREADS) | {name: "1"}
    assert environment_after(**{name: "1"}) == str(said)


def test_nothing_is_said_too_late() -> None:
    """Torch has read it already; processes that are started later would wait in another way."""
    assert environment_after("import torch") == str(dict.fromkeys(OF_THREADS))
