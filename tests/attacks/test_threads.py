"""Two threads that clip: hooks on the model, memory for what passes, precision and generators are
common to both, and one's gradients were clipped by the other's norms.
"""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from attacks.test_clipping import LARGEST, UNGUARDED, Pair, given_gradients
from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.one_at_a_time import one_at_a_time


def large_and_small() -> list[Pair]:
    """Thirty records that add C each, and thirty that add next to nothing."""
    source = torch.Generator().manual_seed(0)
    x, g = torch.randn(30, 12, 16, generator=source), torch.randn(30, 12, 6, generator=source)
    return [(x, g * 1e4), (x, g * 1e-8)]


def sums_of_two_threads(bound: BoundClipper, rounds: int) -> list[list[Tensor]]:
    """[2][rounds] clipped sums; rounds in which a thread failed are left out."""
    found: list[list[Tensor]] = [[], []]

    def clip(number: int, batch: Pair) -> None:
        for _ in range(rounds):
            try:
                sums = bound.clip(batch, step=UNGUARDED).gradients.values()
            except Exception:
                continue
            found[number].append(torch.cat([s.flatten() for s in sums]))

    threads = [threading.Thread(target=clip, args=each) for each in enumerate(large_and_small())]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return found


def bound_clipper() -> BoundClipper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 6))
    bound = Clipper(1.0, "ghost", engine="bookkeeping").bind(model, given_gradients)
    bound.check(large_and_small()[0])
    return bound


def test_two_threads_take_turns() -> None:
    bound = bound_clipper()
    alone = [
        torch.cat([s.flatten() for s in bound.clip(batch, step=UNGUARDED).gradients.values()])
        for batch in large_and_small()
    ]
    for sums, wanted in zip(sums_of_two_threads(bound, 5), alone, strict=True):
        assert len(sums) == 5
        assert all(torch.equal(found, wanted) for found in sums)


def test_without_turns_one_thread_clips_by_the_other_s_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums above 30 C of thirty records, or wrong ones, or failures."""
    unguarded = BoundClipper.clip.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(BoundClipper, "clip", unguarded)
    bound = bound_clipper()
    alone = [
        torch.cat([s.flatten() for s in bound.clip(batch, step=UNGUARDED).gradients.values()])
        for batch in large_and_small()
    ]
    found = sums_of_two_threads(bound, 20)
    largest = max((float(s.norm()) for sums in found for s in sums), default=0.0)
    same = [
        len(sums) == 20 and all(torch.equal(s, wanted) for s in sums)
        for sums, wanted in zip(found, alone, strict=True)
    ]
    assert largest > 30 * LARGEST or not all(same)


def test_a_loss_may_clip_by_itself_and_a_fork_is_not_stuck() -> None:
    @one_at_a_time
    def inner() -> int:
        return 1

    @one_at_a_time
    def outer() -> int:
        return 1 + inner()

    assert outer() == 2

    @one_at_a_time
    def forked() -> int:
        started = threading.Event()
        held = threading.Thread(target=lambda: (started.set(), inner()), daemon=True)
        held.start()
        started.wait()
        child = os.fork()
        if child == 0:
            other = threading.Thread(target=inner, daemon=True)
            other.start()
            other.join(5)
            os._exit(int(other.is_alive()))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert forked() == 0
