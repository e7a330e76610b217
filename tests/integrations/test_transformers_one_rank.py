"""One process of a Trainer is refused something, or fails, or was given something else: all of them
end within seconds, and say which one and why. (The others waited until the group's timeout.)
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from private_trainers import classifier, records, trainer
from processes import on_processes
from torch import nn
from transformers import TrainerCallback

from quietgrad.distributed.groups import loops, news, waiting

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]
SOON = 20.0
SECRET = "a name that is in a record"


class FailsAt(TrainerCallback):
    """On the second process alone."""

    def __init__(self, stage: str) -> None:
        setattr(self, stage, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "1" and state.global_step >= 1:
            raise KeyError(SECRET)


def secret_in_its_loss(model: Any, batch: Any) -> Any:
    raise KeyError(SECRET)


def trained(place: str, how: str) -> tuple[str, float]:
    second = os.environ["RANK"] == "1"
    loops.BETWEEN = waiting.BETWEEN = 0.1
    loops.PATIENCE = news.PATIENCE = 1.0
    began = time.monotonic()
    own: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    given: dict[str, Any] = {"eval_dataset": records(16, 1)}
    model: nn.Module = classifier(0.0)
    if how == "construction" and second:
        own["label_smoothing_factor"], given["per_example_loss"] = 0.1, secret_in_its_loss
    if how == "argument" and second:
        own["eval_steps"] = 3
    if how == "loss" and second:
        given["per_example_loss"] = lambda model, batch: model(**batch).logits.sum(1)
    if how == "look" and second:
        given["per_example_loss"] = secret_in_its_loss
    if how == "model" and second:
        model.bert.pooler.activation = nn.ReLU()  # type: ignore[union-attr]
    if how.startswith("on_"):
        given["callbacks"] = [FailsAt(how)]
    try:
        made = trainer(Path(place), model=model, **given, **own)
        made.train(trial="another" if how == "trial" and second else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


BEGIN = "ValueError: rank 1 could not begin training: "
EXPECTED: dict[str, tuple[str, str]] = {
    "construction": ("rank 1 failed (ValueError: args.label_smoothing_factor", "ValueError"),
    "trial": (BEGIN + "ValueError: a search makes many runs", "ValueError"),
    "look": (BEGIN + "KeyError", "KeyError"),
    "argument": ("ranks 0 and 1 differ in args.eval_steps", "RuntimeError: ranks 0 and 1"),
    "loss": ("ranks 0 and 1 differ in loss function", "RuntimeError: ranks 0 and 1"),
    "model": ("ranks 0 and 1 differ in model", "RuntimeError: ranks 0 and 1"),
    "on_step_end": ("rank 1 stopped after an error of its own", "KeyError"),
    "on_evaluate": ("rank 1 stopped after an error of its own", "KeyError"),
}


@pytest.mark.parametrize("how", EXPECTED)
def test_what_happens_on_one_process_alone_is_told_to_all(how: str, tmp_path: Path) -> None:
    first, second = on_processes(2, tmp_path / "a", trained, str(tmp_path / "run"), how)
    on_the_first, on_the_second = EXPECTED[how]
    assert on_the_first in first[0] and SECRET not in first[0], (first, second)
    assert second[0].startswith(on_the_second), second
    assert first[1] < SOON and second[1] < SOON
