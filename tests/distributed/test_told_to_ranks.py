"""What the first rank reads of the ledger is what every rank goes on with; and ranks with records
of their own draw numbers of their own for them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.world import loss, model_of, on_ranks, plan_of, records_of

from quietgrad.beside import AdaptiveClipping
from quietgrad.ledger import read_ledger

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("no_looks")]

CHANGES: dict[str, Any] = {"adaptive_clipping": AdaptiveClipping(rate=1.0)}


def gone_on(rank: int, ledger: str) -> dict[str, Any]:
    with plan_of(**CHANGES).start(ledger) as run:
        return {
            "released": run.released,
            "epsilon": run.epsilon(),
            "norm": run.max_grad_norm,
            "batches": [len(indices) for indices in run.batches(0)],
        }


@pytest.mark.parametrize("gives_up", [True, False])
def test_every_rank_goes_on_with_what_the_ledger_says(gives_up: bool, tmp_path: Path) -> None:
    """A mutant's other ranks told the epsilon of a run that has none."""
    ledger, model = tmp_path / "ledger.jsonl", model_of()
    with plan_of(**CHANGES).start(ledger) as run:
        for batch in run.loader(records_of(), steps=2):
            run.backward(model, loss, batch)
        spent, norm = run.epsilon(), run.max_grad_norm
        if gives_up:
            run.give_up_privacy("made up")
    said = {"released": 2, "epsilon": math.inf if gives_up else spent, "norm": norm, "batches": []}
    assert 0 < spent < math.inf and norm != run.plan.max_grad_norm
    assert on_ranks(2, tmp_path / "ranks", gone_on, str(ledger)) == [said, said]
    assert read_ledger(ledger).releases == 2


def seeds(rank: int, together: int) -> list[int]:
    """Of what the model, the loop and reading draw."""
    with plan_of().start(tensor_parallel=together) as run:
        own = [run.model_seed()]
        for _ in run.batches(1):
            own.append(int(torch.randint(2**40, ())))
            break
        return own


def test_ranks_draw_numbers_of_their_own_where_they_have_records_of_their_own(
    tmp_path: Path,
) -> None:
    """A mutant gave the k-th records of all ranks the same dropout."""
    one, two = on_ranks(2, tmp_path / "apart", seeds, 1)
    assert not set(one) & set(two) and len({*one, *two}) == 4
    one, two = on_ranks(2, tmp_path / "together", seeds, 2)
    assert one == two
