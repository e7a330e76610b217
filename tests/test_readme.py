"""The README's examples are a test: they run as they stand, one after the other."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
LONGEST = 120


def test_the_python_example_runs_and_learns(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks, "the README shows no Python example"
    # Each loop in place of the other: on trained weights their epsilons would add.
    before = blocks[0].split("with plan.start()")[0]
    for block in blocks:
        scope: dict[str, object] = {}
        if block is not blocks[0]:
            exec(compile(before, str(README), "exec"), scope)
        exec(compile(block, str(README), "exec"), scope)
        assert 0 < scope["run"].epsilon() <= 2.0  # type: ignore[attr-defined]
    assert "epsilon" in capsys.readouterr().out


def test_the_readme_is_short_and_its_table_is_measured() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    table = runpy.run_path(str(README.parent / "scripts" / "peers_figure.py"))["table"]()
    assert table in text and table.count("\n") > 4


def test_what_certified_bounds_cost_is_measured() -> None:
    """The README's points of time, of two commits: exact norms on the table's shapes."""
    file = README.parent / "benchmarks" / "results" / "two_commits_fast_processor.json"
    regimes = json.loads(file.read_text(encoding="utf-8"))["regimes"]
    found = [regime["quietgrad"] for regime in regimes.values()]
    points = max(100 * (one["now"]["median"] - one["before"]["median"]) for one in found)
    said = re.findall(r"adds at most 0\.(\d\d) to these ratios", README.read_text(encoding="utf-8"))
    assert said == [f"{round(points):02d}"] and len(found) >= 4


def test_numbers_of_the_demo_are_measured() -> None:
    """What README and docs/demo.md say of it, from recipes/results/demo.jsonl."""
    root = README.parent
    lines = (root / "recipes" / "results" / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    page = (root / "docs" / "demo.md").read_text(encoding="utf-8")
    (records,) = {sum(row["records"].values()) for row in rows}
    assert f"{round(records / 1000)} thousand tweets" in README.read_text(encoding="utf-8")
    assert f"{records:,} tweets".replace(",", " ") in page
    for kind in ("private", "reference"):
        for score in ("validation_accuracy", "accuracy"):
            found = [row[score] for row in rows if row["kind"] == kind]
            mean = sum(found) / len(found)
            spread = f"({min(found):.4f} to {max(found):.4f}, {len(found)} seeds)"
            assert f"{mean:.4f} {spread}" in page.replace("**", ""), (kind, score, mean, spread)


def test_an_attacker_of_the_examples_is_right_so_often() -> None:
    from quietgrad.plan import PrivacyConfig
    from quietgrad.report.words import right_guesses

    text = README.read_text(encoding="utf-8")
    settings = "PrivacyConfig(target_epsilon=2.0, expected_batch_size=200, epochs=5)"
    assert settings in text and "torch.randn(2000, 10)" in text
    plan = PrivacyConfig(target_epsilon=2.0, expected_batch_size=200, epochs=5).build(2000)
    percent = math.ceil(100 * right_guesses(plan.event))
    assert f"right at most {percent} times in 100" in text
