"""Prints which tests a checked change runs here: ``test-all``, or ``test`` where all would take too
long.

    python scripts/tests_for_this_machine.py [--minutes 60]

A few tests that ``tests/times.json`` has the seconds of are run, and what the whole suite would
take follows from the median of how much longer they take here. What is known of the machine goes to
the error stream. The tests that ``make test`` leaves out repeat others at a larger size
(CONTRIBUTING.md); on a slow machine they are for a night.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from times_of_tests import TIMES, times_of

ROOT = TIMES.parents[1]
WORKERS = 2  # of the suite (Makefile)
UNLISTED = 4 / 3  # the whole suite's time in that of the tests that are listed
SAMPLE = (0.5, 1.5)  # seconds of the tests that are tried
TRIED = 15


def sample_of(times: Mapping[str, float]) -> list[str]:
    """Some tests from all rooms."""
    names = [name for name, seconds in times.items() if SAMPLE[0] <= seconds <= SAMPLE[1]]
    return names[:: max(1, len(names) // TRIED)]


def still_there(names: list[str]) -> list[str]:
    """Those that pytest finds: one that was renamed since would let it run none."""
    files = sorted({name.partition("::")[0] for name in names})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *files]
    found = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    return [name for name in names if name in set(found.splitlines())]


def slower_by(times: Mapping[str, float], here: Mapping[str, float]) -> float:
    """How much longer tests take here: the median, since the first test of a file may make what
    others of it use.
    """
    return statistics.median(here[name] / times[name] for name in here if name in times)


def minutes_of_all(times: Mapping[str, float], slower: float) -> float:
    """What the whole suite takes."""
    return slower * UNLISTED * sum(times.values()) / WORKERS / 60


def measured(names: list[str]) -> dict[str, float]:
    """Seconds of tests, run here by two workers."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "times.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(WORKERS), "--dist", "loadfile"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *names]
        # Whether they pass is for the run that follows to say.
        subprocess.run(
            command,
            cwd=ROOT,
            check=False,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return times_of(report, least=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="that all tests may take")
    most = parser.parse_args().minutes
    times = json.loads(TIMES.read_text(encoding="utf-8"))
    here = measured(still_there(sample_of(times)))
    if not here:
        raise SystemExit("none of the sampled tests ran: make tests/times.json anew")
    slower = slower_by(times, here)
    minutes = minutes_of_all(times, slower)
    print(
        f"tests take {slower:.1f} times as long here as in tests/times.json; "
        f"all of them: {minutes:.0f} minutes of {most:.0f}",
        file=sys.stderr,
    )
    print("test-all" if minutes <= most else "test docs package")


if __name__ == "__main__":
    main()
