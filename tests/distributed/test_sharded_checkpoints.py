"""A sharded run is saved by ``torch.distributed.checkpoint`` and goes on with another number of
ranks, in float64 as if it had never stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.runs import part_of_a_run
from distributed.sharding import language, next_words, sharded, texts
from distributed.world import RECORDS, on_ranks, plan_of

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
