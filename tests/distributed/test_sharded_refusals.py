"""What is refused of models that are spread over processes: by name, on all ranks, before anything
is released.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.cutting import PLANS, cut, model_named
from distributed.sharding import language, next_words, sharded, texts
from distributed.world import SECONDS, loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from quietgrad.clipping import Clipper
from quietgrad.denoising import PersistentAmplification, SpectralSGD
from quietgrad.distributed import ranks
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.distributed

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def attempt(
    model: nn.Module, per_example_loss: Loss = loss, records: Any = None, **changes: Any
) -> tuple[str, int]:
    """What was said, and how many releases there were, of two steps."""
    with plan_of(sample_rate=0.5, expected_batch_size=None, **changes).start() as run:
        data = records_of() if records is None else records
        try:
            for batch in run.loader(data, steps=2, physical_batch_size=8):
                run.backward(model, per_example_loss, batch)
        except (ValueError, RuntimeError) as error:
            return str(error), run.released
        return "", run.released


class Behind(nn.Module):
    """A weight that acts though its module is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


class Hidden(nn.Module):
    """Reentrant checkpointing, which shows its calls in the backward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.second, self.first(x), use_reentrant=True)
        return found


def comparing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) - loss(model, batch).mean().detach()


def hearing() -> Loss:
    """Hears of the other rank's records, once, after the guard has looked."""
    passes = []

    def found(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        passes.append(batch["x"].detach().mean().reshape(1))
        if len(passes) == 1:
            dist.all_reduce(passes[0])
        return loss(model, batch) * (2 + passes[0].tanh())

    return found


def writing(shard: Tensor) -> Loss:
    """Writes into the weights at rest."""

    def found(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            shard.add_(1e-3)
        return loss(model, batch)

    return found


def refused(rank: int) -> dict[str, tuple[str, int]]:
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
    apart = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    found = {}
    tensor_parallel = parallelize_module(model_of(), two["shards"], {"0": ColwiseParallel()})
    found["tensor parallel"] = attempt(tensor_parallel)
    fully_shard(tensor_parallel[2])
    found["one layer alone"] = attempt(tensor_parallel)
    found["hybrid"] = attempt(fully_shard(model_of(), mesh=two))
    by_columns = fully_shard(model_of(), shard_placement_fn=lambda p: Shard(int(p.shape == (8, 6))))
    found["columns"] = attempt(by_columns)
    found["part of the ranks"] = attempt(fully_shard(model_of(), mesh=apart["b"]))
    found["one example"] = attempt(sharded(model_of()), engine="one-example")
    found["behind"] = attempt(fully_shard(Behind().double()))
    found["reentrant"] = attempt(sharded(Hidden().double()))
    found["comparing"] = attempt(sharded(model_of()), comparing)
    found["hearing"] = attempt(sharded(model_of()), hearing())
    model = sharded(model_of())
    found["writing"] = attempt(model, writing(next(model.parameters()).to_local().detach()))
    model = sharded(model_of())
    try:
        Clipper(1.0).norms(model, loss, {"x": torch.ones(2, 6), "y": torch.ones(2, 3)})
    except ValueError as error:
        found["norms alone"] = str(error), 0
    model = sharded(model_of())
    with plan_of().start() as run:
        for batch in run.loader(records_of(), steps=1, physical_batch_size=8):
            noisy = run.backward(model, loss, batch)
            try:
                SpectralSGD(model, PersistentAmplification(), lr=0.1).step(noisy)
            except ValueError as error:
                found["moments"] = str(error), 0
    found["sound"] = attempt(sharded(language()), next_words, texts(40))
    return found


def test_what_cannot_be_sharded_is_refused_on_all_ranks(tmp_path: Path) -> None:
    expected = {
        "tensor parallel": "start it with plan.start(..., tensor_parallel=2)",
        "one layer alone": "but not by fully_shard, as others are",
        "hybrid": "hybrid sharding",
        "columns": "another dimension than the first",
        "part of the ranks": "the run has 2 ranks",
        "one example": "engine='one-example' with parameters that are sharded",
        "behind": "never called",
        "reentrant": "use_reentrant=False",
        "comparing": "depends on other examples",
        "hearing": "exchanges tensors with other ranks",
        "writing": "rewritten while the loss is computed",
        "norms alone": "docs/many_processes.md",
        "moments": "a rule of quietgrad.denoising",
    }
    for found in on_ranks(2, tmp_path, refused):
        assert isinstance(found, dict), found
        for name, text in expected.items():
            assert text in found[name][0] and found[name][1] == 0, (name, found[name])
        # What says so much is not just anything that is sharded.
        assert found["sound"] == ("", 2)


def new_at_every_step(model: nn.Module, rank: int, tensor_parallel: int = 1) -> tuple[str, int]:
    """The second rank's loss is a new one at every step, of what it reads: a scale that its loop
    makes. The first rank's is made once.
    """
    scales = {"made once": torch.ones(())}
    with plan_of(sample_rate=0.5, expected_batch_size=None).start(
        tensor_parallel=tensor_parallel
    ) as run:
        try:
            for batch in run.loader(records_of(), steps=3, physical_batch_size=8):
                if rank:
                    scales["made once"] = torch.ones(())
                run.backward(model, scaled_by(scales["made once"]), batch)
        except (ValueError, RuntimeError) as error:
            return str(error), run.released
        return "", run.released


def scaled_by(scale: Tensor) -> Loss:
    return lambda model, batch: loss(model, batch) * scale


def a_new_loss_on_one_rank(rank: int) -> list[tuple[str, int]]:
    found = [new_at_every_step(sharded(model_of()), rank)]
    cut_up = cut(model_named("bottleneck"), PLANS["bottleneck"])
    found.append(new_at_every_step(cut_up, rank, tensor_parallel=2))
    # In another mode than the others', which another look would follow from too.
    model = sharded(model_of())
    with plan_of(sample_rate=0.5, expected_batch_size=None).start() as run:
        try:
            for batch in run.loader(records_of(), steps=3, physical_batch_size=8):
                model.train(not (rank and run.released))
                run.backward(model, loss, batch)
        except RuntimeError as error:
            found.append((str(error), run.released))
    # One that is new on all ranks is looked at by all of them at every step.
    found.append(new_at_every_step(sharded(model_of()), 1))
    return found


def test_a_loss_that_is_new_on_one_rank_alone_is_refused_on_all_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    for *refusals, sound in on_ranks(2, tmp_path, a_new_loss_on_one_rank):
        assert len(refusals) == 3
        for message, released in refusals:
            assert "the ranks differ in loss" in message and released == 1, message
            assert "made once before the loop, on every rank" in message
        assert sound == ("", 3)
    assert time.monotonic() - began < SECONDS  # nobody waited for the group's timeout


def one_process(rank: int, folder: str) -> tuple[str, int]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/alone",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    return attempt(fully_shard(model_of()))


def test_a_sharded_model_on_one_process_is_refused(tmp_path: Path) -> None:
    ((message, released),) = on_ranks(1, tmp_path, one_process, str(tmp_path))
    assert "this run has one process" in message and released == 0


def own_error(rank: int, folder: str, kind: str, patience: float, closing: bool = True) -> str:
    """The second rank's loss fails in the second step, in the middle of a pass; its process lives
    on, and says whether the first one ended meanwhile.
    """
    ranks.PATIENCE = timedelta(seconds=1)
    if not closing:
        ranks.close_connections = lambda groups=None: None
    model, together, ended = sharded(model_of()), 1, Path(folder, "ended")
    if kind == "cut":
        model, together = cut(model_named("bottleneck"), PLANS["bottleneck"]), 2

    def train() -> None:
        with plan_of().start(Path(folder, "ledger.jsonl"), tensor_parallel=together) as run:

            def failing(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                if rank and run.released:
                    raise KeyError("a record that the loss does not know")
                return loss(module, batch)

            for batch in run.loader(records_of(), steps=3, physical_batch_size=3):
                run.backward(model, failing, batch)

    try:
        train()
    except KeyError as error:
        until = time.monotonic() + patience
        while time.monotonic() < until and not ended.exists():
            time.sleep(0.05)
        dist.destroy_process_group()  # as loops do at their end
        return f"{error}, and the other one {'ended' if ended.exists() else 'waits'}"
    except RuntimeError as error:
        ended.touch()
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["sharded", "cut"])
def test_a_rank_that_fails_in_a_pass_stops_the_others(kind: str, tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, own_error, str(tmp_path), kind, SECONDS / 2)
    assert second == "'a record that the loss does not know', and the other one ended"
    assert "rank 0 lost another rank, which failed" in first
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1


def test_without_closing_its_connections_a_rank_that_fails_is_waited_for(tmp_path: Path) -> None:
    _, second = on_ranks(2, tmp_path, own_error, str(tmp_path), "sharded", 4.0, False)
    assert second.endswith("and the other one waits")
