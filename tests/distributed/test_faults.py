"""A rank that is killed: the others stop, the ledger counts every noise that was drawn, and a start
on any number of ranks goes on.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from distributed.world import _enter, flat, loss, model_of, on_ranks, plan_of, records_of
from torch import Tensor

from quietgrad.distributed.ranks import Ranks
from quietgrad.ledger import read_ledger
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.plan import starting

pytestmark = pytest.mark.distributed

STEPS = 6


def train(rank: int, folder: str, killed: tuple[int, int, str] | None = None) -> Tensor:
    """Trains to the end, from the last checkpoint of the first rank; ``killed`` says which rank at
    which release, and where in it. Every draw of noise is noted in a file.
    """
    place = Path(folder)
    draw = KeyedSource.normal

    def note(self: Any, like: Any, key: Any, step: int, name: str, scale: float = 1.0) -> Tensor:
        with open(place / f"drawn{rank}.txt", "a") as file:
            file.write(f"{step}\n")
            file.flush()
        return draw(self, like, key, step, name, scale)

    KeyedSource.normal = note  # type: ignore[method-assign]
    if killed is not None and killed[0] == rank:
        _die_at(killed[1], killed[2])
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    saved = place / "checkpoint.pt"
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    with plan_of(steps=STEPS, bands=2).start(place / "ledger.jsonl", place / "keys.json") as run:
        assert run.released >= done
        for batch in run.loader(records_of(), steps=STEPS, physical_batch_size=3):
            run.backward(model, loss, batch)
            optimizer.step()
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": run.released}, place / "writing.pt")
                os.replace(place / "writing.pt", saved)
    return flat(dict(model.named_parameters()))


def _die_at(release: int, where: str) -> None:
    """This process kills itself, as the machine would."""
    name = {"before": "agree", "after the word": "summed", "after the noise": "gathered"}[where]
    own = getattr(Ranks, name)
    calls = [0]

    def once(self: Any, *arguments: Any) -> Any:
        calls[0] += name != "agree" or arguments[0] == "release"
        if calls[0] == release + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, *arguments)

    setattr(Ranks, name, once)


def killed_run(folder: Path, which: int, release: int, where: str) -> list[str | None]:
    """What became of two ranks, one of which is killed."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    arguments = (str(folder), (which, release, where))
    processes = [
        context.Process(target=_enter, args=(rank, 2, str(folder), train, arguments))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert not any(process.is_alive() for process in processes)
    assert processes[which].exitcode == -signal.SIGKILL
    (folder / "meeting").unlink()
    found = folder / f"found{1 - which}.pt"
    return [None if r == which else torch.load(found, weights_only=False) for r in range(2)]


def drawn_in(folder: Path) -> int:
    """How many releases had noise drawn."""
    steps = [int(line) for path in folder.glob("drawn*.txt") for line in path.read_text().split()]
    return max(steps, default=-1) + 1


@pytest.mark.parametrize(
    ("which", "release", "where"),
    [
        (1, 2, "before"),
        (0, 1, "before"),
        (1, 3, "after the word"),
        (0, 3, "after the noise"),
    ],
)
def test_a_rank_that_is_killed_stops_the_others_and_the_ledger_counts_its_noise(
    which: int, release: int, where: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    found = killed_run(folder, which, release, where)
    message = str(found[1 - which])
    assert "lost another rank" in message and "gloo" not in message, message
    # What to do is said last, and gloo's words in short.
    assert "(its connection was closed)" in message and message.endswith(
        "load the weights that were saved last, start all ranks again, and the run goes on from "
        "its ledger"
    )
    assert "/gloo/" in (folder / f"traceback{1 - which}.txt").read_text()  # as its cause
    counted = read_ledger(folder / "ledger.jsonl").releases
    assert counted >= drawn_in(folder)
    assert counted == release + (where != "before")
    # On another number of ranks it goes on, and makes no more releases than planned.
    size = 1 if which else 3
    ended = on_ranks(size, folder, train, str(folder))
    assert all(isinstance(weights, Tensor) for weights in ended), ended
    assert all(torch.equal(weights, ended[0]) for weights in ended)
    assert read_ledger(folder / "ledger.jsonl").releases == STEPS
    if where == "before":  # nothing was lost: the end is that of a run that nothing stopped
        (tmp_path / "whole").mkdir()
        (whole,) = on_ranks(1, tmp_path / "whole", train, str(tmp_path / "whole"))
        assert torch.equal(ended[0], whole)


def secret_places(rank: int, folder: str) -> list[str]:
    """A run with a root of its own: which files hold it, and that all ranks have it."""
    place = Path(folder, f"of rank {rank}")
    place.mkdir()
    plan = plan_of(seed=None, data_are_public=False, bands=2)
    with plan.start(place / "ledger.jsonl", place / "keys.json") as run:
        for batch in run.loader(records_of(), steps=2):
            run.backward(model_of(), loss, batch)
        run.keep_noise()
        return [run._session.key.root.hex(), *sorted(path.name for path in place.iterdir())]


def test_the_secret_is_kept_by_the_first_rank_alone(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, secret_places, str(tmp_path))
    assert first[0] == second[0]
    assert "keys.json" in first and second[1:] == []
    kept = tmp_path / "of rank 0" / "keys.json"
    assert kept.stat().st_mode & 0o077 == 0
    assert json.loads(kept.read_text())["sessions"][0]["root"] == first[0]


def after_a_restart(rank: int, folder: str, counting: int) -> list[str]:
    """Starts in processes that torchrun has started before; one rank's agent counted it."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(rank == counting))
    found = []
    for ledger, resume in ((None, None), ("new.jsonl", None), ("new.jsonl", False)):
        try:
            plan_of().start(None if ledger is None else Path(folder, ledger), resume=resume).close()
            found.append("")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    try:  # there is a ledger now
        plan_of().start(Path(folder, "new.jsonl")).close()
    except ValueError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("counting", [0, 1])
def test_after_a_restart_a_run_does_not_forget_what_was_released(
    counting: int, tmp_path: Path
) -> None:
    for found in on_ranks(2, tmp_path, after_a_restart, str(tmp_path), counting):
        assert len(found) == 3, found
        none, lost, anew = found
        for message in (none, lost):
            assert "torchrun has restarted these processes 1 times" in message
        assert anew == ""


def begun_without_a_ledger(rank: int, alone: bool = False) -> list[str]:
    """Two runs one after the other, as in a script that torchrun started: what became of them."""
    if alone:
        starting.counted = lambda: 0  # type: ignore[assignment]
        starting.begun_before = lambda what: False
    found = []
    for _ in range(2):
        try:
            with plan_of().start() as run:
                found.append(f"after {run.released} releases")
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_a_restart_that_nobody_counted_is_found_out(
    size: int, agents: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anew = [["after 0 releases"] * 2] * size
    first = on_ranks(size, tmp_path / "1", begun_without_a_ledger)
    assert first == anew, first
    for found in on_ranks(size, tmp_path / "2", begun_without_a_ledger):
        for message in found:
            assert "torchrun has restarted these processes after a run had begun" in message
    # Mutant: without the mark, the second start would forget the first one's releases.
    mutant = on_ranks(size, tmp_path / "3", begun_without_a_ledger, True)
    assert mutant == anew
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another job, in the same store")
    other = on_ranks(size, tmp_path / "4", begun_without_a_ledger)
    assert other == anew


def other_ledger(rank: int, folder: str) -> str:
    """The second rank's machine has a ledger that the first rank's has not."""
    place = Path(folder, f"machine {rank}")
    place.mkdir()
    if rank == 1:
        with open(place / "ledger.jsonl", "wb") as file:
            file.write(Path(folder, "old", "ledger.jsonl").read_bytes())
    try:
        plan_of().start(place / "ledger.jsonl")
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_first_rank_without_the_newest_ledger_starts_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    with plan_of().start(old / "ledger.jsonl") as run:
        for batch in run.loader(records_of(), steps=2):
            run.backward(model_of(), loss, batch)
    for message in on_ranks(2, tmp_path, other_ledger, str(tmp_path)):
        assert "rank 1 sees another ledger" in message and "every machine sees" in message


def broken(rank: int, folder: str, times: int) -> int:
    """The second rank breaks down so many times."""
    before = len(os.listdir(folder))
    if rank == 1 and before < times:
        Path(folder, str(before)).touch()
        os.abort()
    return rank


def test_a_rank_that_breaks_down_is_shown_and_tried_once_more(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.warns(UserWarning, match="(?s)rank 1 died of SIGABRT.*in broken"):
        assert on_ranks(2, tmp_path / "once", broken, str(tmp_path / "notes"), 1) == [0, 1]
    died = pytest.raises(multiprocessing.ProcessExitedException, match="SIGABRT")
    with pytest.warns(UserWarning, match="rank 1 died"), died:
        on_ranks(2, tmp_path / "twice", broken, str(tmp_path / "notes"), 3)
