"""What the tests of sharded and cut models do on every rank: a few steps, and a part of a run that
was saved by others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from distributed.sharding import whole
from distributed.world import RECORDS, groups_of_its_own, plan_of, without_looks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from quietgrad.averaging import ExponentialAverage
from quietgrad.plan import PrivacyPlan

# Guards look at these variants, at least one of every model, layout and kind of record: looks take
# seven tenths of such short trainings.
LOOKED_AT = {"exact", "hutch++", "users", "adapters", "words, tied", "language, checkpointed"}
Loss = Callable[[nn.Module, Any], Tensor]


def four_steps(
    model: nn.Module,
    records: list[Any],
    loss: Loss,
    changes: dict[str, Any],
    name: str,
    together: int = 1,
    before_step: Callable[[], None] = lambda: None,
    looked_at: Collection[str] = LOOKED_AT,
) -> dict[str, Any]:
    """What was released, what became of the weights, and how many examples were here.

    Args:
        model: as this rank has it.
        records, loss: of all ranks.
        changes: of the usual plan.
        name: of the variant: whether guards look; in "users" three records each are somebody's.
        together: ranks that share records.
        before_step: called between each release and the optimiser's step.
        looked_at: variants at which guards look.
    """
    users = name == "users"
    owner = [i // 3 for i in range(RECORDS)] if users else None
    plan = plan_of(owner=owner, **(changes | ({"expected_batch_size": 5} if users else {})))
    looks = contextlib.nullcontext() if name in looked_at else without_looks()
    trained = [p for p in model.parameters() if p.requires_grad]
    # Torch's grouped kernels take no mixture of whole and cut parameters.
    optimizer = torch.optim.Adam(trained, lr=0.05, foreach=False)
    average = ExponentialAverage(model, 0.9)
    released, beside, held = [], [], []
    with looks, groups_of_its_own(), plan.start(tensor_parallel=together) as run:
        for batch in run.loader(records, steps=4, physical_batch_size=3):
            noisy = run.backward(model, loss, batch)
            held.append(run._open.examples)
            before_step()
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


def part_of_a_run(
    model: nn.Module,
    records: list[Any],
    loss: Loss,
    plan: PrivacyPlan,
    folder: Path,
    until: int,
    ranks: int,
    together: int = 1,
) -> dict[str, Any]:
    """Goes on from the folder's newest checkpoint, where there is one, to a release; and saves. On
    two ranks guards look.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    average = ExponentialAverage(model, 0.9)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "average": average.state_dict()}

    for path in sorted(folder.glob("checkpoint*"))[-1:]:
        found = state()
        dcp.load(found, checkpoint_id=str(path), no_dist=ranks == 1)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        average.load_state_dict(found["average"])
    looks = contextlib.nullcontext() if ranks == 2 else without_looks()
    place = folder / "ledger.jsonl", folder / "keys.json"
    with looks, plan.start(*place, tensor_parallel=together) as run:
        steps = until - run.released
        for batch in run.loader(records, steps=steps, physical_batch_size=3):
            run.backward(model, loss, batch)
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            if run.released == until:
                break
    dcp.save(state(), checkpoint_id=str(folder / f"checkpoint{until}"), no_dist=ranks == 1)
    return {
        "weights": whole(model.named_parameters()),
        "average": whole(average.state_dict()["averages"]),
    }
