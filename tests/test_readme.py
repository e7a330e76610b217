"""The README's examples are a test: they run as they stand, one after the other."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
LONGEST = 120


def test_the_python_example_runs_and_learns(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, "the README shows no Python example"
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), scope)
        assert 0 < scope["run"].epsilon() <= 2.0  # type: ignore[attr-defined]
    assert "epsilon" in capsys.readouterr().out


def test_the_readme_is_short_and_its_table_is_measured() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    table = runpy.run_path(str(README.parent / "scripts" / "peers_figure.py"))["table"]()
    assert table in text and table.count("\n") > 4


def test_what_certified_bounds_cost_is_measured() -> None:
    """The README's points of time, from two_commits.json: exact norms on the table's shapes."""
    file = README.parent / "benchmarks" / "results" / "two_commits.json"
    regimes = json.loads(file.read_text(encoding="utf-8"))["regimes"]
    found = [regime["quietgrad"] for regime in regimes.values()]
    points = max(100 * (one["now"]["median"] - one["before"]["median"]) for one in found)
    said = re.findall(r"cost up to (\d+) points of time", README.read_text(encoding="utf-8"))
    assert said == [str(round(points))] and len(found) >= 4
