"""docs/tuning.md runs as it stands, and its numbers are the accountant's."""

from __future__ import annotations

import math
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from quietgrad.accounting import RunCount, epsilon, noise_multiplier, selected_epsilon
from quietgrad.events import PoissonGaussian

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text("utf-8")
Run = Callable[..., tuple[int, str, str]]


def block(kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


def test_the_commands_of_the_page_run(
    quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunCount, "draw", lambda self: 2)
    random.seed(0)
    ages = [random.randint(20, 64) for _ in range(300)]
    rows = [f"{age},clerk,{'high' if age > 42 else 'low'}\n" for age in ages]
    Path("people.csv").write_text("age,job,income\n" + "".join(rows))
    Path("tuning.toml").write_text(block("toml"))
    for line in block("sh").splitlines():
        name, *arguments = shlex.split(line)
        assert name == "quietgrad"
        code, _, err = quietgrad(*arguments)
        assert (code, err) == (0, "")
    assert {p.name for p in tmp_path.iterdir()} == {
        "people.csv", "tuning.toml", "people.accounted", "predictions.csv"
    }  # fmt: skip


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("python"), "tuning.md", "exec"), {"__name__": "page"})
    out = capsys.readouterr().out
    assert out == (
        "one run 1.83, the best of ten on average 2.87\n"
        "noise multiplier 0.98 for epsilon 3 with the choice\n"
    )


def test_the_table_of_the_page_is_the_accountants() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", PAGE, flags=re.MULTILINE)
    assert [int(mean) for mean, _ in rows] == [3, 10, 30, 100]
    delta = 1e-5
    for place, one in enumerate((1.0, 3.0)):
        sigma = noise_multiplier(one, delta, sample_rate=0.01, steps=1000)
        run = PoissonGaussian(sigma, 0.01, 1000)
        for mean, cells in rows:
            *laws, every = [float(c.split(",")[place]) for c in cells.split("|")]
            for shown, shape in zip(laws, (0.0, 1.0, math.inf), strict=True):
                found = selected_epsilon(run, RunCount(float(mean), shape), delta)
                assert found <= shown + 1e-3 and found > shown - 0.011
            all_of_them = PoissonGaussian(sigma, 0.01, 1000 * int(mean))
            assert epsilon(all_of_them, delta) == pytest.approx(every, abs=0.011)
