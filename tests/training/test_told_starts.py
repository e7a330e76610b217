"""What a run began with is in its ledger: every number that is read from it says that the epsilons
of earlier runs add.
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import crash_at, train
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.integrations.trained import record_of
from quietgrad.ledger import read_ledger
from quietgrad.plan.session.trained import runs_of
from quietgrad.report.run.facts import read_run
from quietgrad.training.files.provenance import EPSILONS_ADD, WITHOUT_PRIVACY, read_provenance

ADDS = "for records of both runs their epsilons and deltas add"
NOT_COVERED = "epsilon covers no record that those have seen"


@pytest.mark.parametrize(("kind", "said"), [(EPSILONS_ADD, ADDS), (WITHOUT_PRIVACY, NOT_COVERED)])
def test_every_command_tells_what_a_run_that_was_killed_began_with(
    quietgrad: Any, settings: dict[str, Any], tmp_path: Path, kind: str, said: str
) -> None:
    """Before: `quietgrad epsilon --ledger` said nothing, and the others nothing before the end."""
    private = settings | {"data.public": False, "model.tune": "head", "training.eval_every": 0}
    first = private | {"training.run_dir": str(tmp_path / "first")}
    if kind == WITHOUT_PRIVACY:
        first = {k: v for k, v in first.items() if k != "privacy.target_epsilon"}
        first["privacy.enabled"] = False
    _, _, made = train(first)
    record = read_provenance(made.model)
    assert record is not None
    if kind == EPSILONS_ADD:
        assert record["run"] == read_ledger(made.path).sessions[0].name
    second = private | {"model.name": str(made.model), "model.accept_start": kind}
    place = tmp_path / "second"
    second["training.run_dir"] = str(place)
    with pytest.raises(OSError, match="the machine went away"):
        train(second, report=crash_at(2))
    assert not (place / "result.json").exists()

    told = json.loads(quietgrad("epsilon", "--ledger", place, "--json")[1])
    assert told["started_from"] == [record] and len(told["start_warnings"]) == 1
    listed = {
        run["name"]: run for run in json.loads(quietgrad("runs", tmp_path, "--json")[1])["runs"]
    }
    assert listed["second"]["started_from_runs"] and not listed["first"]["started_from_runs"]
    for command in (("epsilon", "--ledger", place), ("report", place)):
        code, out, err = quietgrad(*command)
        assert code == 0 and said in " ".join(out.replace("│", " ").split()), err
    out = quietgrad("epsilon", "--ledger", made.path)[1] if kind == EPSILONS_ADD else ""
    assert said not in " ".join(out.split())

    # A resume says it once.
    train(second, resume=True)
    assert read_ledger(place).started_from == (record,)
    assert len(read_run(place, None).start_warnings) == 1  # of the ledger's and the result's


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def looped(model: nn.Module, folder: Path, steps: int | None = None) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    y = (x[:, 0] > 0).long()
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=3)
    folder.mkdir(exist_ok=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with config.build(len(x)).start(folder / "ledger.jsonl") as run:
        for indices in run.batches(steps):
            run.backward(model, loss, (x[indices], y[indices]))
            optimizer.step()


def test_a_loops_ledger_tells_of_the_loop_before(quietgrad: Any, tmp_path: Path) -> None:
    # Before: a warning while it ran, and nothing in what was left of it.
    model = nn.Linear(6, 2)
    looped(model, tmp_path / "one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        looped(model, tmp_path / "two", steps=1)
        looped(model, tmp_path / "two")  # the same run, which goes on
    _, out, _ = quietgrad("epsilon", "--ledger", tmp_path / "two", "--json")
    (earlier,) = json.loads(out)["started_from"]
    first = json.loads(quietgrad("epsilon", "--ledger", tmp_path / "one", "--json")[1])
    assert earlier["epsilon"] == first["epsilon"] and earlier["steps"] == 3
    assert "started_from" not in first
    _, out, _ = quietgrad("epsilon", "--ledger", tmp_path / "two")
    assert ADDS in " ".join(out.replace("│", " ").split())


def test_a_run_that_goes_on_in_another_process_knows_what_it_began_with(tmp_path: Path) -> None:
    # Before: the third run's ledger told of the second one alone.
    one, two, three, weights = (tmp_path / name for name in ("one", "two", "three", "weights"))

    def first_process() -> None:
        model = nn.Linear(6, 2)
        looped(model, one)
        with pytest.warns(UserWarning, match="trained by another private run"):
            looped(model, two, steps=1)
        torch.save(model.state_dict(), weights)

    process = multiprocessing.get_context("fork").Process(target=first_process)
    process.start()
    process.join()
    model = nn.Linear(6, 2)
    model.load_state_dict(torch.load(weights))
    looped(model, two)
    with pytest.warns(UserWarning, match="trained by another private run"):
        looped(model, three)
    told = {record["run"]: record["steps"] for record in read_ledger(three).started_from}
    assert told == {read_ledger(folder).sessions[0].name: 3 for folder in (one, two)}
    assert len(read_ledger(two).started_from) == 1


@pytest.mark.parametrize("in_a_session_before", [False, True])
def test_a_run_that_gave_up_privacy_is_told_as_one_without(
    in_a_session_before: bool, quietgrad: Any, tmp_path: Path
) -> None:
    # Before: with the epsilon that it would have had.
    model, one = nn.Linear(6, 2), tmp_path / "one"
    x, y = torch.randn(60, 6), torch.zeros(60, dtype=torch.long)
    plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, steps=2).build(60)
    for gives_up in (in_a_session_before, not in_a_session_before):
        with plan.start(one / "ledger.jsonl") as run:
            indices = next(run.batches())
            run.backward(model, loss, (x[indices], y[indices]))
            if gives_up:
                run.give_up_privacy("made up")
    with pytest.warns(UserWarning, match="trained by another private run"):
        looped(model, tmp_path / "two")
    told = json.loads(quietgrad("epsilon", "--ledger", tmp_path / "two", "--json")[1])
    (earlier,) = told["started_from"]
    assert not earlier["private"] and "epsilon" not in earlier and earlier["steps"] == 2
    assert NOT_COVERED in told["start_warnings"][0]
    (second,) = runs_of(model)
    assert [one["private"] for one in record_of(second)["started_from"]] == [False]
