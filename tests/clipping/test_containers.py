"""Batches in any container: what the loss sees is what the user passed, cut to the micro-batch."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import clipped_gradients
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients
from quietgrad.tensors import batch_size_of, map_tensors

Pair = namedtuple("Pair", ["x", "y"])
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 1, 0])


@dataclass
class Written:
    x: Tensor
    y: Tensor
    rows: int = field(init=False)  # not what __init__ takes

    def __post_init__(self) -> None:
        self.rows = len(self.x)


@dataclass(frozen=True)
class Frozen:
    inside: Written
    name: str


def encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({"x": X, "y": Y})


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda: (X, Y), lambda b: (b[0], b[1])),
    "list": (lambda: [X, Y], lambda b: (b[0], b[1])),
    "dict": (lambda: {"x": X, "y": Y}, lambda b: (b["x"], b["y"])),
    "ordered-dict": (lambda: OrderedDict(x=X, y=Y), lambda b: (b["x"], b["y"])),
    "namedtuple": (lambda: Pair(X, Y), lambda b: (b.x, b.y)),
    "dataclass": (lambda: Written(X, Y), lambda b: (b.x, b.y)),
    "frozen": (lambda: Frozen(Written(X, Y), "a"), lambda b: (b.inside.x, b.inside.y)),
    "nested": (lambda: {"in": [(X, "a word")], "y": Y, "n": 3}, lambda b: (b["in"][0][0], b["y"])),
    "batch-encoding": (encoding, lambda b: (b["x"], b["y"])),
    # The usual way to read a tokenizer's output.
    "batch-encoding-attributes": (encoding, lambda b: (b.x, b.y)),
}


@pytest.mark.parametrize("physical_batch_size", [None, 2])
@pytest.mark.parametrize("name", sorted(CONTAINERS))
def test_loss_gets_the_users_container(name: str, physical_batch_size: int | None) -> None:
    make, read = CONTAINERS[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = read(batch)
        return F.cross_entropy(model(x), y, reduction="none")

    plain = oracle_gradients(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), (X, Y)
    )
    actual = clipped_gradients(model, loss, make(), 0.5, physical_batch_size=physical_batch_size)
    for parameter, g in oracle_clipped_sum(plain, 0.5).items():
        torch.testing.assert_close(actual.gradients[parameter], g)


def test_bare_tensor_is_a_batch() -> None:
    model = nn.Linear(4, 1)
    clipped = clipped_gradients(model, lambda model, x: model(x)[:, 0], X, 100.0)
    torch.testing.assert_close(clipped.gradients["weight"][0], X.sum(0))


def test_slices_are_views_and_the_rest_stays() -> None:
    batch = {"x": X, "names": ["a", "b"], "n": 3, "none": None}
    part = slice_batch(batch, 1, 3)
    assert part["x"].data_ptr() == X[1].data_ptr()
    assert part["x"].shape == (2, 4)
    assert part["names"] == ["a", "b"] and part["n"] == 3 and part["none"] is None
    assert batch_size_of(part) == 2
    assert batch["x"].shape == (5, 4)


def test_map_keeps_the_kinds_of_containers() -> None:
    mapped = map_tensors((Pair(X, [Y]), {"x": X}), lambda t: t + 1)
    assert (
        isinstance(mapped, tuple) and isinstance(mapped[0], Pair) and isinstance(mapped[0].y, list)
    )
    assert torch.equal(mapped[1]["x"], X + 1)


def test_a_dataclass_stays_one_and_is_not_written_into() -> None:
    batch = Frozen(Written(X, Y), "a name")
    part = slice_batch(batch, 1, 3)
    assert isinstance(part, Frozen) and isinstance(part.inside, Written) and part.name == "a name"
    assert batch_size_of(part) == 2 and part.inside.rows == 5  # nothing is made again
    assert batch.inside.x is X
    with pytest.raises(FrozenInstanceError):
        part.name = "another"  # type: ignore[misc]
    nothing = field()
    assert map_tensors(nothing, lambda t: t + 1) is nothing and map_tensors(Written, len) is Written
