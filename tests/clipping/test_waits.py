"""A step does not wait for a GPU more often because a model has more layers (tests/waits.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed.world import without_looks
from torch import Tensor
from waits import USUAL, difference, waits_of

from quietgrad.clipping.norms.estimators import sketches
from quietgrad.clipping.soundness.guard import is_guarded
from quietgrad.sending import numbers_beside, read_together, sent
from quietgrad.tensors import to_device

CLIPPINGS: dict[str, dict[str, Any]] = {
    "exact": {},
    "ghost": {"estimator": "ghost"},
    "by layer": {"groups": "layer"},
    "hutch": {"estimator": "hutch", "sketch_dim": 4},
    "hutch++": {"estimator": "hutch++", "sketch_dim": 4},
}


@pytest.fixture
def usual() -> Iterator[None]:
    assert not is_guarded(USUAL)
    with without_looks():
        yield


@pytest.mark.parametrize("name", CLIPPINGS)
def test_waits_do_not_grow_with_layers(name: str, usual: None) -> None:
    few, many = (waits_of(layers, CLIPPINGS[name]) for layers in (2, 6))
    assert difference(few, many) == {}
    assert few.total() > 0


def test_what_grows_is_seen(monkeypatch: pytest.MonkeyPatch, usual: None) -> None:
    """Projections that go one by one from ordinary memory, as they did."""
    monkeypatch.setattr(sketches, "sent", lambda made, device: made.to(device))
    few, many = (waits_of(layers, CLIPPINGS["hutch"]) for layers in (1, 2))
    assert {what for what, _ in difference(few, many)} == {"to"}


class OnTheWay:
    """A tensor of the processor's that tells what is done with it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.told: list[Any] = []

    def pin_memory(self) -> OnTheWay:
        self.told.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> OnTheWay:
        self.told.append((device.type, non_blocking))
        return self


def test_to_a_gpu_from_pinned_memory_without_waiting() -> None:
    made: Any = OnTheWay()
    sent(made, torch.device("cuda"))
    assert made.told == ["pinned", ("cuda", True)]
    other: Any = OnTheWay()
    sent(other, torch.device("mps"))
    assert other.told == [("mps", False)]
    here: Any = OnTheWay()
    assert sent(here, torch.device("cpu")) is here and here.told == []


def test_what_comes_to_the_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def to(t: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        told.append(non_blocking)
        return t

    monkeypatch.setattr(Tensor, "to", to)
    for device in ("cpu", "cuda"):
        to_device({"x": torch.ones(1)}, torch.device(device))
    assert told == [False, True]


def test_numbers_there_and_back() -> None:
    like = torch.ones(2, dtype=torch.float64)
    assert torch.equal(numbers_beside([1, 2.5], like), like.new_tensor([1, 2.5]))
    assert numbers_beside([3], like, torch.float32).dtype == torch.float32
    scalars = [torch.tensor(True), torch.tensor(-(2**62)), torch.tensor(False)]
    assert read_together(scalars) == [1, -(2**62), 0]
    assert read_together([]) == []
