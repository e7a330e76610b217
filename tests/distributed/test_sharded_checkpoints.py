"""A sharded run is saved by ``torch.distributed.checkpoint``, also while it trains, and goes on
with another number of ranks, in float64 as if it had never stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.runs import part_of_a_run
from distributed.sharding import language, next_words, sharded, texts, whole
from distributed.world import RECORDS, on_ranks, plan_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from quietgrad.distributed.together import group_for_saving
from quietgrad.ledger import read_ledger

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("first_looks_alone"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS = 6


def part(rank: int, ranks: int, folder: str, until: int) -> dict[str, Any]:
    model = language()
    if ranks > 1:
        sharded(model)
    plan, place = plan_of(steps=STEPS, bands=3), Path(folder)
    return part_of_a_run(model, texts(RECORDS), next_words, plan, place, until, ranks)


def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    alone = part(0, 1, str(tmp_path / "alone"), STEPS)
    folder = tmp_path / "moving"
    folder.mkdir()
    for ranks, until in ((2, 2), (4, 3), (1, 4), (2, STEPS)):
        if ranks == 1:
            found = [part(0, 1, str(folder), until)]
        else:
            found = on_ranks(ranks, tmp_path / f"ranks{until}", part, ranks, str(folder), until)
        assert all(isinstance(of_rank, dict) for of_rank in found), found
    for of_rank in found:
        assert torch.equal(of_rank["weights"], alone["weights"])
        assert torch.equal(of_rank["average"], alone["average"])
    contents = read_ledger(folder / "ledger.jsonl")
    assert contents.releases == STEPS
    # One block of correlated noise throughout: each change drew the earlier rows of its shards.
    assert contents.noise_block is not None and contents.noise_block[0] == 0


def saved_beside(rank: int, folder: str) -> list[bool]:
    """Whether each release's weights and moments are in the checkpoint that was begun then and
    written while the next records were clipped.
    """
    model = sharded(language())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    group = group_for_saving()
    kept: list[Tensor] = []
    saving: Any = None
    met = threading.Event()

    def slowly(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if saving is not None and not met.is_set():
            with contextlib.suppress(Exception):  # the thread is at work while these are clipped
                saving.result()
            met.set()
        return next_words(m, batch)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def flat() -> Tensor:
        moments = {n: s["exp_avg"] for n, s in state()["optimizer"]["state"].items()}
        return torch.cat([whole(model.named_parameters()), whole(moments)])

    with plan_of(steps=STEPS).start() as run:
        for batch in run.loader(texts(RECORDS), steps=STEPS, physical_batch_size=3):
            run.backward(model, slowly, batch)
            optimizer.step()
            optimizer.zero_grad()
            if saving is not None:
                saving.result()
            place = f"{folder}/checkpoint{run.released}"
            saving = dcp.async_save(state(), checkpoint_id=place, process_group=group)
            met.clear()
            kept.append(flat())
    saving.result()
    same = []
    for release, value in enumerate(kept, 1):
        found = state()
        dcp.load(found, checkpoint_id=f"{folder}/checkpoint{release}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        same.append(torch.equal(flat(), value))
    assert not torch.equal(kept[0], kept[1])
    return same


@pytest.mark.usefixtures("no_looks")
def test_checkpoints_are_written_while_the_next_records_are_clipped(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path / "ranks", saved_beside, str(tmp_path)):
        assert found == [True] * STEPS, found


def saved_within(rank: int, folder: str, known: bool) -> str:
    """A checkpoint that is written wholly while records are clipped."""
    group = group_for_saving() if known else dist.new_group(backend="gloo")
    number = itertools.count()

    def saving(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        place = f"{folder}/within{next(number)}"
        dcp.async_save({"x": torch.ones(1)}, checkpoint_id=place, process_group=group).result()
        return next_words(m, batch)

    with plan_of(steps=1).start() as run:
        for batch in run.loader(texts(RECORDS), steps=1, physical_batch_size=3):
            run.backward(sharded(language()), saving, batch)
    return "released"


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("known", [True, False])
def test_only_on_its_own_group_is_saving_not_taken_for_what_the_loss_does(
    known: bool, tmp_path: Path
) -> None:
    for found in on_ranks(2, tmp_path / "ranks", saved_within, str(tmp_path), known):
        assert ("released" if known else "exchanges tensors with other ranks") in found, found


def test_a_group_for_saving_needs_ranks() -> None:
    with pytest.raises(RuntimeError, match="no process group is initialised"):
        group_for_saving()
