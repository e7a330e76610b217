"""Correlated noise on ranks, and whether records lie where they lay: the first rank, which has the
secret file, compares for all.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from distributed.world import loss, model_of, on_ranks, plan_of, records_of

from quietgrad.ledger import read_ledger

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("no_looks")]


def in_sessions(rank: int, folder: Path, turned: bool) -> tuple[int, str]:
    """Releases after two sessions, and what was said in the second."""
    plan = plan_of(bands=2, sample_rate=0.5, expected_batch_size=None)
    made, refusal = 0, ""
    for again in (False, True):
        model = model_of()
        given: list[Any] = records_of()[::-1] if again and turned else records_of()
        with contextlib.suppress(ValueError, RuntimeError):
            try:
                with plan.start(folder / "ledger.jsonl", folder / "secrets.json") as run:
                    for batch in run.loader(given, steps=2, physical_batch_size=8):
                        run.backward(model, loss, batch)
                    made = run.released
            except (ValueError, RuntimeError) as error:
                refusal = str(error)
                raise
    return made, refusal


def test_a_run_on_ranks_goes_on_where_records_are_known_by_their_numbers(tmp_path: Path) -> None:
    """Before: the other ranks, which have no secret file, refused for want of one."""
    assert on_ranks(2, tmp_path / "ranks", in_sessions, tmp_path, False) == [(4, "")] * 2
    assert read_ledger(tmp_path).releases == 4


def test_in_another_order_it_does_not(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path / "ranks", in_sessions, tmp_path, True)
    assert [made for made, _ in found] == [2, 2]
    assert all("in another order" in said for _, said in found)
    assert read_ledger(tmp_path).releases == 2
