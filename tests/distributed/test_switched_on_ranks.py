"""A switch in plain Python that one rank's record throws for good is seen in that call, by all
ranks that make their passes together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import PLANS, cut, model_named
from distributed.sharding import sharded
from distributed.world import loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn

from quietgrad.clipping.soundness.switches.switched import Switches

pytestmark = pytest.mark.distributed

COUNT = 12
RARE = 30.0
RARE_STEP = 4  # not a guarded one


def releases(rank: int, kind: str, matters: bool, looks: bool = True) -> int:
    """How many there are, where a record of the last rank throws a switch in the fifth."""
    if not looks:
        Switches.begin = lambda *arguments: None  # type: ignore[method-assign]
    thrown: list[int] = []

    def switching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = loss(model, batch)
        found = found * (5.0 if matters and thrown else 1.0)
        if bool((batch["x"] == RARE).any()):
            thrown.append(1)
        return found

    options: dict[str, Any] = {"tensor_parallel": 2} if kind == "cut" else {}
    made = {"whole": model_of, "sharded": lambda: sharded(model_of())}
    model = cut(model_named("bottleneck"), PLANS["bottleneck"]) if kind == "cut" else made[kind]()
    records = records_of(COUNT)
    stacked = {name: torch.stack([r[name] for r in records]) for name in ("x", "y")}
    plan = plan_of(COUNT, sample_rate=1.0, expected_batch_size=None, steps=7)
    with plan.start(**options) as run:
        for step, indices in enumerate(run.batches()):
            batch = {name: t[indices] for name, t in stacked.items()}
            if step == RARE_STEP and (rank == 1 or kind == "cut"):
                batch["x"][0] = RARE
            run.backward(model, switching, batch)
        return run.released


@pytest.mark.parametrize("kind", ["whole", "sharded", "cut"])
def test_it_is_refused_on_all_ranks_that_pass_together(tmp_path: Path, kind: str) -> None:
    found = on_ranks(2, tmp_path, releases, kind, True)
    assert "was changed while records went through" in str(found[1]), found
    if kind != "whole":
        assert "was changed while records went through" in str(found[0]), found


@pytest.mark.parametrize("kind", ["sharded", "cut"])
def test_what_nobody_reads_keeps_no_rank_waiting(tmp_path: Path, kind: str) -> None:
    assert on_ranks(2, tmp_path, releases, kind, False) == [7, 7]


@pytest.mark.parametrize("kind", ["sharded", "cut"])
def test_without_the_look_all_goes_on(tmp_path: Path, kind: str) -> None:
    assert on_ranks(2, tmp_path, releases, kind, True, False) == [7, 7]


def writing_what_cannot_be_put_back(rank: int) -> int:
    """Another model's parameter, by a record of the last rank."""
    bank = nn.Parameter(torch.zeros(3), requires_grad=False)

    def switching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = loss(model, batch) + bank.sum()
        if bool((batch["x"] == RARE).any()):
            with torch.no_grad():
                bank.add_(1.0)
        return found

    model = sharded(model_of())
    stacked = {n: torch.stack([r[n] for r in records_of(COUNT)]) for n in ("x", "y")}
    with plan_of(COUNT, sample_rate=1.0, expected_batch_size=None, steps=7).start() as run:
        for step, indices in enumerate(run.batches()):
            batch = {name: t[indices] for name, t in stacked.items()}
            if step == RARE_STEP and rank == 1:
                batch["x"][0] = RARE
            run.backward(model, switching, batch)
        return run.released


def test_what_one_rank_cannot_put_back_is_refused_on_all_before_any_pass(tmp_path: Path) -> None:
    """A rank that made passes of its own would wait for the other one's for ever."""
    first, second = on_ranks(2, tmp_path, writing_what_cannot_be_put_back)
    assert "was changed while records went through" in str(first), first
    assert "too large to be put back" in str(second), second


def label_beyond_the_classes(rank: int) -> int:
    model = sharded(model_of())

    def classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = torch.full((len(batch["x"]),), 9117)
        return nn.functional.cross_entropy(model(batch["x"]).float(), labels, reduction="none")

    with plan_of(COUNT, sample_rate=1.0, expected_batch_size=None, steps=2).start() as run:
        for batch in run.loader(records_of(COUNT), steps=2):
            run.backward(model, classes, batch)
        return run.released


def test_no_rank_tells_the_label_that_is_beyond_the_classes(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, label_beyond_the_classes):
        assert "none of the" in str(found) and "9117" not in str(found), found
