"""Runs whose model comes from an earlier run, and what their outputs say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import config_of, labelled_texts, train, write_records

from quietgrad.training.files.provenance import EPSILONS_ADD, WITHOUT_PRIVACY, read_provenance
from quietgrad.training.prepare import prepare


@pytest.fixture
def private(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"data.public": False, "training.steps": 2, "training.eval_every": 0}


def without_privacy(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k != "privacy.target_epsilon"} | {
        "privacy.enabled": False
    }


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("kind", [WITHOUT_PRIVACY, EPSILONS_ADD])
def test_a_run_does_not_start_from_another_by_accident(
    private: dict[str, Any], tmp_path: Path, tune: str, kind: str
) -> None:
    first = private | {"model.tune": tune, "training.run_dir": str(tmp_path / "first")}
    _, outcome, run_dir = train(without_privacy(first) if kind == WITHOUT_PRIVACY else first)
    record = read_provenance(run_dir.model)
    assert (
        record is not None
        and record["data"] == "reviews.csv"
        and not record["data_declared_public"]
    )
    assert record["private"] == (kind == EPSILONS_ADD)
    if kind == EPSILONS_ADD:
        assert (
            record["epsilon"] == outcome.result["epsilon"]
            and record["delta"] == outcome.result["delta"]
        )
    second = private | {"model.name": str(run_dir.model), "model.tune": "head"}
    with pytest.raises(ValueError, match=f'model.accept_start = "{kind}"'):
        prepare(config_of(second))
    _, outcome, again = train(second | {"model.accept_start": kind})
    assert outcome.result["started_from"] == [record] and len(outcome.result["start_warnings"]) == 1
    made = read_provenance(again.model)
    assert made is not None and made["started_from"] == [record]
    assert (
        json.loads(again.result.read_text())["start_warnings"] == outcome.result["start_warnings"]
    )


def test_a_run_on_public_data_is_a_public_start(private: dict[str, Any], tmp_path: Path) -> None:
    first = private | {
        "data.public": True,
        "training.seed": 1,
        "training.run_dir": str(tmp_path / "first"),
    }
    _, outcome, run_dir = train(first)
    assert outcome.result["data_declared_public"] and "seed_warning" not in outcome.result
    prepared = prepare(
        config_of(private | {"model.name": str(run_dir.model), "model.tune": "head"})
    )
    assert len(prepared.started_from) == 1


def test_a_private_label_reaches_nothing_that_is_written(
    private: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "rare.csv"
    for text in (f"a rare story {i}" for i in range(50)):
        write_records(source, [(text, "unheard-of"), *labelled_texts()])
        values = private | {"data.source": str(source)}
        splits = prepare(config_of(values)).task.splits
        if text in splits.train.texts:
            break
    _, _, run_dir = train(values)
    assert json.loads((run_dir.model / "quietgrad.json").read_text())["labels"] == ["bad", "good"]
    for file in run_dir.path.rglob("*"):
        assert not file.is_file() or b"unheard-of" not in file.read_bytes(), file


def test_progress_result_and_ledger_of_declared_data_say_so(
    quietgrad: Any, settings: dict[str, Any], write_config: Any
) -> None:
    config = write_config(settings | {"training.seed": 1})
    code, out, err = quietgrad("train", config, "--json")
    assert code == 0, err
    assert json.loads(out)["data_declared_public"] is True
    assert "(data declared public)" in err and "were declared public" in " ".join(err.split())
    assert "private for training" not in err
    run_dir = settings["training.run_dir"]
    code, out, _ = quietgrad("epsilon", "--ledger", run_dir, "--json")
    assert code == 0 and json.loads(out)["data_declared_public"] is True
    _, out, _ = quietgrad("epsilon", "--ledger", run_dir)
    assert "declared public" in " ".join(out.split())
    code, out, _ = quietgrad("plan", config, "--json")
    assert code == 0 and json.loads(out)["data_declared_public"] is True


def test_a_short_seed_on_private_data_is_refused(
    quietgrad: Any, settings: dict[str, Any], write_config: Any
) -> None:
    code, _, err = quietgrad(
        "train", write_config(settings | {"data.public": False, "training.seed": 1})
    )
    assert code == 2 and "has fewer than 128 bits" in err and "data.public = true" in err
    assert not Path(settings["training.run_dir"], "ledger.jsonl").exists()
