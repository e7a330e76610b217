"""Correlated noise and records that are known by their numbers, on several processes: the first one
has the file that tells whether they lie where they lay.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.world import RECORDS, loss, model_of, on_ranks, plan_of, records_of, without_looks

pytestmark = pytest.mark.distributed

STEPS = 4


def sessions(rank: int, folder: str) -> list[str]:
    """Two steps in each of two sessions, the second with records as they were or turned round."""
    place, said = Path(folder), []
    for turned in (False, True, False):
        data = records_of(RECORDS)
        with plan_of(steps=STEPS, bands=2).start(place / "ledger", place / "keys.json") as run:
            try:
                with without_looks():
                    for batch in run.loader(data[::-1] if turned else data, steps=2):
                        run.backward(model_of(), loss, batch)
                said.append(str(run.released))
            except (ValueError, RuntimeError) as error:
                said.append(str(error))
    return said


def test_a_run_of_several_processes_goes_on_with_its_records_in_their_order(tmp_path: Path) -> None:
    # Before: the others, which have no such file, refused every session but the first.
    for rank, (first, turned, last) in enumerate(on_ranks(2, tmp_path, sessions, str(tmp_path))):
        assert (first, last) == ("2", "4"), rank
        assert ("in another order" in turned) == (rank == 0)
