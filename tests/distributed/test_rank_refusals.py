"""What ranks refuse: what is not one run, and what nobody could account for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed.sharding import sharded
from distributed.world import RECORDS, loss, model_of, on_ranks, plan_of, records_of
from plans import changed
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from quietgrad import PrivacyConfig
from quietgrad.beside import AdaptiveClipping
from quietgrad.clipping import Clipper
from quietgrad.distributed import shares
from quietgrad.ledger import read_ledger
from quietgrad.plan import starting

pytestmark = pytest.mark.distributed
AT_ONCE = 20.0  # seconds: far below the group's timeout


def at(indices: Any) -> dict[str, torch.Tensor]:
    rows = [records_of()[int(i)] for i in indices]
    if not rows:
        return {name: value[None][:0] for name, value in records_of(1)[0].items()}
    return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}


def said(what: Callable[[], Any]) -> str:
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_step(run: Any, model: nn.Module, batch: Any = None) -> None:
    indices = next(run.batches())
    run.backward(model, loss, at(indices) if batch is None else batch(indices))


def differing_starts(rank: int) -> dict[str, str]:
    """Every start in which the ranks are not of one run."""
    base = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=10, steps=4)
    found = {}

    def start(name: str, **changes: Any) -> None:
        plan = changed(base, **(changes if rank else {})).build(RECORDS)
        found[name] = said(plan.start)

    start("mechanism", noise_multiplier=1.1)
    start("clipping", estimator="hutch")
    start("seed", seed=3, data_are_public=True)
    found["records"] = said(base.build(RECORDS + rank).start)
    found["same"] = said(base.build(RECORDS).start)
    return found


def test_ranks_that_differ_start_nothing(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, differing_starts):
        assert found.pop("same") == ""
        assert set(found) == {"mechanism", "clipping", "seed", "records"}
        for name, message in found.items():
            assert message.startswith("RuntimeError: ranks 0 and 1 differ in"), (name, message)
            assert "plan" in message or "seed" in message


def failing_starts(rank: int, folder: str) -> dict[str, str]:
    """What one rank alone cannot begin with, each followed by a start that all can."""
    found = {}

    def start(name: str, plan: Any, *given: Any, **named: Any) -> None:
        began = time.monotonic()
        found[name] = said(lambda: plan.start(*given, **named))
        assert time.monotonic() - began < AT_ONCE

    start("a divisor", plan_of(), tensor_parallel=2 + rank)
    start("a number", plan_of(), tensor_parallel="2" if rank else 2)
    start("a path", plan_of(), Path(folder, "a.jsonl"), keys=0 if rank else Path(folder, "k.json"))
    if rank:
        os.environ["WORLD_SIZE"] = "4"
    start("a launcher", plan_of())
    os.environ.pop("WORLD_SIZE", None)
    with pytest.MonkeyPatch.context() as patch:
        if not rank:
            patch.setattr(starting, "NoiseSession", _no_memory)
        start("a session", plan_of(), Path(folder, "b.jsonl"))
    start("none", plan_of(), Path(folder, "b.jsonl"))
    return found


def _no_memory(*_: Any) -> None:
    raise RuntimeError("there is no memory")


def test_what_one_rank_refuses_alone_is_told_to_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, failing_starts, str(tmp_path))
    told = "RuntimeError: rank 1 could not start the run: "
    for name, kind, text in (
        ("a divisor", "ValueError", "tensor_parallel=3 with 2 ranks"),
        ("a number", "TypeError", "tensor_parallel"),
        ("a path", "TypeError", ""),
        ("a launcher", "RuntimeError", "WORLD_SIZE=4 says that this is one of several"),
    ):
        assert second[name].startswith(f"{kind}: ") and text in second[name], second
        assert first[name] == told + second[name].removeprefix(f"{kind}: ")
    assert first["a session"] == "RuntimeError: there is no memory"
    assert second["a session"] == told.replace("1", "0") + "there is no memory"
    assert first["none"] == second["none"] == ""  # and no ledger is left locked


def differing_work(rank: int, folder: str) -> dict[str, str]:
    """Runs of two ranks that do not do the same; each ends at the first difference."""
    found = {}

    def attempt(name: str, work: Callable[[Any, nn.Module], None], ledger: bool = False) -> None:
        model, place = model_of(), Path(folder, f"{name}.jsonl")
        run = plan_of().start(place if ledger else None)
        found[name] = said(lambda: work(run, model))
        found[f"{name}, after"] = said(lambda: one_step(run, model_of()))
        found[f"{name}, released"] = str(run.released)
        dist.barrier()

    def other_weights(run: Any, model: nn.Module) -> None:
        if rank:
            with torch.no_grad():
                model[0].bias[1] += 1e-9
        one_step(run, model)

    def other_parameters(run: Any, model: nn.Module) -> None:
        model[0].bias.requires_grad_(rank == 0)
        one_step(run, model)

    def other_precision(run: Any, model: nn.Module) -> None:
        def in_its_own(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
                return loss(model, {name: t.float() for name, t in batch.items()})

        model.float()
        run.backward(model, in_its_own, at(next(run.batches())))

    def whole_batch_on_each(run: Any, model: nn.Module) -> None:
        shares.share_of = lambda whole, *_: whole  # type: ignore[assignment]
        try:
            one_step(run, model)
        finally:
            shares.share_of = SHARE

    def one_on_neither(run: Any, model: nn.Module) -> None:
        shares.share_of = lambda whole, *place: SHARE(whole[1:], *place)  # type: ignore[assignment]
        try:
            one_step(run, model)
        finally:
            shares.share_of = SHARE

    def one_more_record(run: Any, model: nn.Module) -> None:
        one_step(run, model, lambda indices: at([*indices, 0] if rank else indices))

    def shuffled(run: Any, model: nn.Module) -> None:
        order = np.random.default_rng(rank).permutation(RECORDS) if rank else range(RECORDS)
        run.loader([records_of()[int(i)] for i in order])

    def shuffled_later(run: Any, model: nn.Module) -> None:
        given = records_of()
        loader = run.loader(given, steps=1)
        if rank:
            given.reverse()
        for batch in loader:
            run.backward(model, loss, batch)

    def changing(run: Any, model: nn.Module) -> None:
        run.loader(_Changing())

    def other_cut(run: Any, model: nn.Module) -> None:
        run.loader(records_of(), physical_batch_size=2 + rank)

    def other_steps(run: Any, model: nn.Module) -> None:
        run.loader(records_of(), steps=2 + rank, physical_batch_size=2)

    def bad_loss(run: Any, model: nn.Module) -> None:
        indices = next(run.batches())
        wrong = loss if rank == 0 else lambda m, b: loss(m, b).sum()
        run.backward(model, wrong, at(indices))

    def own_error(run: Any, model: nn.Module) -> None:
        with run:
            if rank:
                raise KeyError("a mistake in the user's loop")
            one_step(run, model)

    def no_ledger(run: Any, model: nn.Module) -> None:
        if run._writer is not None:
            run._writer._broken = "the disk is full"
        one_step(run, model)

    for work in (
        other_weights,
        other_parameters,
        other_precision,
        whole_batch_on_each,
        one_on_neither,
        one_more_record,
        shuffled,
        shuffled_later,
        changing,
        other_cut,
        other_steps,
        bad_loss,
        own_error,
    ):
        attempt(work.__name__, work)
    attempt("no_ledger", no_ledger, ledger=True)
    return found


SHARE = shares.share_of


class _Changing:
    """Records that are others at every reading."""

    def __init__(self) -> None:
        self._noise = np.random.default_rng(dist.get_rank())  # each rank its own

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        noise = self._noise.normal(size=6)
        return {"x": torch.from_numpy(noise), "y": records_of(1)[0]["y"]}


def test_ranks_that_do_not_work_alike_release_nothing(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, differing_work, str(tmp_path))
    assert all(isinstance(of_rank, dict) for of_rank in found), found
    expected = {
        "other_weights": "the ranks differ in weights",
        "other_parameters": "the ranks differ in parameters",
        "other_precision": "the ranks differ in precision",
        "whole_batch_on_each": "do not hold as many records as the batch",
        "one_on_neither": "do not hold as many records as the batch",
        "shuffled": "the ranks differ in records",
        "shuffled_later": "the ranks differ in records",
        "changing": "the ranks differ in records",
        "other_cut": "the ranks differ in shares",
        "other_steps": "with the same physical_batch_size and steps",
        "no_ledger": "the disk is full",
    }
    for of_rank in found:
        for name, text in expected.items():
            assert text in of_rank[name], (name, of_rank[name])
        # Nothing was released by any of them, and nothing is afterwards.
        names = [name for name in of_rank if "," not in name]
        assert len(names) == 14
        for name in names:
            assert of_rank[f"{name}, released"] == "0", name
            assert of_rank[f"{name}, after"], name
    # One rank's own mistake: it is said there, and stops the other.
    for name, own in {
        "one_more_record": "does not hold as many records as the open batch",
        "bad_loss": "",
        "own_error": "a mistake in the user's loop",
    }.items():
        assert own in found[1][name] and "rank 1 stopped" in found[0][name], (name, found[0][name])
    assert read_ledger(tmp_path / "no_ledger.jsonl").releases == 0


def moved_later(rank: int) -> tuple[str, int]:
    """Weights that are alike at the first release, and not at the second, which is looked at."""
    model = model_of()
    with plan_of().start() as run:
        for indices in run.batches():
            if run.released and rank:
                with torch.no_grad():
                    model[0].bias[1] += 1e-9
            try:
                run.backward(model, loss, at(indices))
            except RuntimeError as error:
                return str(error), run.released
    return "", run.released


def test_weights_that_come_to_differ_after_a_release_are_refused(tmp_path: Path) -> None:
    """A mutant compared those of the first release alone."""
    for said, released in on_ranks(2, tmp_path, moved_later):
        assert "the ranks differ in weights" in said and released == 1


def other_norm(rank: int) -> tuple[str, int]:
    """A clipping norm that follows what is released, and that one rank has lost."""
    with plan_of(adaptive_clipping=AdaptiveClipping()).start() as run:
        run._beside.max_grad_norm *= 1 + rank
        try:
            one_step(run, model_of())
        except RuntimeError as error:
            return str(error), run.released
    return "", run.released


def test_ranks_that_clip_to_other_norms_release_nothing(tmp_path: Path) -> None:
    """The noise of a parameter is that of its owner's norm."""
    for said, released in on_ranks(2, tmp_path, other_norm):
        assert "the ranks differ in claim" in said and released == 0


def shut_doors(rank: int) -> dict[str, str]:
    """What is for one process alone."""
    found = {}
    model = model_of()
    run = plan_of().start()
    indices = next(run.batches())
    found["contribution"] = said(lambda: run.contribution({"w": torch.ones(2)}))
    found["inspection"] = said(lambda: run.give_up_privacy("to look"))
    found["clipper"] = said(lambda: Clipper(1.0).clip(model, loss, at(indices)))
    wrapped = nn.parallel.DistributedDataParallel(model)
    closed_over = said(lambda: run.backward(wrapped, lambda m, b: loss(wrapped, b), at(indices)))
    found["wrapper in the loss"] = closed_over

    def of(wrapped: nn.Module) -> str:
        with plan_of().start() as started:
            return said(lambda: one_step(started, wrapped))

    # Where torch sends the shards from rank to rank it refuses them itself.
    even = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2), nn.Linear(2, 4)).double()
    found["copies of shards"] = of(
        nn.parallel.DistributedDataParallel(sharded(even), init_sync=False)
    )
    found["flat"] = of(FullyShardedDataParallel(model_of(), device_id=torch.device("cpu")))
    part = model_of()
    part[0] = FullyShardedDataParallel(part[0], device_id=torch.device("cpu"))
    found["flat in part"] = of(part)
    return found


def test_what_is_for_one_process_is_refused_by_name(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, shut_doors):
        assert isinstance(found, dict), found
        for name in ("contribution", "inspection", "clipper"):
            assert "process group of 2 ranks" in found[name], (name, found[name])
        assert "DistributedDataParallel wrapper" in found["wrapper in the loss"]
        assert "leave DistributedDataParallel out" in found["copies of shards"]
        assert "the model is wrapped in FullyShardedDataParallel (FSDP1)" in found["flat"]
        assert "layer '0' is wrapped in FullyShardedDataParallel" in found["flat in part"]
