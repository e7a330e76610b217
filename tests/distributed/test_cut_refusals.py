"""What is refused of models whose layers are cut over processes: by name, on all ranks, before
anything is released.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cutting import PLANS, cut, model_named
from distributed.sharding import sharded
from distributed.test_sharded_refusals import hearing
from distributed.world import loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from quietgrad.clipping import UserBatch, clipped_gradients
from quietgrad.denoising import PersistentAmplification, SpectralSGD

pytestmark = pytest.mark.distributed

Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
PLAN = PLANS["bottleneck"]
WHOLE: dict[str, Any] = {"sample_rate": 1.0, "expected_batch_size": None, "steps": 1}


def attempt(
    model: nn.Module,
    per_example_loss: Loss = loss,
    records: Any = None,
    tensor_parallel: int = 2,
    collate: Any = None,
    **changes: Any,
) -> tuple[str, int]:
    """What was said, and how many releases there were, of two steps."""
    plan = plan_of(sample_rate=0.5, expected_batch_size=None, **changes)
    with plan.start(tensor_parallel=tensor_parallel) as run:
        data = records_of() if records is None else records
        options = {} if collate is None else {"collate_fn": collate}
        try:
            for batch in run.loader(data, steps=2, physical_batch_size=8, **options):
                run.backward(model, per_example_loss, batch)
        except (ValueError, RuntimeError) as error:
            return str(error), run.released
        return "", run.released


def test_a_mesh_of_one_rank_is_refused(tmp_path: Path) -> None:
    (found,) = on_ranks(1, tmp_path, _on_one_rank)
    assert found == ("leave parallelize_module out", 0), found


def _on_one_rank(rank: int) -> tuple[str, int]:
    meeting = f"file://{tempfile.mkdtemp()}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    said, released = attempt(cut(model_named("bottleneck"), PLAN), tensor_parallel=1)
    remedy = "leave parallelize_module out"
    return remedy if remedy in said else said, released


def by_hand(model: nn.Module, rank: int) -> tuple[str, int]:
    """Records in another order on every rank, without a loader."""
    records = records_of()
    with plan_of(sample_rate=0.5, expected_batch_size=None).start(tensor_parallel=2) as run:
        for indices in run.batches():
            order = indices[::-1] if rank else indices
            try:
                run.backward(model, loss, _stacked([records[i] for i in order]))
            except RuntimeError as error:
                return str(error), run.released
    return "", run.released


def users_apart(model: nn.Module, rank: int) -> tuple[str, int]:
    """The same records on all ranks, shared out among users in another way."""
    records, plan = records_of(4), plan_of(4, owner=[0, 0, 1, 1], **WHOLE)
    with plan.start(tensor_parallel=2) as run:
        for _ in run.batches():
            sizes = (1, 3) if rank else (2, 2)
            try:
                run.backward(model, loss, UserBatch(_stacked(records), sizes))
            except RuntimeError as error:
                return str(error), run.released
    return "", run.released


def checked_before_it_is_cut() -> tuple[str, int]:
    model = model_named("bottleneck")
    with plan_of().start(tensor_parallel=2) as run:
        try:
            run.check(model, loss, _stacked(records_of(4)))
        except ValueError as error:
            return str(error), run.released
    return "", run.released


def squares(rank: int) -> nn.Module:
    """Cut otherwise on every rank, which the names and shapes of its parameters do not show."""
    model = nn.Sequential()
    for name in ("up", "down"):
        model.add_module(name, nn.Linear(6, 6, bias=False))
    both = [ColwiseParallel(), RowwiseParallel()]
    return double(model, dict(zip(("up", "down"), both[::-1] if rank else both, strict=True)))


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum(1)


class Heads(nn.Module):
    """A scale that acts on the features of single ranks, between layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.LayerNorm(3)
        self.down = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(1, (-1, 3))
        found: Tensor = self.down(self.norm(heads).flatten(1))
        return found


class Bare(nn.Module):
    """A parameter of a module that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(x))) * self.scale
        return found


class Hidden(nn.Module):
    """Reentrant checkpointing, which shows its calls in the backward pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(
            lambda y: self.down(self.up(y)), self.first(x), use_reentrant=True
        )
        return found


class Positions(nn.Module):
    """Layers over positions; the loss is summed over them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(self.norm(x.unsqueeze(1).expand(-1, 4, -1))))
        return found


def over_positions(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum((1, 2))


def comparing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch) - loss(model, batch).mean().detach()


def behind(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A parameter that acts though its module is not called."""
    return loss(model, batch) + model.head.bias.sum()  # type: ignore[union-attr,operator]


def double(model: nn.Module, plan: dict[str, Any]) -> nn.Module:
    return cut(model.double(), plan)


def refused(rank: int) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    bottleneck = lambda: cut(model_named("bottleneck"), PLAN)  # noqa: E731
    found["not told"] = attempt(bottleneck(), tensor_parallel=1)
    found["whole"] = attempt(model_named("bottleneck"))
    found["sharded"] = attempt(sharded(model_of()))
    for name, ranks in (("three", 3),):
        try:
            plan_of().start(tensor_parallel=ranks)
        except ValueError as error:
            found[name] = str(error), 0
    found["one example"] = attempt(bottleneck(), engine="one-example")
    found["comparing"] = attempt(bottleneck(), comparing)
    found["hearing"] = attempt(bottleneck(), hearing())
    found["behind"] = attempt(bottleneck(), behind)
    found["heads"] = attempt(double(Heads(), PLAN))
    found["bare"] = attempt(double(Bare(), PLAN))
    found["reentrant"] = attempt(double(Hidden(), PLAN))
    gru = nn.Sequential()
    gru.add_module("up", nn.Linear(6, 6))
    gru.add_module("down", nn.Linear(6, 6))
    gru.add_module("gru", nn.GRU(6, 3, batch_first=True))
    found["gru"] = attempt(double(gru, PLAN))
    sequence = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    found["sequence"] = attempt(double(Positions(), sequence), over_positions)
    del sequence["norm"]
    frozen = Positions()
    frozen.norm.requires_grad_(False)
    found["sequence, norm frozen"] = attempt(double(frozen, sequence), over_positions)
    spread = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(use_local_output=False),
    }
    found["loss parallel"] = attempt(
        double(Positions(), spread), lambda m, b: over_positions(lambda x: m(x).to_local(), b)
    )
    part = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    found["a part of the ranks"] = attempt(
        parallelize_module(model_named("bottleneck"), part, PLAN)
    )
    found["other order"] = by_hand(bottleneck(), rank)
    found["users apart"] = users_apart(bottleneck(), rank)
    found["plans apart"] = attempt(squares(rank), squared)
    halves = bottleneck()
    halves.get_parameter("up.bias" if rank else "up.weight").requires_grad_(False)
    found["frozen apart"] = attempt(halves)
    found["checked before"] = checked_before_it_is_cut()
    found["positions apart"] = attempt(
        bottleneck(), collate=lambda rows: _stacked([_part_of(row, rank) for row in rows])
    )
    try:
        clipped_gradients(bottleneck(), loss, _stacked(records_of()[:4]), max_grad_norm=1.0)
    except (ValueError, RuntimeError) as error:
        found["no run"] = str(error), 0
    model = bottleneck()
    with plan_of().start(tensor_parallel=2) as run:
        for batch in run.loader(records_of(), steps=1, physical_batch_size=8):
            noisy = run.backward(model, loss, batch)
            try:
                SpectralSGD(model, PersistentAmplification(), lr=0.1).step(noisy)
            except ValueError as error:
                found["moments"] = str(error), 0
    found["sound"] = attempt(bottleneck())
    return found


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _part_of(row: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {"x": row["x"].roll(3 * rank), "y": row["y"]}


EXPECTED = {
    "not told": "tensor_parallel=2), on all ranks of the mesh",
    "whole": "the model is whole on every rank",
    "sharded": "the model is sharded by fully_shard",
    "three": "tensor_parallel=3 with 2 ranks",
    "one example": "engine='one-example' with layers that are cut",
    "comparing": "depends on other examples",
    "hearing": "first",
    "behind": "parameter 'head.bias'",
    "heads": "is whole on every rank, and its gradient differs between ranks",
    "bare": "is a Bare, which has no rule of its own",
    "reentrant": "use_reentrant=False",
    "gru": "layer 'gru' is a GRU, which has no rule of its own",
    "sequence": "layer 'norm' lies on the ranks as copies (sequence parallel)",
    "sequence, norm frozen": "has other positions at its input than at its output",
    "loss parallel": "returns a DTensor (use_local_output=False)",
    "a part of the ranks": "the run has 2 ranks",
    "other order": "the ranks differ in micro-batch",
    "users apart": "the ranks differ in micro-batch",
    "plans apart": "the ranks differ in parameters",
    "frozen apart": "the ranks differ in parameters",
    "checked before": "the model is whole on every rank",
    "positions apart": "the ranks differ in micro-batch",
    "no run": "docs/many_processes.md",
    "moments": "a rule of quietgrad.denoising",
}


def test_what_cannot_be_cut_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, refused):
        assert isinstance(found, dict), found
        for name, text in EXPECTED.items():
            assert text in found[name][0] and found[name][1] == 0, (name, found[name])
        # What says so much is not just anything that is cut.
        assert found["sound"] == ("", 2)


def public_records(rank: int) -> list[Tensor]:
    """Public records that are others on each rank, seen by the loss."""
    seen: list[Tensor] = []

    def noting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["x"].clone())
        return loss(model, batch)

    model = cut(model_named("bottleneck"), PLAN)
    with plan_of().start(tensor_parallel=2) as run:
        run.check(model, noting, _stacked(records_of(4 + rank)[rank:]))
    return seen


def test_public_records_are_the_first_rank_s_on_all(tmp_path: Path) -> None:
    one, two = on_ranks(2, tmp_path, public_records)
    assert isinstance(one, list) and isinstance(two, list), (one, two)
    assert one and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
