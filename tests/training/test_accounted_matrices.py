"""``quietgrad compare --accounted`` with correlated noise: all runs are draws of one law."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quietgrad.accounting import RunCount
from quietgrad.comparing.runner import ComparisonRunner
from quietgrad.comparing.trials import Trials
from quietgrad.noise import methods
from quietgrad.noise.correlation.banded import BandedLower
from quietgrad.noise.correlation.mixing import MixingMatrix

COMPARISON = """
[comparison]
epsilons = [6.0]
learning_rates = [1e-3]
protocol_rate = 1e-3
seeds = 1
tuning_seeds = 1
[variants.baseline]
[variants.long]
training.steps = 6
[noise]
method = "banded"
bands = 2
[model]
name = "{model}"
lora_rank = 2
max_length = 16
[data]
source = "{records}"
validation_fraction = 0.2
test_fraction = 0.2
[training]
expected_batch_size = 24
steps = 4
precision = "float32"
"""


def test_runs_go_on_with_the_matrices_that_they_began_with(
    quietgrad: Any,
    tiny_bert: Path,
    csv_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A matrix is looked for within a limit of time: found again after a kill it was another one,
    and runs of both are not draws of one law, which the choice's epsilon is for.
    """
    path = tmp_path / "comparison.toml"
    path.write_text(COMPARISON.format(model=tiny_bert, records=csv_file))
    plans: list[Any] = []
    fit, draw, finished = ComparisonRunner.fit, Trials.draw, Trials.finished

    def noted(self: ComparisonRunner, config: Any, plan: Any, *rest: Any, **more: Any) -> Any:
        plans.append(plan)
        return fit(self, config, plan, *rest, **more)

    def drawn(self: Trials, *rest: Any) -> None:
        draw(self, *rest)
        self.drawn[:] = [0, 1, 0, 1]

    def killed(self: Trials, *rest: Any) -> None:
        if self.done == 2:
            raise KeyboardInterrupt
        finished(self, *rest)

    monkeypatch.setattr(RunCount, "draw", lambda self: 4)
    monkeypatch.setattr(ComparisonRunner, "fit", noted)
    monkeypatch.setattr(Trials, "draw", drawn)
    with monkeypatch.context() as patch:
        patch.setattr(Trials, "finished", killed)
        assert quietgrad("compare", path, "--accounted")[0] == 130
    found = methods.mixing_matrix

    def another(*asked: Any) -> MixingMatrix:
        mixing = found(*asked)
        return replace(mixing, banded=BandedLower(0.999 * mixing.banded.columns))

    monkeypatch.setattr(methods, "mixing_matrix", another)
    code, _, err = quietgrad("compare", path, "--accounted")
    assert code == 0, err
    assert [plan.steps for plan in plans] == [4, 6, 4, 4, 6]  # the third was made again
    assert len({plan.noise.digest for plan in plans}) == 2
