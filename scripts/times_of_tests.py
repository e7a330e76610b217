"""Writes down which tests take long, for ``make test`` to leave to ``make test-all``.

    OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q -n 2 --dist loadfile -o junit_family=xunit1 --junitxml=times.xml
    python scripts/times_of_tests.py times.xml

``tests/times.json`` then holds the seconds of every test that took ``LEAST`` or more, with its fixtures.
``tests/conftest.py`` marks those of at least ``LONG`` seconds. Only what is long beside others
matters: a slower machine would choose nearly the same.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TIMES = Path(__file__).parents[1] / "tests" / "times.json"
LEAST = 0.25  # seconds


def times_of(report: Path, least: float = LEAST) -> dict[str, float]:
    """Seconds of the tests in a report of pytest, by their names, of those that took ``least``."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        seconds, file = float(case.get("time", 0.0)), case.get("file")
        if file is None:
            raise SystemExit(f"{report} names no files; write it with -o junit_family=xunit1")
        classes = (case.get("classname") or "").split(".")[len(Path(file).with_suffix("").parts) :]
        name = "::".join([file, *classes, case.get("name") or ""])
        if seconds >= least:
            found[name] = round(seconds, 2)
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="what pytest wrote")
    times = times_of(parser.parse_args().report)
    TIMES.write_text(json.dumps(times, indent=0) + "\n", encoding="utf-8")
    print(f"{len(times)} tests of {LEAST} s or more, {sum(times.values()):.0f} s in all")


if __name__ == "__main__":
    main()
