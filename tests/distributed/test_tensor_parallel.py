"""A model whose layers are cut over two processes is released as by one process: up to a unit of
the sums in float64, to the bit where the forward and backward passes do not round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import PLANS, cut, llama, model_named
from distributed.sharding import next_words, texts, whole
from distributed.test_equality import VARIANTS
from distributed.world import RECORDS, loss, on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quietgrad.averaging import ExponentialAverage
from quietgrad.clipping.engines.summing import unit_of

pytestmark = pytest.mark.distributed

LEFT_OUT = {"low rank", "wrapped", "denoised"}
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("bottleneck", v) for name, v in VARIANTS.items() if name not in LEFT_OUT},
    "ghost": ("bottleneck", {"estimator": "ghost"}),
    "materialized": ("bottleneck", {"estimator": "materialized"}),
    "by layer": ("bottleneck", {"groups": "layer"}),
    "adapters": ("adapted", {}),
    "words": ("words", {}),
    "words, ghost": ("words", {"estimator": "ghost"}),
    "words, materialized": ("words", {"estimator": "materialized"}),
    "words, hutch++": ("words", {"estimator": "hutch++", "sketch_dim": 8}),
    "words, tied": ("tied", {}),
    "words, padded": ("padded", {}),
    "llama": ("llama", {}),
    "llama, tied": ("llama tied", {}),
    "llama, lora": ("llama lora", {"bands": 2}),
}


def made(model: str, ranks: int, folder: str) -> nn.Module:
    """The model of a variant, cut where there are several ranks."""
    if model.startswith("llama"):
        return llama(Path(folder), ranks, "lora" in model, "tied" in model)
    found = model_named(model)
    return cut(found, PLANS[model]) if ranks > 1 else found


def trained(name: str, ranks: int, folder: str) -> dict[str, Any]:
    """Four steps: what was released, and what became of the weights."""
    kind, given = CUT[name]
    changes = dict(given)
    words = kind not in ("bottleneck", "adapted")
    model = made(kind, ranks, folder)
    assert any(isinstance(p, DTensor) for p in model.parameters()) == (ranks > 1)
    owner = None
    if name == "users":
        owner = [i // 3 for i in range(RECORDS)]
        changes["expected_batch_size"] = 5
    plan = plan_of(owner=owner, **changes)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    average = ExponentialAverage(model, 0.9)
    released, beside, held = [], [], []
    with plan.start(tensor_parallel=ranks) as run:
        records = texts(RECORDS) if words else records_of()
        for batch in run.loader(records, steps=4, physical_batch_size=3):
            noisy = run.backward(model, next_words if words else loss, batch)
            held.append(run._open.examples)
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            released.append(whole(noisy.gradients))
            beside.append(sorted(noisy.beside.items()))
        spent = run.epsilon()
    return {
        "released": torch.stack(released),
        "beside": beside,
        "weights": whole(model.named_parameters()),
        "average": whole(average.state_dict()["averages"]),
        "epsilon": spent,
        "held": held,
    }


def all_of(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    return {name: trained(name, ranks, folder) for name in CUT}


def test_releases_are_those_of_one_process_up_to_a_unit(tmp_path: Path) -> None:
    alone = all_of(0, 1, str(tmp_path))
    found = on_ranks(2, tmp_path / "two", all_of, 2, str(tmp_path))
    assert isinstance(found[0], dict), found[0]
    for name, one in alone.items():
        kind, changes = CUT[name]
        size = 5 if name == "users" else changes.get("expected_batch_size", 10)
        # What a sum rounds to may be the next unit, for each of a few micro-batches.
        room = 4 * unit_of(1.0, size)
        first = found[0][name]
        error = (first["released"] - one["released"]).abs()
        assert float(error.max()) <= room, (name, float(error.max()))
        assert float((error == 0).double().mean()) > 0.9 or "llama" in kind, name
        for what in ("weights", "average"):
            torch.testing.assert_close(first[what], one[what], rtol=0, atol=1e-9)
        assert first["epsilon"] == one["epsilon"] and first["held"] == one["held"]
        for mine, theirs in zip(first["beside"], one["beside"], strict=True):
            assert [n for n, _ in mine] == [n for n, _ in theirs]
            assert [v for _, v in mine] == pytest.approx([v for _, v in theirs], rel=1e-9)
        for other in found[1:]:
            for what, value in first.items():
                same = other[name][what]
                equal = torch.equal(same, value) if isinstance(value, Tensor) else same == value
                assert equal, (name, what)
    assert 0 in alone["small batches"]["held"]


class Whole(nn.Module):
    """Whole numbers in, whole numbers out: nothing is rounded before the clip factors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 3)
        source = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data = torch.randint(-3, 4, p.shape, generator=source).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up((4 * x).round())))
        return found


def whole_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - (4 * batch["y"]).round()).square().sum(dim=1)


def exactly(rank: int, ranks: int) -> dict[str, Tensor]:
    found = {}
    for estimator in ("ghost", "materialized", "hutch", "hutch++"):
        model = Whole()
        if ranks > 1:
            cut(model, PLANS["bottleneck"])
        plan = plan_of(estimator=estimator, **({"sketch_dim": 6} if "hutch" in estimator else {}))
        with plan.start(tensor_parallel=ranks) as run:
            found[estimator] = torch.stack(
                [
                    whole(run.backward(model, whole_loss, batch).gradients)
                    for batch in run.loader(records_of(), steps=4, physical_batch_size=3)
                ]
            )
    return found


def test_where_nothing_rounds_releases_are_equal_to_the_bit(tmp_path: Path) -> None:
    alone = exactly(0, 1)
    for found in on_ranks(2, tmp_path, exactly, 2):
        assert isinstance(found, dict), found
        for estimator in ("ghost", "materialized"):
            assert torch.equal(found[estimator], alone[estimator]), estimator
        for estimator in ("hutch", "hutch++"):
            torch.testing.assert_close(found[estimator], alone[estimator], rtol=0, atol=1e-11)
