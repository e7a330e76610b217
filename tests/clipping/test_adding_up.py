"""How the micro-batches of a batch become one sum: what rounding does to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines.summing import RUN, Summing, Total, summing_of
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.norms.factors import (
    ConvolutionFactors,
    DenseFactors,
    DirectGradients,
    Geometry,
    Kept,
    ListedGradients,
    OneHotFactors,
)
from quietgrad.tensors import Batch

UNIT = 2.0**-24
MOST = 64 * UNIT  # of the sum: additions of 64 copies, each off by a unit of what is there


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def copies(count: int, others: int = 0) -> Batch:
    """Of one record, and some without a gradient of the weight."""
    x = torch.full((count + others, 3), 0.7371)
    x[count:] = 0.0
    return {"x": x, "y": torch.zeros(count + others, dtype=torch.long)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("parts", [1, RUN, RUN + 1, 700])
def test_many_small_sums_round_as_few(dtype: torch.dtype, parts: int) -> None:
    """Alike, as the sums of copies are: one after the other, 700 are off by 2e-6 of the whole."""
    one = torch.linspace(0.1, 1.0, 257, dtype=dtype)
    total = Total.of(Summing(), [one], parts)

    def add_to(sums: dict[str, Tensor]):
        sums["weight"] = sums["weight"].add_(one) if "weight" in sums else one.clone()

    for _ in range(parts):
        total.add(add_to)
    right = one.double() * parts
    # A run of RUN rounds by (RUN + 1) / 2 units of its average, and the end once.
    off = (total.finished()["weight"].double() - right).abs() / right
    assert float(off.max()) <= ((RUN + 1) / 2 + 2) * UNIT


def test_what_is_left_of_a_run_is_added_and_nothing_twice() -> None:
    torch.manual_seed(0)
    some = torch.randn(3 * RUN + 5, 40)
    total = Total.of(Summing(), [some], len(some))
    right = some.double().sum(0)
    for row in some:

        def add_to(sums: dict[str, Tensor], row: Tensor = row):
            sums["w"] = sums["w"].add_(row) if "w" in sums else row.clone()

        total.add(add_to)
    torch.testing.assert_close(total.finished()["w"].double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.grid(4, "every size, and both batches; a thousand copies one by one take seconds")
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("size", [None, 1, 100, 1025])
def test_a_record_hardly_moves_the_sum_of_copies(size: int | None, others: int) -> None:
    """Which way a batch is cut may hang on one record: a batch of copies alone is taken one at a
    time. Roundings of copies are alike; added up one by one, 1024 are off by 8e-3 clipping norms.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 5, bias=False)
    one = Clipper(1.0).clip(model, loss, copies(1)).gradients["weight"].double()
    engine: Engine = "one-example" if size is None else "bookkeeping"
    clipper = Clipper(1.0, engine=engine, physical_batch_size=size)
    found = clipper.clip(model, loss, copies(1024, others)).gradients["weight"].double()
    assert float((found / 1024 - one).norm()) <= MOST


FEW = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    """One record's, as many times as there are copies."""
    return torch.rand(1, *shape, generator=FEW).expand(1024, *shape).contiguous()


GEOMETRY = Geometry((3,), (1,), (0,), (1,), 1)
READ = torch.ones(1024, 2, dtype=torch.long)
KEPT: dict[str, tuple[Kept, tuple[int, ...]]] = {
    "dense": (DenseFactors(drawn(1, 2, 3), drawn(1, 2, 4)), (3, 4)),
    "dense-blocks": (DenseFactors(drawn(2, 2, 3), drawn(2, 2, 4)), (6, 4)),
    "small-table": (
        OneHotFactors(READ, drawn(1, 2, 4), 9),
        (9, 4),
    ),
    "table": (
        OneHotFactors(READ, drawn(1, 2, 4), 9999),
        (9999, 4),
    ),
    "direct": (DirectGradients(drawn(12)), (3, 4)),
    "listed": (ListedGradients(tuple(drawn(12).split(3))), (3, 4)),
    "convolution": (ConvolutionFactors(drawn(2, 8), drawn(5, 6), GEOMETRY), (5, 2, 3)),
}


@pytest.mark.parametrize("name", KEPT)
def test_weighted_sums_of_many_examples_round_as_those_of_few(name: str) -> None:
    kept, shape = KEPT[name]
    weights = torch.full((1024,), 0.3)
    right = 1024 * kept.examples(slice(0, 1)).weighted_sum(
        weights[:1], torch.Size(shape), torch.float64
    )
    before = torch.ones(shape)
    found = kept.weighted_sum(weights, torch.Size(shape), torch.float32)
    added = kept.weighted_sum(weights, torch.Size(shape), torch.float32, before)
    assert added is before
    torch.testing.assert_close(found.double(), right, rtol=MOST, atol=0.0)
    torch.testing.assert_close(added.double(), right + 1.0, rtol=MOST, atol=0.0)


def test_numbers_beside_add_up_alike_in_any_order() -> None:
    # Else the last bit would say in which micro-batches, or on which ranks, the records were.
    summing = summing_of(0.3, 64)
    given = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    brought = torch.stack([summing.beside({"a": t.clone()})["a"] for t in given])
    assert bool((brought / summing.side_unit % 1 == 0).all())
    assert float((brought - given).abs().max()) <= summing.side_unit / 2

    def added(order: list[int]) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for i in order:
            total = total + brought[i]
        return float(total)

    forward = list(range(40))
    assert added(forward) == added(forward[::-1]) == added(forward[1::2] + forward[::2])
