"""Two and four processes release what one process releases: in float64 bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.runs import LOOKED_AT
from distributed.world import (
    RECORDS,
    flat,
    groups_of_its_own,
    loss,
    model_of,
    on_ranks,
    plan_of,
    records_of,
    without_looks,
)
from torch import Tensor, nn

from quietgrad.averaging import ExponentialAverage
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.denoising import SpikesWithBulk

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]


class LowRank(nn.Module):
    """A frozen linear layer and two trained factors, as LoRA has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False)
        self.up = nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LowRank(6, 8), nn.Tanh(), LowRank(8, 3)).double()


VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "hutch": {"estimator": "hutch", "sketch_dim": 4},
    "hutch++": {"estimator": "hutch++", "sketch_dim": 6},
    "banded": {"bands": 3},
    "banded, regenerated": {"bands": 3, "memory": "regenerate"},
    "denoised": {"denoising": SpikesWithBulk()},
    "beside": {"training_loss": TrainingLoss(2.0), "adaptive_clipping": AdaptiveClipping()},
    "secure": {"source": "secure"},
    "users": {},
    "low rank": {},
    "wrapped": {},
    "small batches": {"expected_batch_size": 2},
}


def trained(name: str, ranks: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Four steps: what was released, and what became of the weights and their average."""
    changes = dict(VARIANTS[name])
    model: nn.Module = adapted() if name == "low rank" else model_of(dtype)
    if name == "wrapped" and ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    owner = [i // 3 for i in range(RECORDS)] if name == "users" else None
    if owner is not None:
        changes["expected_batch_size"] = 5
    plan = plan_of(**changes) if owner is None else _of_users(owner, changes)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.05)
    average = ExponentialAverage(model, 0.9)
    released, beside, shares = [], [], []
    looks = contextlib.nullcontext() if name in LOOKED_AT else without_looks()
    with looks, groups_of_its_own(), plan.start() as run:
        for batch in run.loader(records_of(dtype=dtype), steps=4, physical_batch_size=3):
            noisy = run.backward(model, loss, batch)
            shares.append(run._open.examples)
            optimizer.step()
            average.update()
            released.append(flat(noisy.gradients))
            beside.append(sorted(noisy.beside.items()))
        spent = run.epsilon()
    return {
        "released": torch.stack(released),
        "beside": beside,
        "weights": flat(dict(model.named_parameters())),
        "average": flat(average.state_dict()["averages"]),
        "epsilon": spent,
        "shares": shares,
    }


def _of_users(owner: list[int], changes: dict[str, Any]) -> Any:
    from dataclasses import replace

    from distributed.world import CONFIG

    return replace(CONFIG, **changes).build(RECORDS, record_owner=owner)


def all_of(rank: int, ranks: int, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(name, ranks) for name in names}
    found["float32"] = trained("exact", ranks, torch.float32)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return all_of(0, 1, tuple(VARIANTS))


def require_same(name: str, found: dict[str, Any], alone: dict[str, Any]) -> None:
    # A stack of fewer matrices may be multiplied in another order.
    loose = {"weights", "average"} if name == "denoised" else set()
    for what, value in alone.items():
        if what == "shares":
            continue
        if not isinstance(value, Tensor):
            assert found[what] == value, (name, what)
        elif what in loose:
            torch.testing.assert_close(found[what], value, rtol=1e-9, atol=1e-12)
        else:
            assert torch.equal(found[what], value), (name, what)


@pytest.mark.parametrize("size", [2, 4])
def test_releases_are_those_of_one_process_to_the_bit(
    size: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    names = tuple(VARIANTS) if size == 2 else ("exact", "hutch", "banded", "small batches")
    found = on_ranks(size, tmp_path, all_of, size, names)
    empty = False
    for name in names:
        shares = torch.tensor([of_rank[name]["shares"] for of_rank in found])
        assert shares.sum(0).tolist() == alone[name]["shares"]
        empty = empty or bool(((shares == 0).any(0) & (shares.sum(0) > 0)).any())
        for of_rank in found:
            require_same(name, of_rank[name], alone[name])
    # Among these were steps in which a rank had no record and another had some.
    assert empty
    for of_rank in found:
        torch.testing.assert_close(
            of_rank["float32"]["released"], alone["float32"]["released"], rtol=0, atol=2e-5
        )
        assert torch.equal(of_rank["float32"]["weights"], found[0]["float32"]["weights"])
