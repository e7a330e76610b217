"""The contract of a run under attack: several processes, forks, threads of a launcher and copies of
a run. Each attack that a protection stops is also run with the protection off, where it has to
succeed.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attacks.contract import at, data, loss, model_of, opened, plan_of
from quietgrad.clipping import Clipper, clipped_gradients
from quietgrad.clipping import bound as clipping_engine
from quietgrad.clipping.soundness.processes import on_public_records, refuse_launcher
from quietgrad.distributed import team
from quietgrad.ledger import LedgerWriter
from quietgrad.plan import run
from quietgrad.plan.process import BoundToProcess

# Several processes


def meet(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    refused = []

    def attempt(what: Callable[[], Any]) -> None:
        try:
            what()
            refused.append("")
        except RuntimeError as error:
            refused.append(str(error))

    started = plan_of().start()  # before the group is there
    indices = next(started.batches())
    clipped = started.clip(model_of(), loss, at(indices))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        attempt(lambda: started.clip(model_of(), loss, at(indices)))
        attempt(lambda: started.contribution({"w": torch.ones(2)}))
        attempt(lambda: started.release(clipped))
        attempt(lambda: started.step(model_of(), loss, at(indices)))
        attempt(lambda: Clipper(1.0).clip(model_of(), loss, data()))
        attempt(lambda: clipped_gradients(model_of(), loss, data(), 1.0))
        wrapped = nn.parallel.DistributedDataParallel(model_of())
    finally:
        torch.distributed.destroy_process_group()
    try:
        Clipper(1.0).clip(wrapped, loss, data())
    except ValueError as error:
        refused.append(str(error))
    Path(folder, f"rank{rank}.txt").write_text("\n".join(refused) + f"\n{started.released}")


@pytest.mark.distributed
def test_a_run_of_one_process_is_shut_under_a_group_of_two(tmp_path: Path) -> None:
    # Forked: a spawned process would import torch again, for six seconds.
    torch.multiprocessing.start_processes(meet, (str(tmp_path),), nprocs=2, start_method="fork")
    for rank in range(2):
        *refused, wrapped, released = (tmp_path / f"rank{rank}.txt").read_text().splitlines()
        assert len(refused) == 6
        assert all(
            "process group of 2 ranks" in message and "one process" in message
            for message in refused
        )
        assert "DistributedDataParallel" in wrapped and released == "0"


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_is_one_process() -> None:
    private, indices = opened()
    private.step(model_of(), loss, at(indices))
    assert private.released == 1


@pytest.mark.usefixtures("group_of_one")
def test_what_public_records_allow_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: after one measurement on public records no process group was refused any more."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with on_public_records():
        clipped_gradients(model_of(), loss, data(), 1.0)
    with contextlib.suppress(KeyError), on_public_records():
        raise KeyError
    with pytest.raises(RuntimeError, match="process group of 2 ranks"):
        clipped_gradients(model_of(), loss, data(), 1.0)


@pytest.mark.usefixtures("group_of_one")
def test_without_the_check_two_ranks_would_both_release(monkeypatch: pytest.MonkeyPatch) -> None:
    private, indices = opened()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(RuntimeError, match="process group of 2 ranks"):
        private.step(model_of(), loss, at(indices))
    for module in (team, run, clipping_engine):
        monkeypatch.setattr(module, "refuse_process_group", lambda: None)
    private.step(model_of(), loss, at(indices))
    assert private.released == 1


@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_one_of_several_processes_of_a_launcher_starts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun without init_process_group: every rank would train alone, on the same records.
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        RuntimeError, match=rf"{name}=2 says .*their epsilons add: start one run .*one process"
    ):
        plan_of().start()
    for alone in ("1", "", "many"):
        refuse_launcher({name: alone})


def test_models_spread_over_devices_are_refused() -> None:
    private, indices = opened()
    for wrapped in (nn.DataParallel(model_of()), nn.Sequential(nn.DataParallel(model_of()))):
        with pytest.raises(ValueError, match=r"is wrapped in DataParallel, .*\.module"):
            private.clip(wrapped, loss, at(indices))


# Copies of a run


def as_child(what: Callable[[], Any]) -> str:
    """What ``what`` does in a fork: the message of what it raised, or "done"."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = b"done"
        try:
            what()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode()
        os.write(writer, said)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        message = said.read().decode()
    os.waitpid(child, 0)
    return message


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
# torch's own threads are idle in these tests; Python warns of any thread since 3.12.
quiet_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@forks
@quiet_fork
def test_a_fork_that_got_the_number_of_its_parent_is_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number)  # numbers come round again
    private, _ = opened()
    assert as_child(private.keep_noise).startswith("RuntimeError: this run was started in another")
    private.keep_noise()


@forks
@quiet_fork
def test_a_fork_of_a_run_draws_nothing(tmp_path: Path) -> None:
    # The difference of the parent's and the child's release was the data, exactly.
    with plan_of().start(tmp_path / "ledger.jsonl") as private:
        batches = private.batches()
        indices = next(batches)
        while len(indices) < 2:
            private.step(model_of(), loss, at(indices))
            indices = next(batches)
        clipped = private.clip(model_of(), loss, at(indices))
        before = (tmp_path / "ledger.jsonl").read_bytes()
        for attempt in (
            lambda: private.release(clipped),
            lambda: private.clip(model_of(), loss, at(indices)),
            lambda: private.step(model_of(), loss, at(indices)),
            lambda: private.contribution({"w": torch.ones(2)}),
            lambda: next(private.batches()),
            lambda: private.give_up_privacy("in the child"),
        ):
            assert "RuntimeError: this run was started in another process" in as_child(attempt)
        assert (tmp_path / "ledger.jsonl").read_bytes() == before
        private.release(clipped)


@forks
@quiet_fork
def test_without_the_process_check_parent_and_child_share_their_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(BoundToProcess, "_require_own_process", lambda self: None)
    private, indices = opened()
    clipped, file = private.clip(model_of(), loss, at(indices)), tmp_path / "child.pt"
    nothing = private.contribution(
        {"weight": torch.zeros(len(indices), 3, 5), "bias": torch.zeros(len(indices), 3)},
        len(indices),
    )
    assert as_child(lambda: torch.save(private.release(nothing).gradients, file)) == "done"
    ours = private.release(clipped).gradients
    theirs = torch.load(file)
    for name, gradient in clipped.gradients.items():
        torch.testing.assert_close(
            ours[name] - theirs[name], gradient, rtol=1e-4, atol=1e-5
        )  # the data, exactly


@forks
@quiet_fork
def test_workers_that_load_records_may_be_forked_while_a_run_is_open() -> None:
    private, indices = opened()
    x, y = data()
    records = torch.utils.data.Subset(torch.utils.data.TensorDataset(x, y), indices.tolist())
    loader = torch.utils.data.DataLoader(
        records,
        batch_size=4,
        num_workers=1,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    parts = [private.clip(model_of(), loss, (part[0], part[1])) for part in loader]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    private.release(total)
    assert private.released == 1


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of what holds it": lambda private: copy.deepcopy({"trainer": [private]}),
    "pickle": pickle.dumps,
    "old pickle": lambda private: pickle.dumps(private, protocol=0),
    "torch.save": lambda private: torch.save(private, os.devnull),
    "spawned process": lambda private: (
        multiprocessing.get_context("spawn").Process(target=print, args=(private,)).start()
    ),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_run_is_not_copied(way: str) -> None:
    private, indices = opened()
    with pytest.raises(
        TypeError,
        match="PrivateRun cannot be copied or pickled: the copy would draw the same noise",
    ):
        COPIES[way](private)
    private.step(model_of(), loss, at(indices))


def test_without_the_refusal_a_copy_repeats_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__copy__", "__deepcopy__", "__reduce_ex__", "__getstate__"):
        monkeypatch.delattr(BoundToProcess, name)
    private, indices = opened()
    other = copy.copy(private)
    clipped = private.clip(model_of(), loss, at(indices))
    nothing = private.contribution(
        {"weight": torch.zeros(len(indices), 3, 5), "bias": torch.zeros(len(indices), 3)},
        len(indices),
    )
    ours, theirs = private.release(clipped).gradients, other.release(nothing).gradients
    for name, gradient in clipped.gradients.items():
        torch.testing.assert_close(ours[name] - theirs[name], gradient, rtol=1e-4, atol=1e-5)


def test_secret_roots_are_not_pickled_or_copied_by_accident() -> None:
    private, _ = opened()
    for secret in (private._session.key, private._session._ring):
        with pytest.raises(TypeError, match="secret"):
            pickle.dumps(secret)
        with pytest.raises(TypeError, match="secret"):
            copy.deepcopy(secret)


def test_an_open_ledger_is_not_copied(tmp_path: Path) -> None:
    with LedgerWriter(tmp_path / "ledger.jsonl") as writer:
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                way(writer)
