"""A model sharded by ``fully_shard`` on two and four processes is released as by one process: in
float64 bit for bit.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import cut
from distributed.runs import four_steps
from distributed.sharding import language, llama, next_words, sharded, texts, whole
from distributed.test_equality import VARIANTS, adapted
from distributed.world import (
    RECORDS,
    loss,
    mesh_of,
    model_of,
    on_ranks,
    plan_of,
    records_of,
    without_looks,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import default_collate

from quietgrad.clipping.capture.spread import sharding_modules

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]

SHARDED = {
    **{name: VARIANTS[name] for name in VARIANTS if name != "wrapped"},
    "language": {},
    "language, hutch++": {"estimator": "hutch++", "sketch_dim": 6},
    "language, checkpointed": {},
    "language, banded": {"bands": 2},
    "language, blocks alone": {},
    "llama": {"estimator": "hutch", "sketch_dim": 4},
    "llama, lora": {},
}


def made(name: str) -> nn.Module:
    """The model of a variant, whole."""
    if name.startswith("llama"):
        return llama("lora" in name)
    if name.startswith("language"):
        return language("checkpointed" in name)
    return adapted() if name == "low rank" else model_of()


def trained(name: str, ranks: int) -> dict[str, Any]:
    """Four steps: what was released, and what became of the weights."""
    words = name.startswith(("language", "llama"))
    model = made(name)
    apart = name == "language, blocks alone"
    if ranks > 1:
        sharded(model, blocks_alone=apart)

    def look() -> None:
        for name_of, p in model.named_parameters():
            spread = ranks > 1 and (not apart or name_of.startswith("blocks"))
            assert isinstance(p, DTensor) == spread
            assert (p.grad is not None) == p.requires_grad
            assert p.grad is None or isinstance(p.grad, DTensor) == spread

    records = texts(RECORDS) if words else records_of()
    what, changes = (next_words if words else loss), SHARDED[name]
    return four_steps(model, records, what, changes, name, before_step=look)


def all_of(rank: int, ranks: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: trained(name, ranks) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return all_of(0, 1, tuple(SHARDED))


@pytest.mark.grid(1, "two numbers of ranks; two ranks train every model that four train")
@pytest.mark.parametrize("size", [2, 4])
def test_releases_are_those_of_one_process_to_the_bit(
    size: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    names = tuple(SHARDED) if size == 2 else ("exact", "language, banded", "small batches")
    found = on_ranks(size, tmp_path, all_of, size, names)
    empty = False
    for name in names:
        for of_rank in found:
            assert isinstance(of_rank, dict), of_rank
            for what, value in alone[name].items():
                if what == "held":
                    continue
                if name == "denoised" and what != "released":
                    # A stack of fewer matrices may be multiplied in another order.
                    torch.testing.assert_close(of_rank[name][what], value, rtol=1e-9, atol=1e-12)
                elif isinstance(value, Tensor):
                    assert torch.equal(of_rank[name][what], value), (name, what)
                else:
                    assert of_rank[name][what] == value, (name, what)
        shares = torch.tensor([of_rank[name]["held"] for of_rank in found])
        assert shares.sum(0).tolist() == alone[name]["held"]
        empty = empty or bool(((shares == 0).any(0) & (shares.sum(0) > 0)).any())
    # Among these were steps in which a rank had no record and another had some.
    assert empty


def options(rank: int, names: tuple[str, ...]) -> dict[str, Tensor]:
    """One step's release, in float32, by how the model is sharded and computed."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "kept": {"reshard_after_forward": False},
        "half": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    }
    found = {}
    for name in names:
        model = sharded(language().float(), **ways[name])
        # That passes run in half precision is found by looking.
        with contextlib.nullcontext() if name == "half" else without_looks():
            found[name] = whole(released(model))
        assert all(p.dtype == torch.float32 for p in model.parameters())
    return found


def released(model: nn.Module) -> dict[str, Tensor]:
    """The first release of a run with little noise."""
    with plan_of(noise_multiplier=1e-3).start() as run:
        for batch in run.loader(texts(RECORDS), steps=1, physical_batch_size=3):
            return run.backward(model, next_words, batch).gradients
    raise AssertionError


def test_ways_of_sharding_and_mixed_precision(tmp_path: Path) -> None:
    with without_looks():
        alone = whole(released(language().float()))
    two = on_ranks(2, tmp_path / "two", options, ("plain", "kept", "half"))
    four = on_ranks(4, tmp_path / "four", options, ("half",))
    for found in (*two, *four):
        assert isinstance(found, dict), found
        for name in found.keys() - {"half"}:
            torch.testing.assert_close(found[name], alone, rtol=0, atol=2e-5)
        # Records are computed in half precision and summed in single: where they were summed
        # changes as little as in single precision.
        torch.testing.assert_close(found["half"], two[0]["half"], rtol=0, atol=2e-5)
        error = float((found["half"] - alone).norm() / alone.norm())
        assert 1e-4 < error < 5e-2


def evaluated(rank: int, between: bool) -> Tensor:
    model = sharded(language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with without_looks(), plan_of(steps=3).start() as run:
        for batch in run.loader(texts(RECORDS), steps=3, physical_batch_size=3):
            run.backward(model, next_words, batch)
            optimizer.step()
            optimizer.zero_grad()
            if between:
                with torch.no_grad():
                    model(texts(1)[0]["ids"][None, :-1])
    for module in sharding_modules(model):
        module.reshard()
    return whole(model.named_parameters())


def test_an_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    """No backward pass follows it, so the outermost module's parameters stay gathered."""
    with_it, without = (
        on_ranks(2, tmp_path / str(between), evaluated, between) for between in (True, False)
    )
    for one, other in zip(with_it, without, strict=True):
        assert isinstance(one, Tensor) and torch.equal(one, other), one


class Prompted(nn.Module):
    """A layer whose input is a parameter's own memory, seen once for each record."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(6, 8), requires_grad=trained)
        self.mix, self.read, self.last = nn.Linear(8, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.prompt.expand(len(x), 6, 8))
        found: Tensor = self.last((mixed.mean(1) + self.read(x)).tanh())
        return found


def prompted(rank: int, ranks: int, trained: bool) -> Tensor:
    torch.manual_seed(0)
    model = Prompted(trained).double()
    if ranks > 1:
        fully_shard(model, mesh=mesh_of((ranks,)))
    with plan_of(steps=2).start() as run:
        for batch in run.loader(records_of(), steps=2, physical_batch_size=3):
            found = whole(run.backward(model, loss, batch).gradients)
            model.zero_grad()
    return found


@pytest.mark.parametrize("trained", [True, False])
def test_what_is_kept_outlives_a_gathered_parameter(trained: bool, tmp_path: Path) -> None:
    """The memory of a gathered parameter goes after the backward pass; what a layer was given of it
    is needed once more for the sum.
    """
    for found in on_ranks(2, tmp_path, prompted, 2, trained):
        assert isinstance(found, Tensor), found
        torch.testing.assert_close(found, prompted(0, 1, trained), rtol=0, atol=1e-9)


def passes(rank: int, kind: str) -> tuple[list[int], Tensor]:
    """Records of a forward pass in a loop without a loader, where the plan says two at most; and
    what was released.
    """
    seen = set()

    def watched(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.add(len(batch["x"]))
        return loss(model, batch)

    cutting = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    whole_one, together = model_of(), 2 if kind == "cut" else 1
    model = {
        "whole": lambda: whole_one,
        "sharded": lambda: sharded(whole_one),
        "cut": lambda: cut(whole_one, cutting),
    }[kind]()
    plan = plan_of(max_physical_batch_size=2, expected_batch_size=20, steps=1)
    with without_looks(), plan.start(tensor_parallel=together) as run:
        for indices in run.batches(1):
            batch = default_collate([records_of()[i] for i in indices])
            found = whole(run.backward(model, watched, batch).gradients)
    return sorted(seen), found


@pytest.mark.parametrize("kind", ["whole", "sharded", "cut"])
def test_no_pass_has_more_records_than_the_plan_says(kind: str, tmp_path: Path) -> None:
    _, alone = passes(0, "whole")
    for seen, found in on_ranks(2, tmp_path, passes, kind):
        assert max(seen) == 2
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)
