"""A sharded run is saved by ``torch.distributed.checkpoint`` and goes on with another number of
ranks, in float64 as if it had never stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed.sharding import language, next_words, sharded, texts, whole
from distributed.world import RECORDS, on_ranks, plan_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from quietgrad.averaging import ExponentialAverage
from quietgrad.ledger import read_ledger

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS = 6


def part(rank: int, ranks: int, folder: str, until: int) -> dict[str, Any]:
    """Goes on from the folder's newest checkpoint, where there is one, to a release; and saves."""
    model = language()
    if ranks > 1:
        sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = ExponentialAverage(model, 0.9)
    for path in sorted(Path(folder).glob("checkpoint*"))[-1:]:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "average": average.state_dict()}
        dcp.load(state, checkpoint_id=str(path), no_dist=ranks == 1)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        average.load_state_dict(state["average"])
    plan = plan_of(steps=STEPS, bands=3)
    with plan.start(Path(folder, "ledger.jsonl"), Path(folder, "keys.json")) as run:
        steps = until - run.released
        for batch in run.loader(texts(RECORDS), steps=steps, physical_batch_size=3):
            run.backward(model, next_words, batch)
            optimizer.step()
            average.update()
            if run.released == until:
                break
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "average": average.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint{until}", no_dist=ranks == 1)
    return {
        "weights": whole(model.named_parameters()),
        "average": whole(average.state_dict()["averages"]),
    }


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
