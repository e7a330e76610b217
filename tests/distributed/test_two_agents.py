"""``quietgrad train`` on two machines' worth of torchrun, an agent for each, both here: all are
killed in the middle, and the run goes on from its ledger and its checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.test_command import STEPS, _weights, command, started, table
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from quietgrad.cli import main
from quietgrad.ledger import holds_records, read_ledger

pytestmark = pytest.mark.distributed
SECONDS = 200


def agents(words: list[str], folder: Path, kill_at: int | None = None) -> list[int | None]:
    """Exit codes of two agents with a process each; ``kill_at``: SIGKILL to all of them once so
    many releases were counted. All are forked: they need not import anything again.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=agent, args=(words, folder, port)) for _ in range(2)]
    for one in both:
        one.start()
    ledger, until = folder / "run" / "ledger.jsonl", time.monotonic() + SECONDS
    try:
        while any(one.is_alive() for one in both) and time.monotonic() < until:
            time.sleep(0.05)
            if kill_at and holds_records(ledger) and read_ledger(ledger).releases >= kill_at:
                break
    finally:
        for one in both:
            kill(one)
            one.join()
    return [one.exitcode for one in both]


def agent(words: list[str], folder: Path, port: int) -> None:
    """What ``torchrun --nnodes=2 --nproc-per-node=1 -m quietgrad`` is on one machine."""
    said = os.open(folder / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(said, stream)
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=1,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        run_id="one",
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, quietgrad)(*words)


def quietgrad(*words: str) -> None:
    torch.set_num_threads(1)
    sys.argv = ["quietgrad", *words]
    try:
        main()
    except SystemExit as left:
        if left.code:
            raise RuntimeError(f"left with {left.code}") from None


def kill(agent: Any) -> None:
    """The agent, then its workers, so that it starts none again."""
    if agent.is_alive():
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in (str(agent.pid), *workers):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow("two elastic agents start a process each, twice")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of child processes")
def test_a_run_on_two_agents_goes_on_after_all_were_killed(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    run = tmp_path / "run"
    killed = agents(command(tmp_path), tmp_path, kill_at=2)
    assert killed == [-signal.SIGKILL] * 2, (tmp_path / "said").read_text()
    counted = read_ledger(run / "ledger.jsonl").releases
    applied = torch.load(run / "checkpoint.pt", weights_only=True)["step"]
    assert 2 <= counted < STEPS and applied <= counted
    ended = agents(command(tmp_path, "--resume"), tmp_path)
    assert ended == [0, 0], (tmp_path / "said").read_text()
    assert read_ledger(run / "ledger.jsonl").releases == STEPS
    (tmp_path / "alone").mkdir()
    table(tmp_path / "alone" / "people.csv")
    started(tmp_path / "alone", 1, command(tmp_path / "alone"))
    # A release that was counted, and that no checkpoint has, is spent and not made up for. Where
    # there is none the seed, which is public, gives the weights of one process up to rounding.
    if applied == counted:
        torch.testing.assert_close(
            _weights(run), _weights(tmp_path / "alone" / "run"), rtol=0, atol=1e-4
        )
