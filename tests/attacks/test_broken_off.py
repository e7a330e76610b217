"""A model or a loss that ends in the middle of a look or a pass, as by sys.exit() or Ctrl-C:
nothing is counted, nothing is left behind, and the run goes on.
"""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.ledger import read_ledger

PLAN = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=15, steps=2).build(40)


class Ending(nn.Module):
    """Writes what it should not, and ends, in one of its calls or in one of its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.seen: Tensor
        self.calls = self.backs = 0
        self.ends: tuple[str, int, type[BaseException]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.first(x)
        self.end("forward", self.calls)
        h.register_hook(self.back)
        return self.last(self.drop(h))

    def back(self, gradient: Tensor) -> None:
        self.backs += 1
        self.end("backward", self.backs)

    def end(self, where: str, count: int) -> None:
        if self.ends is not None and self.ends[0] == where and count >= self.ends[1]:
            self.seen += 1
            self.drop.eval()
            self.last.requires_grad_(False)
            raise self.ends[2]


class Looping(Ending):
    """As often as a column says: for ever where the guard makes it far larger than it is."""

    def forward(self, x: Tensor) -> Tensor:
        most = float(x.abs().max())
        while self.ends is not None and most > 1e5:
            most -= 1e-3
        return super().forward(x)


def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def step(run: Any, model: nn.Module) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=draws)
    indices = next(iter(run.batches()))
    run.backward(model, loss, (x[indices], (x[indices, 0] > 0).long()))


def stands(model: nn.Module) -> Any:
    """All that a look or a pass may move."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return (
        {name: value.tolist() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [p.requires_grad for p in model.parameters()],
        hooks,
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def require_as_before(model: Ending, ledger: Path, kind: type[BaseException]) -> None:
    with PLAN.start(ledger) as run:
        before = stands(model)
        with pytest.raises(kind):
            step(run, model)
        assert stands(model) == before
        assert run.released == 0 and read_ledger(ledger).releases == 0
        model.ends = None
        # In another thread, which waits for whoever holds a lock.
        other = threading.Thread(target=step, args=(run, model))
        other.start()
        other.join(60)
        assert run.released == 1 and read_ledger(ledger).releases == 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("where", "count"),
    [("forward", n) for n in (1, 2, 5, 12, 30, 60)] + [("backward", n) for n in (1, 3, 8, 25)],
)
def test_a_model_that_ends_leaves_nothing_behind(
    where: str, count: int, kind: type[BaseException], tmp_path: Path
) -> None:
    model = Ending()
    model.ends = where, count, kind
    require_as_before(model, tmp_path / "ledger.jsonl", kind)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms on this system")
def test_a_look_that_loops_for_ever_is_broken_off(tmp_path: Path) -> None:
    def broken_off(*_: Any) -> None:
        raise KeyboardInterrupt

    model = Looping()
    model.ends = "backward", 10**9, KeyboardInterrupt
    previous = signal.signal(signal.SIGALRM, broken_off)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3.0)
        require_as_before(model, tmp_path / "ledger.jsonl", KeyboardInterrupt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_without_putting_back_what_was_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quietgrad.clipping.soundness.unchanged.Watch.switched", lambda _: None)
    model = Ending()
    model.ends = "forward", 1, SystemExit
    with pytest.raises(AssertionError):
        require_as_before(model, tmp_path / "ledger.jsonl", SystemExit)
