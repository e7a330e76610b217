"""Ranks with other code: another loss, or another model, is refused on all ranks by name. (Where
their passes meet, gloo ended the processes; elsewhere they trained on.)
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import PLANS, cut, model_named
from distributed.sharding import sharded
from distributed.world import loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from quietgrad.distributed.compared.code import code_of

pytestmark = pytest.mark.distributed


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Passes through the model twice."""
    return loss(model, batch) + loss(model, batch)


def with_a_log(model: nn.Module, batch: dict[str, Tensor], log: list[int] | None = None) -> Tensor:
    if log is not None:
        log.append(1)
    return loss(model, batch)


class Reordered(nn.Sequential):
    """The same layers, called in another way."""

    def forward(self, x: Tensor) -> Any:
        for layer in list(self):
            x = layer(x)
        return x


def other(rank: int) -> nn.Module:
    model = model_of()
    return Reordered(*model) if rank else model


def attempt(model: nn.Module, of: Any, together: int = 1, check: bool = False) -> tuple[str, int]:
    with plan_of().start(tensor_parallel=together) as run:
        try:
            if check:
                few = records_of(4)
                run.check(model, of, {n: torch.stack([r[n] for r in few]) for n in ("x", "y")})
            for batch in run.loader(records_of(), steps=2, physical_batch_size=8):
                run.backward(model, of, batch)
        except (ValueError, RuntimeError) as error:
            return str(error), run.released
        return "", run.released


def other_code(rank: int) -> dict[str, tuple[str, int]]:
    of = twice if rank else loss
    found = {
        "whole, loss": attempt(model_of(), of),
        "whole, model": attempt(other(rank), loss),
        "sharded, loss": attempt(sharded(model_of()), of),
        "sharded, model": attempt(sharded(other(rank)), loss),
        "sharded, checked, loss": attempt(sharded(model_of()), of, check=True),
        "sharded otherwise, model": attempt(
            sharded(model_of()) if rank else fully_shard(model_of()), loss
        ),
        "cut, loss": attempt(cut(model_named("bottleneck"), PLANS["bottleneck"]), of, together=2),
    }
    log: list[int] = []
    told = functools.partial(with_a_log, log=log if rank else None)
    found["sound"] = attempt(model_of(), told)
    return found


def test_ranks_with_other_code_are_refused_before_a_pass(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, other_code):
        assert isinstance(found, dict), found
        assert found.pop("sound") == ("", 2)
        for name, (message, released) in found.items():
            what = "loss function" if name.endswith("loss") else "model"
            assert f"the ranks differ in {what} (ranks 0 and 1)" in message, (name, message)
            assert "one version of your code" in message and released == 0


def test_what_is_a_rank_s_own_is_not_compared() -> None:
    def made(rank: int) -> Any:
        log: list[int] = []

        def of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            log.append(rank)
            return twice(model, batch) if "x" in {"x", "y"} else loss(model, batch)

        return of

    assert code_of(model_of(), made(0)) == code_of(model_of(), made(1))
    inner = [code_of(model_of(), calling(of))["loss function"] for of in (loss, twice)]
    assert inner[0] != inner[1]  # a function that it closes over


def calling(of: Any) -> Any:
    return lambda model, batch: of(model, batch)
