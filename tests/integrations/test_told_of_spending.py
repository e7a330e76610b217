"""What the Trainers tell of a private run: its epsilon, rounded up and named after whom it
protects, nothing for a run that they have not gone on with, and no scores of training records.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from private_trainers import records, trainer
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.integrations.lightning.session import Session
from quietgrad.integrations.lightning.steps import PrivateSteps
from quietgrad.integrations.transformers.session import MARK, STATE, TrainerSession
from quietgrad.plan import PrivacyPlan

RECORDS = 12
CONFIG = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=6)
# To the nearest of four decimals, or of a float32's bits, each of these is told too low.
SPENT = [2.87231, 0.710361, 123456.7, 2.873]


def plan(**options: Any) -> PrivacyPlan:
    return CONFIG.build(RECORDS, **options)


def spending(spent: float) -> Any:
    """In the place of a run, which has spent so much."""
    return SimpleNamespace(epsilon=lambda: spent, shown=dict, released=2)


@pytest.mark.parametrize("spent", SPENT)
def test_a_line_of_transformers_rounds_epsilon_up(spent: float, tmp_path: Path) -> None:
    session = TrainerSession(plan(), str(tmp_path))
    assert session.shown() == {}
    session.run = spending(spent)
    told = session.shown()
    assert set(told) == {"epsilon"}
    assert float(torch.tensor(told["epsilon"])) >= spent


@pytest.mark.parametrize("spent", SPENT)
def test_a_line_of_lightning_rounds_epsilon_up(
    spent: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, float] = {}
    ways: list[Any] = []

    def log(module: Any, name: str, value: float, **how: Any) -> None:
        told[name] = float(torch.tensor(value))  # metrics are float32
        ways.append(how["reduce_fx"])

    monkeypatch.setattr(LightningModule, "log", log)
    steps = PrivateSteps(CONFIG, "", None)
    steps.session = SimpleNamespace(plan=plan(), run=spending(spent))  # type: ignore[assignment]
    steps.on_train_epoch_end(SimpleNamespace(barebones=False), LightningModule())  # type: ignore[arg-type]
    assert set(told) == {"epsilon", "eps"} and set(ways) == {"max"}
    assert told["epsilon"] >= spent
    assert min(float(f"{told['eps']:.3g}"), float(f"{told['eps']:.3f}")) >= spent


def test_epsilon_of_users_and_of_public_data_says_so(tmp_path: Path) -> None:
    session = TrainerSession(plan(record_owner=[i // 2 for i in range(RECORDS)]), str(tmp_path))
    session.run = spending(1.0)
    assert set(session.shown()) == {"epsilon_per_user"}
    public = PrivacyConfig(
        noise_multiplier=1.0, sample_rate=0.5, steps=6, seed=1, data_are_public=True
    )
    session = TrainerSession(public.build(RECORDS), str(tmp_path))
    session.run = spending(1.0)
    assert session.shown() == {"epsilon": 1.0, "data_declared_public": True}


def release(run: Any, count: int) -> None:
    x = torch.randn(RECORDS, 4)
    model = nn.Linear(4, 1)
    for indices in run.batches(count):
        run.backward(model, lambda m, b: m(b).square().sum(1), x[torch.as_tensor(indices)])


@pytest.mark.usefixtures("examined_once")
def test_a_run_that_was_not_gone_on_with_has_not_spent_nothing(tmp_path: Path) -> None:
    """0.0 would be printed for a directory whose ledger counts releases."""
    session = TrainerSession(plan(), str(tmp_path))
    assert session.epsilon() == 0.0
    with session.open(False):
        assert session.run is not None
        release(session.run, 1)
    assert session.epsilon() > 0
    with pytest.raises(RuntimeError, match="holds a run that this trainer has not gone on with"):
        TrainerSession(plan(), str(tmp_path)).epsilon()


@pytest.mark.usefixtures("examined_once")
def test_weights_of_releases_that_the_ledger_does_not_count_are_not_gone_on_from(
    tmp_path: Path,
) -> None:
    with_trainer, with_lightning = tmp_path / "transformers", tmp_path / "lightning"
    session = TrainerSession(plan(), str(with_trainer))
    with session.open(False):
        assert session.run is not None
        release(session.run, 2)
        made = with_trainer / "checkpoint-3"
        session.mark(made, 3)  # of a ledger that has lost the last line
        (made / STATE).write_text("{}")
    assert (made / MARK).is_file()
    ledger = (with_trainer / "ledger.jsonl").read_bytes()
    with (
        pytest.raises(ValueError, match="checkpoint-3 is at release 3, but the ledger counts 2"),
        TrainerSession(plan(), str(with_trainer)).open(True),
    ):
        pass
    assert (with_trainer / "ledger.jsonl").read_bytes() == ledger

    one = Session(plan(), str(with_lightning))
    one.open(None, None, "")
    assert one.run is not None
    release(one.run, 2)
    mark = one.mark(3)
    one.run.close()
    one.close()
    with pytest.raises(ValueError, match="ckpt_path is at release 3, but the ledger counts 2"):
        Session(plan(), str(with_lightning)).open(mark, None, "")


@pytest.mark.usefixtures("examined_once")
@pytest.mark.parametrize("name", ["loss", "grad_norm", "train_loss", "total_flos"])
def test_no_number_of_training_records_is_in_a_line(name: str, tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    line = {"learning_rate": 0.1, name: 3.5}
    trained.log(line)
    assert name not in line
    assert all(name not in logged for logged in trained.state.log_history)


def test_training_records_are_not_scored_whatever_was_scored_or_replaced(tmp_path: Path) -> None:
    """Mutants: one look at public records for all, only what was given, only what is there now."""
    given, replaced, public = records(40), records(40, seed=2), records(20, seed=1)
    trained = trainer(tmp_path, train_dataset=given, eval_dataset=public)
    trained._refuse_private(public)
    trained.train_dataset = replaced
    for private in (given, replaced, replaced[:5], {"first": public, "second": given}):
        with pytest.raises(ValueError, match="is the training data, or holds records of it"):
            trained._refuse_private(private)
    trained._refuse_private(public)
