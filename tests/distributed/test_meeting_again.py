"""Processes that torchrun's agents have started again meet each other, and not those of before,
whose addresses are still in the agents' store.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quietgrad.distributed import together
from quietgrad.distributed.groups import meeting

pytestmark = pytest.mark.distributed

LONG = 40.0  # seconds, in which nobody meets who has not met


def meets(rank: int, start: int, folder: str, late: bool, own: bool) -> None:
    """Meets the other rank, adds up with it; of the first start the second rank is then killed."""
    torch.set_num_threads(1)
    # The second rank's machine asked for the restart; the first one's agent did not count it.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start * rank)
    if not own:
        together.place_of_this_start = lambda: {}
    if late:
        time.sleep(1.0)
    found = together.meet("cpu")
    total = torch.tensor([rank + 10 * start])
    dist.all_reduce(total)
    again = together.restarted(found)
    Path(folder, f"{start} {rank}").write_text(f"{total.item()} {again}")
    if not start:
        time.sleep(0.5)  # until the other one has what was sent
        os.kill(os.getpid(), signal.SIGKILL)
    together.leave()
    os._exit(0)


def started(start: int, folder: Path, late: int, own: bool = True) -> list[str]:
    """What both ranks of a start found; nothing where they did not meet in time."""
    context = multiprocessing.get_context("fork")
    both = [
        context.Process(target=meets, args=(rank, start, str(folder), rank == late, own))
        for rank in range(2)
    ]
    for one in both:
        one.start()
    until = time.monotonic() + LONG
    for one in both:
        one.join(max(0.0, until - time.monotonic()))
    for one in both:
        one.kill()
        one.join()
    files = [folder / f"{start} {rank}" for rank in range(2)]
    return [file.read_text() for file in files if file.exists()]


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_are_started_again_meet_each_other(
    late: int, agents: dist.TCPStore, tmp_path: Path
) -> None:
    assert started(0, tmp_path, late) == ["1 False"] * 2
    for start in (1, 2):
        assert started(start, tmp_path, late) == [f"{1 + 20 * start} True"] * 2


def places_of(store: dist.TCPStore) -> set[str]:
    """The keys under which ranks say where they listen."""
    return {key for key in store.list_keys() if not key.startswith("quietgrad of ")}


def test_as_torch_meets_by_itself_ranks_look_for_those_of_before(
    agents: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant; where a version of torch makes this fail, ``meeting.py`` can go. Whether ranks
    then miss each other is a race. That they may is none: where they look, those of before stand.
    """
    assert started(0, tmp_path, 1, own=False) == ["1 False"] * 2
    before = places_of(agents)
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(other.port))
    assert len(started(1, tmp_path, 1, own=False)) == 2
    assert before and places_of(other) & before


def test_no_rank_looks_where_those_of_before_stand(agents: dist.TCPStore, tmp_path: Path) -> None:
    parts: set[str] = set()
    for start in (0, 1, 2):
        known = set(agents.list_keys())
        assert len(started(start, tmp_path, 1)) == 2
        new = set(agents.list_keys()) - known
        parts |= {key.split("/")[1] for key in new if "/start " in key}
    assert len(parts) == 3 and not places_of(agents)


def test_a_rank_that_does_not_come_is_named(
    agents: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "WAITING", meeting.timedelta(seconds=0.5))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, other in (("0", "for 1 other ranks"), ("1", "for rank 0")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(RuntimeError, match=other):
            meeting.place_of_this_start()


def test_without_an_agents_store_ranks_meet_as_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert meeting.place_of_this_start() == {}
