"""docs/many_processes.md, docs/fully_sharded.md, docs/sharded_checkpoints.md and
docs/tensor_parallel.md run as they stand, on two processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.world import loss, on_ranks, plan_of, records_of, without_looks
from page_blocks import blocks_of, commands
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.distributed


@pytest.mark.slow("two starts of two processes, each of which imports torch")
def test_the_commands_of_many_processes_run(tmp_path: Path) -> None:
    (script,) = blocks_of("docs/many_processes.md", "python")
    (tmp_path / "train.py").write_text(script.text)
    rows = [f"{i % 50},{'high' if i % 50 > 24 else 'low'}" for i in range(400)]
    (tmp_path / "people.csv").write_text("age,income\n" + "\n".join(rows) + "\n")
    (tmp_path / "CONFIG.toml").write_text(
        '[model]\nname = "table:mlp"\n[data]\nsource = "people.csv"\nlabel = "income"\n'
        "[optimizer]\nlearning_rate = 0.1\n[training]\nsteps = 4\nexpected_batch_size = 50\n"
        "[privacy]\ntarget_epsilon = 4\n"
    )
    lines = [c for b in blocks_of("docs/many_processes.md", "sh") for c in commands(b.text)]
    assert [line[0] for line in lines] == ["torchrun", "quietgrad", "torchrun"]
    modules = {"torchrun": "torch.distributed.run", "quietgrad": "quietgrad"}
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    plain = {name: value for name, value in os.environ.items() if name not in ranks}
    plain["OMP_NUM_THREADS"] = "1"
    said = []
    # The last says by itself what the one before makes the launcher say, which has a test.
    assert lines[2][3:] == ["-m", *lines[1][:3], "--set", "training.run_dir=runs/a"]
    for name, *words in lines[:2]:
        own = ["--standalone"] if name == "torchrun" else []  # a port of its own
        command = [sys.executable, "-m", modules[name], *own, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=plain)
        assert done.returncode == 0, (command, done.stderr[-3000:])
        said.append(done.stdout + done.stderr)
    assert said[0].count("epsilon ") == 1 and "after 23 steps" in said[0]  # one process says it
    assert (tmp_path / "run" / "ledger.jsonl").exists() and (tmp_path / "model.pt").exists()
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "ledger.jsonl").exists()


class Blocks(nn.Module):
    """A model that has ``blocks``, as the page's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 3)]).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.blocks[1](self.blocks[0](x).tanh()))


def shard_and_save(rank: int, folder: str, codes: list[str]) -> tuple[int, list[str]]:
    """The page's block on shards, and those on checkpoints, in a run: releases, and what is kept
    of the one that was saved beside the last step.
    """
    from quietgrad.averaging import ExponentialAverage

    shard, save, load, beside = (
        compile(code.replace('"cuda"', '"cpu"'), "page", "exec") for code in codes
    )
    scope: dict[str, Any] = {"__name__": "page", "model": Blocks(), "path": f"{folder}/kept"}
    scope |= {"per_example_loss": loss, "every": 2}
    exec(shard, scope)
    scope["average"] = ExponentialAverage(scope["model"], 0.9)
    with without_looks(), plan_of().start() as scope["run"]:
        scope["loader"] = scope["run"].loader(records_of(), physical_batch_size=4, steps=4)
        exec(save, scope)
        weight = scope["model"].blocks[0].weight
        before = weight.to_local().clone()
        with torch.no_grad():
            weight.add_(1.0)
        exec(load, scope)
        assert torch.equal(weight.to_local(), before) and scope["kept"] == [0]
        exec(beside, scope)
    dist.barrier()
    return scope["run"].released, sorted(p.name for p in Path(folder, "kept", "4").iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_blocks_on_shards_and_their_checkpoints_run(tmp_path: Path) -> None:
    (shard,) = blocks_of("docs/fully_sharded.md", "python")
    save, load, beside, whole = blocks_of("docs/sharded_checkpoints.md", "python")
    codes = [shard.text, save.text, load.text, beside.text]
    for found in on_ranks(2, tmp_path / "ranks", shard_and_save, str(tmp_path), codes):
        assert not isinstance(found, str), found
        assert found == (4, [".metadata", "__0_0.distcp", "__1_0.distcp"])
    newest = tmp_path / "kept" / "4"
    scope = {"__name__": "page", "model": Blocks(), "newest": newest, "dcp": dcp}
    before = scope["model"].state_dict()["blocks.0.weight"].clone()
    file = str(tmp_path / "model.safetensors")
    exec(whole.text.replace('"model.safetensors"', repr(file)), scope)
    kept = load_file(file)
    assert set(kept) == set(scope["model"].state_dict())
    assert torch.equal(kept["blocks.0.weight"], scope["model"].blocks[0].weight)
    assert not torch.equal(kept["blocks.0.weight"], before)


def cut_and_train(rank: int, code: str) -> tuple[int, str, torch.Tensor]:
    """The page's block: releases, how a weight lies, and a parameter that all ranks hold."""
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(code.replace('"cuda"', '"cpu"'), "tensor_parallel.md", "exec"), scope)
    model = scope["model"]
    return scope["run"].released, str(model.up.weight.placements), model.norm.weight.detach()


def test_the_block_of_tensor_parallel_runs(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/tensor_parallel.md", "python")
    one, two = on_ranks(2, tmp_path, cut_and_train, block.text)
    assert not isinstance(one, str), one
    assert one[:2] == two[:2] == (10, "(Shard(dim=0),)")
    assert torch.equal(one[2], two[2]) and not torch.equal(one[2], torch.ones(16))
