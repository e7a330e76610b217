"""Records of a sharded model whose norms are in doubt or whose gradients overflow: the sum is that
of one process to the bit, with tied weights and with frozen ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.sharding import language, next_words, sharded, texts, whole
from distributed.world import RECORDS, on_ranks, plan_of
from torch import Tensor, nn

from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.rounding import Norms
from quietgrad.clipping.sharded import passes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("no_looks")]


def in_doubt(self: Work, norms: Norms) -> Tensor | None:
    """Whose norm has an odd digit: about half of them, the same in any company."""
    found = (norms.estimate[0] * 2**20).nan_to_num(1.0, 1.0).long() % 2 == 1
    return found if bool(found.any()) else None


def loud(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Texts that begin with the last words have gradients without bounds."""
    huge = 1.0 + 1e300 * (batch["ids"][:, 0] >= 10).double()
    return next_words(model, batch) * huge * huge


def released(ranks: int, frozen: bool, left_out: bool) -> dict[str, Any]:
    alone = 0
    Work.doubtful = in_doubt  # type: ignore[method-assign]
    measured = passes._measured_alone

    def counted(*given: Any) -> list[float] | None:
        nonlocal alone
        alone += 1
        return None if left_out else measured(*given)

    passes._measured_alone = counted  # type: ignore[assignment]
    model = language()
    if frozen:
        for p in (*model.blocks[0].mix.parameters(), model.norm.weight):  # type: ignore[index,union-attr]
            p.requires_grad_(False)
    if ranks > 1:
        sharded(model)
    found = []
    with plan_of(steps=3).start() as run:
        for batch in run.loader(texts(RECORDS), steps=3, physical_batch_size=3):
            found.append(whole(run.backward(model, loud, batch).gradients))
    return {"released": torch.stack(found), "alone": alone}


def ways(rank: int, ranks: int, left_out: bool = False) -> list[dict[str, Any]]:
    return [released(ranks, frozen, left_out) for frozen in (False, True)]


def test_records_in_doubt_and_without_bounds_add_what_they_add_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Work, "doubtful", Work.doubtful)
    monkeypatch.setattr(passes, "_measured_alone", passes._measured_alone)
    assert 0 < sum(int(t["ids"][0] >= 10) for t in texts(RECORDS)) < RECORDS
    one = ways(0, 1)
    two = on_ranks(2, tmp_path / "two", ways, 2)
    without = on_ranks(2, tmp_path / "without", ways, 2, True)
    for found, other in zip(two, without, strict=True):
        assert isinstance(found, list) and isinstance(other, list), (found, other)
        for way, single, left in zip(found, one, other, strict=True):
            assert bool(single["released"].isfinite().all())
            assert torch.equal(way["released"], single["released"])
            assert way["alone"] > 0
            # Left out, they would be missed.
            assert not torch.equal(left["released"], single["released"])
