"""What travels between ranks while records are clipped, and what is left where an exchange breaks
off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import world
from distributed.world import loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from quietgrad.distributed import exchange, together, wrapping
from quietgrad.distributed.groups.failing import (
    require_to_end_at_failures,
    setting_that_goes_on,
)
from quietgrad.distributed.groups.patience import patience
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.distributed

SEND = dist.ProcessGroup.send


def heard(rank: int) -> dict[str, tuple[str, int]]:
    """A loss that hears once of the other rank's records, before the guard looks: to every pass of
    the guard it is a constant.
    """
    group = dist.new_group(backend="gloo")

    def tell(mean: Tensor, way: str) -> None:
        if way != "send":
            dist.all_reduce(mean, group=group if way == "own group" else None)
        elif rank == 0:
            dist.send(mean, 1)
        else:
            dist.recv(mean, 0)

    def attempt(way: str) -> tuple[str, int]:
        kept: list[Tensor] = []

        def hearing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            if not kept:
                kept.append(batch["x"].detach().mean().tanh().reshape(1))
                tell(kept[0], way)
            return loss(model, batch) * (2 + kept[0])

        with plan_of(sample_rate=1.0, expected_batch_size=None).start() as run:
            try:
                for batch in run.loader(records_of(), steps=1, physical_batch_size=20):
                    run.backward(model_of(), hearing, batch)
            except (ValueError, RuntimeError) as error:
                return str(error), run.released
        return "", run.released

    return {way: attempt(way) for way in ("all_reduce", "own group", "send")}


def test_a_loss_that_hears_of_other_ranks_is_refused(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, heard):
        assert isinstance(found, dict), found
        for message, released in found.values():
            assert "exchanges tensors with other ranks" in message, message
            assert released == 0


def heard_by_nccl(rank: int) -> dict[str, tuple[str, int]]:
    """The same, where groups number nothing that is a message, as NCCL's do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrapping, "_numbered", lambda known: 0)
        found = heard(rank)
    assert dist.ProcessGroup.send is SEND
    return found


def test_messages_are_seen_that_a_group_does_not_number(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, heard_by_nccl):
        assert isinstance(found, dict), found
        message, released = found["send"]
        assert "exchanges tensors with other ranks" in message and released == 0
        # Which is seen by its number alone.
        assert "exchanges tensors with other ranks" not in found["all_reduce"][0]


def another_group(rank: int, folder: str) -> tuple[str, int]:
    """The group is destroyed under the run, and another of the same size comes, its ranks changed
    round: the first rank is now the one without the ledger.
    """
    model = model_of()
    with plan_of().start(Path(folder, "ledger.jsonl")) as run:
        try:
            for batch in run.loader(records_of(), steps=2):
                run.backward(model, loss, batch)
                dist.destroy_process_group()
                meeting = f"file://{folder}/again"
                dist.init_process_group("gloo", init_method=meeting, rank=1 - rank, world_size=2)
        except RuntimeError as error:
            return str(error), run.released
    return "", run.released


def test_another_group_of_the_same_size_is_refused_before_the_ledgers_line(tmp_path: Path) -> None:
    for message, released in on_ranks(2, tmp_path, another_group, str(tmp_path)):
        assert "the process group is another one" in message, message
        assert released == 1
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 1


@pytest.mark.parametrize("which", ["sums", "released"])
def test_what_did_not_arrive_is_zero_and_not_memory(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an NCCL operation that was aborted on its stream: nothing arrives, no error yet."""
    empty: Callable[..., Tensor] = Tensor.new_empty

    def used(like: Tensor, *size: Any, **options: Any) -> Tensor:
        return empty(like, *size, **options).fill_(1e9)

    monkeypatch.setattr(Tensor, "new_empty", used)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: None)
    sums = {"w": torch.ones(5), "b": torch.ones(3)}
    owner = exchange.owners_of({"w": 5, "b": 3}, 2)
    group: Any = None
    if which == "sums":
        found = exchange.sums_of_owner(sums, owner, 0, 2, group)
        assert set(found) == {"w"}
    else:
        found = exchange.gathered({"w": sums["w"]}, sums, owner, 0, 2, group)
        assert set(found) == {"w", "b"}
    assert all(not bool(t.any()) for t in found.values())


def timeouts(rank: int, folder: str) -> list[float]:
    """Seconds that the groups of a run wait, and those of a command, after a script asked for two
    hours; and what is handed on before it did.
    """
    found = [patience() is None]
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/again",
        rank=rank,
        world_size=2,
        timeout=timedelta(hours=2),
    )
    known = set(dist.distributed_c10d._world.pg_map)
    with plan_of().start() as run:
        run.loader(records_of())
        together.here()
    made: list[Any] = [g for g in dist.distributed_c10d._world.pg_map if g not in known]
    waits = [g._get_backend(torch.device("cpu")).options._timeout for g in made]
    return [*found, *(wait.total_seconds() for wait in waits)]


def test_groups_of_a_run_wait_as_long_as_the_scripts(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, timeouts, str(tmp_path)):
        assert found == [True, 7200.0, 7200.0], found


@pytest.mark.parametrize(
    ("known", "refused"),
    [
        ({}, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_ASYNC_ERROR_HANDLING": "0"}, False),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, True),
        ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "20"}, False),
        # torch reads the number that a value begins with
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "02"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": " +2 # clean up"}, True),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0x3"}, True),
    ],
)
def test_a_process_that_would_go_on_after_a_failure_under_nccl_is_refused(
    known: dict[str, str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    assert setting_that_goes_on(known) == ""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    with pytest.raises(RuntimeError, match="unset it") if refused else contextlib.nullcontext():
        require_to_end_at_failures(["", setting_that_goes_on(known)])


def test_a_run_on_ranks_asks_how_a_failure_ends(tmp_path: Path) -> None:
    """On one rank alone: the others do not wait for it."""
    for told in on_ranks(2, tmp_path, started_as_if_under_nccl):
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=2 on rank 1" in told and "gloo" in told


def started_as_if_under_nccl(rank: int) -> str:
    known = str(dist.get_backend_config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        if rank == 1:
            patch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        with pytest.raises(RuntimeError, match="after a collective operation") as refused:
            plan_of().start()
    return f"{refused.value} ({known})"


def test_groups_of_a_mesh_are_asked_too(tmp_path: Path) -> None:
    """Where the default group has gloo alone, and whether the mesh is there at the start or not."""
    for told in on_ranks(2, tmp_path, with_a_mesh_as_if_under_nccl):
        for name in ("before", "after", "checked"):
            heard = "rank 1 stopped" in told[name]  # in the middle of a run
            assert heard or "TORCH_NCCL_ASYNC_ERROR_HANDLING=2 on rank 1" in told[name], told
        assert "HANDLING=2" in told["before"]


def with_a_mesh_as_if_under_nccl(rank: int) -> dict[str, str]:
    own, told = dist.get_backend_config, {}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        runs = [plan_of().start(), plan_of().start()]
        theirs: Any = dist.new_group(backend="gloo")
        model = model_of()
        fully_shard(model, mesh=DeviceMesh.from_group(theirs, "cpu"))
        patch.setattr(dist, "get_backend_config", lambda g: "cuda:nccl" if g is theirs else own(g))
        batch = {name: torch.stack([r[name] for r in records_of(2)]) for name in ("x", "y")}
        with pytest.raises(RuntimeError) as refused:
            next(runs[0].batches())
            runs[0].backward(model, loss, batch)
        told["after"] = str(refused.value)
        with pytest.raises(RuntimeError) as refused:
            runs[1].check(model, loss, batch)
        told["checked"] = str(refused.value)
        with pytest.raises(RuntimeError) as refused:
            plan_of().start()
        told["before"] = str(refused.value)
    return told


def test_a_rank_that_alone_waits_for_the_others_ends_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A functional collective in the loss of one rank. Nobody sees it before the group's timeout:
    the other rank is at its agreement, as it may be beside one with more records.
    """
    monkeypatch.setattr(world, "SECONDS", 5)
    first, second = on_ranks(2, tmp_path, alone_in_a_collective, str(tmp_path))
    assert first[0].startswith("rank 0 lost another rank") and "pair closure" not in first[0]
    assert "(nothing came of it until the timeout)" in first[0]
    assert second[0].startswith("rank 0 stopped after an error of its own")
    for _, released in (first, second):
        assert released == 0
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 0


def alone_in_a_collective(rank: int, folder: str) -> tuple[str, int]:
    def hearing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = loss(model, batch)
        if rank == 0:
            heard = all_reduce(losses.detach().mean(), "sum", dist.group.WORLD)  # type: ignore[arg-type]
            losses = losses + 0 * heard
        return losses

    with plan_of().start(Path(folder, "ledger.jsonl")) as run:
        try:
            for batch in run.loader(records_of(), physical_batch_size=3):
                run.backward(model_of(), hearing, batch)
        except RuntimeError as error:
            return str(error), run.released
    return "", run.released
