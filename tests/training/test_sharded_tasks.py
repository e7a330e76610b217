"""Runs of text models with ``training.sharded`` on two processes: the same scores and the same
files as one process has, and no process with the whole model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.world import on_ranks
from safetensors.torch import load_file
from tiny_runs import config_of, train

from quietgrad.distributed.together import Together
from quietgrad.tensors import local_of
from quietgrad.training import runner
from quietgrad.training.files.run_dir import open_run_dir
from quietgrad.training.prepare import prepare

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]
ANSWERS = {
    "task.kind": "generate", "task.prompt": "{text} :", "task.answer": "{label}",
    "task.max_answer_length": 3, "task.decoded": "rouge1", "task.decoded_records": 5,
}  # fmt: skip
FROZEN_HEAD = {"model.tune": "lora", "model.random_head": True}
CASES: dict[str, dict[str, Any]] = {
    "head": {"model.tune": "head", "model.head": "layers"},
    "lora": {**FROZEN_HEAD, "training.averaging": 0.5},
    "full": {"model.tune": "full"},
    "answers by lora": {**ANSWERS, "model.tune": "lora"},
    "answers": {**ANSWERS, "model.tune": "full", "training.averaging": 0.5},
}
ALL = {"training.sharded": True, "training.seed": 3, "model.dropout": 0.0}


def on_a_rank(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Runs every case; name -> entries of the model, and how many of them this rank held."""
    together = Together(rank, 2)
    held: dict[str, dict[str, int]] = {}
    for name, values in cases.items():
        prepared = prepare(config_of(values))
        run_dir = open_run_dir(values["training.run_dir"], False)
        together.of_first(None)  # none has begun to write
        outcome = runner.train(prepared, run_dir, False, lambda progress: None, together=together)
        assert bool(outcome.result) == (rank == 0)
        together.of_first(None)
        parameters = list(prepared.model.classifier.parameters())
        held[name] = {
            "all": sum(p.numel() for p in parameters),
            "held": sum(local_of(p).numel() for p in parameters),
        }
    return held


@pytest.mark.parametrize(
    "names",
    [
        ("head", "answers by lora"),
        pytest.param(
            ("lora", "full", "answers"),
            marks=pytest.mark.slow("three kinds of runs, each on two processes and on one"),
        ),
    ],
)
def test_tasks_of_texts_train_on_shards_as_on_one_process(
    names: tuple[str, ...], settings: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    cases = {}
    for name in names:
        changed = CASES[name]
        model = {"model.name": str(tiny_llama)} if "task.kind" in changed else {}
        cases[name] = settings | model | ALL | changed
        cases[name]["training.run_dir"] = str(tmp_path / name / "of two")
    told = on_ranks(2, tmp_path / "ranks", on_a_rank, cases)
    assert all(isinstance(one, dict) for one in told), told
    for name, values in cases.items():
        entries = told[0][name]["all"]
        # Halves, but for first dimensions that are odd.
        assert all(one[name]["held"] < 0.6 * entries for one in told), (name, told)
        assert sum(one[name]["held"] for one in told) == entries
        _, outcome, alone = train(values | {"training.run_dir": str(tmp_path / name / "of one")})
        of_two = Path(values["training.run_dir"])
        result = json.loads((of_two / "result.json").read_text())
        assert result["epsilon"] == outcome.result["epsilon"]
        assert result["metrics"] == pytest.approx(outcome.result["metrics"], rel=1e-3), name
        assert result.get("weights") == outcome.result.get("weights")
        expected = sorted(p.relative_to(alone.model) for p in alone.model.rglob("*"))
        assert sorted(p.relative_to(of_two / "model") for p in (of_two / "model").rglob("*")) == (
            expected
        )
        for file in alone.model.rglob("*.safetensors"):
            one = load_file(file)
            two = load_file(of_two / "model" / file.relative_to(alone.model))
            assert one.keys() == two.keys(), name
            for key, tensor in one.items():
                torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-4)
