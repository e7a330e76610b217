"""What is refused of models on groups of processes that share records: by name, on all ranks,
before anything is released.
"""

from __future__ import annotations

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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from quietgrad.clipping import clipped_gradients
from quietgrad.tensors import block_of, local_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("no_looks"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

PLAN = PLANS["bottleneck"]
Said = dict[str, tuple[str, int]]


def attempt(
    model: nn.Module, tensor_parallel: int = 2, per_example_loss: Any = loss, collate: Any = None
) -> tuple[str, int]:
    """What was said, and how many releases there were, of two steps."""
    plan = plan_of(sample_rate=0.5, expected_batch_size=None)
    with plan.start(tensor_parallel=tensor_parallel) as run:
        options = {} if collate is None else {"collate_fn": collate}
        try:
            for batch in run.loader(records_of(), steps=2, physical_batch_size=8, **options):
                run.backward(model, per_example_loss, batch)
        except (ValueError, RuntimeError) as error:
            return str(error), run.released
        return "", run.released


def made(shards: bool) -> nn.Module:
    return cut(model_named("bottleneck"), PLAN, 2, shards)


def changed(model: nn.Module, name: str, here: bool) -> nn.Module:
    """With other weights on some ranks."""
    with torch.no_grad():
        local_of(model.get_parameter(name)).add_(float(here))
    return model


def failing(rank: int) -> Any:
    """A micro-batch that one rank cannot make."""

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        if rank == 3:
            raise ValueError("no such record")
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return collate


def by_hand(model: nn.Module, rank: int) -> tuple[str, int]:
    """Records in another order on one neighbour, without a loader."""
    records = records_of()
    with plan_of(sample_rate=0.5, expected_batch_size=None).start(tensor_parallel=2) as run:
        for indices in run.batches():
            rows = [records[i] for i in (indices[::-1] if rank == 1 else indices)]
            batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            try:
                run.backward(model, loss, batch)
            except RuntimeError as error:
                return str(error), run.released
    return "", run.released


def refused(rank: int) -> Said:
    found: Said = {}
    found["not told"] = attempt(made(False), tensor_parallel=1)
    found["not told, sharded"] = attempt(made(True), tensor_parallel=1)
    found["told of all"] = attempt(made(False), tensor_parallel=4)
    found["told of all, sharded"] = attempt(made(True), tensor_parallel=4)
    found["not cut"] = attempt(sharded(model_of()))
    try:
        plan_of().start(tensor_parallel=3)
    except ValueError as error:
        found["three"] = str(error), 0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found["not neighbours"] = attempt(
        parallelize_module(model_named("bottleneck"), mesh["dp"], PLAN)
    )
    some = parallelize_module(model_named("bottleneck"), mesh["tp"], PLAN)
    fully_shard(some.up, mesh=mesh["dp"])
    found["some alone"] = attempt(some)
    found["columns"] = attempt(
        cut(
            model_named("bottleneck"),
            PLAN,
            2,
            True,
            shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 and p.shape[1] == 8 else None,
        )
    )
    found["hearing"] = attempt(made(False), per_example_loss=hearing())
    found["hearing, sharded"] = attempt(made(True), per_example_loss=hearing())
    found["copies"] = attempt(changed(made(False), "up.weight", rank > 1))
    found["copies of shards"] = attempt(changed(made(True), "before.weight", rank % 2 > 0))
    found["whole"] = attempt(changed(made(False), "head.weight", rank > 1))
    found["order"] = by_hand(made(False), rank)
    found["order, sharded"] = by_hand(made(True), rank)
    found["failing"] = attempt(made(False), collate=failing(rank))
    found["failing, sharded"] = attempt(made(True), collate=failing(rank))
    try:
        batch = {name: torch.stack([r[name] for r in records_of(4)]) for name in ("x", "y")}
        clipped_gradients(made(True), loss, batch, max_grad_norm=1.0)
    except (ValueError, RuntimeError) as error:
        found["no run"] = str(error), 0
    found["sound"] = attempt(made(False))
    found["sound, sharded"] = attempt(made(True))
    return found


EXPECTED = {
    "not told": "tensor_parallel=2), on all ranks of the mesh",
    "not told, sharded": "tensor_parallel=2), on all ranks of the mesh",
    "told of all": "those that share records are neighbours",
    "told of all, sharded": "those that share records are neighbours",
    "not cut": "its layers not cut",
    "three": "tensor_parallel=3 with 4 ranks",
    "not neighbours": "those that share records are neighbours",
    "some alone": "give fully_shard the whole model at last",
    "columns": "another dimension than the first",
    "hearing": "exchanges tensors with other ranks",
    "hearing, sharded": "exchanges tensors with other ranks",
    "copies": "the ranks differ in weights of cut layers",
    "copies of shards": "the ranks differ in sharded weights",
    "whole": "the ranks differ in weights",
    "order": "the ranks differ in micro-batch",
    "order, sharded": "the ranks differ in micro-batch",
    "failing": "rank 3 stopped after an error",
    "failing, sharded": "rank 3 stopped after an error",
    "no run": "docs/many_processes.md",
}
# Those of the other group hear that ranks of it stopped.
OF_ONE_GROUP = {"order": 0, "order, sharded": 0, "failing": 1, "failing, sharded": 1}


def test_what_groups_cannot_do_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(4, tmp_path, refused)):
        assert isinstance(found, dict), found
        for name, text in EXPECTED.items():
            if OF_ONE_GROUP.get(name, rank // 2) != rank // 2:
                text = "stopped after an error of its own"
            elif "failing" in name and rank == 3:
                text = "no such record"
            assert text in found[name][0] and found[name][1] == 0, (rank, name, found[name])
        assert found["sound"] == found["sound, sharded"] == ("", 2)


def uneven(rank: int) -> str:
    """Seven rows: a part of four and one of three, of which three ranks hold 2, 2, 0 and 1, 1, 1.
    The last two hold what torch's placements say that the other has.
    """
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(3, 7, bias=False)
    module.weight = nn.Parameter(distribute_tensor(torch.randn(7, 3), mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["dp"])
    try:
        block_of(module.weight)
    except ValueError as error:
        said = str(error)
    else:
        said = ""
    dist.barrier()
    return said


def test_parts_that_torch_places_elsewhere_are_refused(tmp_path: Path) -> None:
    found = on_ranks(6, tmp_path, uneven)
    assert found[:4] == [""] * 4
    assert all("which is not how fully_shard" in said for said in found[4:]), found
