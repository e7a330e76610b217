"""Noise of a model whose layers are cut over processes: once in total, on every part, no two parts'
alike, and one and the same on all copies of what every process holds whole.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import by_columns, cut
from distributed.sharding import whole
from distributed.test_noise import LIMIT
from distributed.world import on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from quietgrad.distributed.cut.ranks import CutRanks
from quietgrad.noise.sources import of_stretches
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.noise.sources.of_stretches import OfStretches
from quietgrad.noise.sources.secure import SecureSource
from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.plan.session import noise_session
from quietgrad.randomness import RandomKey

pytestmark = [pytest.mark.distributed, pytest.mark.statistical]

SIDE, STEPS = 40, 4


def pure_noise() -> list[dict[str, Tensor]]:
    """Releases of a model whose loss depends on no weight: noise and nothing else, gathered from
    the ranks; of what is whole, this rank's copy.
    """
    names = ("rows", "columns", "copies")
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(SIDE, SIDE, bias=False))
    cut(model, {"rows": ColwiseParallel(), "columns": RowwiseParallel()})
    found = []
    plan = plan_of(steps=STEPS, noise_multiplier=2.0)
    with plan.start(tensor_parallel=2) as run:
        for indices in run.batches():
            batch = torch.zeros(len(indices), SIDE)
            run.backward(model, lambda m, b: m(b).sum(dim=1), batch)
            grads = {n: model.get_submodule(n).weight.grad for n in names}
            wide = plan.expected_batch_size
            model.zero_grad()  # else the next mean would be added to it
            found.append(
                {
                    n: (g.full_tensor() if hasattr(g, "full_tensor") else g) * wide
                    for n, g in grads.items()
                }
            )
    return found


def wrong_with(found: list[dict[str, Tensor]]) -> list[str]:
    """What is wrong with releases that should be independent normal noise of deviation 2. Of
    fourteen statistics: a right implementation is refused with probability 8e-6.
    """
    noise = {name: torch.stack([release[name] for release in found]) / 2.0 for name in found[0]}
    wrong, half = [], SIDE // 2
    parts = {
        "rows, first": noise["rows"][:, :half],
        "rows, second": noise["rows"][:, half:],
        "columns, first": noise["columns"][:, :, :half].mT,
        "columns, second": noise["columns"][:, :, half:].mT,
        "copies": noise["copies"],
    }
    for name, values in parts.items():
        squares = (values.square().sum() - values.numel()) / math.sqrt(2 * values.numel())
        if not abs(float(squares)) < LIMIT:
            wrong.append(f"variance of {name}")

    def related(one: Tensor, two: Tensor) -> bool:
        return not abs(float((one * two).sum())) / math.sqrt(one.numel()) < LIMIT

    for kind in ("rows", "columns"):
        if related(parts[f"{kind}, first"], parts[f"{kind}, second"]):
            wrong.append(f"parts of {kind} are correlated")
    names = list(noise)
    for i, name in enumerate(names):
        if related(noise[name], noise[names[i - 1]]):
            wrong.append("parameters are correlated")
        if related(noise[name][:-1], noise[name][1:]):
            wrong.append("steps are correlated")
    return wrong


def judged(rank: int) -> dict[str, Any]:
    found = pure_noise()
    return {"wrong": wrong_with(found), "copies": torch.stack([r["copies"] for r in found])}


def one_rank_alone_draws(rank: int) -> dict[str, Any]:
    draw = KeyedSource.stretch
    KeyedSource.stretch = lambda *a, **k: draw(*a, **k) * (rank == 0)  # type: ignore[method-assign]
    return judged(rank)


def the_same_numbers_on_both_parts(rank: int) -> dict[str, Any]:
    places = noise_session.places_of

    def first(tensors: Any) -> Any:
        return {
            name: place._replace(start=0, stop=place.stop - place.start)
            if isinstance(place, Columns)
            else Stretch(0, place.whole)
            for name, place in places(tensors).items()
        }

    noise_session.places_of = first  # type: ignore[assignment]
    return judged(rank)


def every_rank_covers_its_copy(rank: int) -> dict[str, Any]:
    """Each with numbers of its own, and nobody tells the others."""
    CutRanks.owned = lambda self, tensors: dict(tensors)  # type: ignore[method-assign]
    CutRanks.summed = lambda self, clipped, beside: clipped  # type: ignore[method-assign]
    CutRanks.gathered = lambda self, noisy, like, beside: noisy  # type: ignore[method-assign]
    draw = KeyedSource.normal
    KeyedSource.normal = (  # type: ignore[method-assign]
        lambda self, like, key, step, name, scale=1.0: draw(
            self, like, key, step, f"{name}{rank}", scale
        )
    )
    return judged(rank)


def divided_by_the_root_of_the_ranks(rank: int) -> dict[str, Any]:
    draw = KeyedSource.stretch
    KeyedSource.stretch = lambda *a, **k: draw(*a, **k) / 2**0.5  # type: ignore[method-assign]
    return judged(rank)


BROKEN = {
    one_rank_alone_draws: "variance of columns, second",
    the_same_numbers_on_both_parts: "parts of columns are correlated",
    divided_by_the_root_of_the_ranks: "variance of copies",
}


def test_noise_is_drawn_once_on_every_part_and_alike_on_copies(tmp_path: Path) -> None:
    one, two = on_ranks(2, tmp_path, judged)
    assert isinstance(one, dict) and isinstance(two, dict), (one, two)
    assert one["wrong"] == two["wrong"] == []
    assert torch.equal(one["copies"], two["copies"])


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("broken", list(BROKEN), ids=lambda f: f.__name__)
def test_wrong_noise_of_parts_is_seen(broken: Any, tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, broken):
        assert isinstance(found, dict), found
        assert BROKEN[broken] in found["wrong"], found["wrong"]


def test_copies_with_numbers_of_their_own_are_seen(tmp_path: Path) -> None:
    one, two = on_ranks(2, tmp_path, every_rank_covers_its_copy)
    assert isinstance(one, dict) and isinstance(two, dict), (one, two)
    assert not torch.equal(one["copies"], two["copies"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("secure", [False, True])
def test_columns_have_what_the_whole_has_there(
    secure: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if secure:
        pytest.importorskip("cryptography")
    monkeypatch.setattr(of_stretches, "AT_ONCE", 100)
    source: Any = SecureSource() if secure else KeyedSource()
    key, like = RandomKey.from_seed(5), torch.zeros(11, 30, dtype=dtype)
    whole = source.normal(like, key, 3, "w", 2.0)
    for start, stop in ((0, 30), (0, 1), (15, 30), (29, 30)):
        place = Columns(start, stop, 30, like.numel())
        part = OfStretches(source, {"w": place}).normal(like[:, start:stop], key, 3, "w", 2.0)
        assert torch.equal(part, whole[:, start:stop])


class Halves(nn.Module):
    """A head of two outputs: half of it has a shape that would spread over the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.down(self.up(x))))
        return found


def cut_otherwise_midway(rank: int, ranks: int, first: bool) -> Tensor:
    """Correlated noise of a model whose head is cut for two steps and whole for two, or the other
    way round. Weights stay as they are.
    """
    block: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    plans = [block, block | {"head": by_columns()}]
    releases: list[Tensor] = []

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"][:, :2]).square().sum(dim=1)

    with plan_of(bands=3).start(tensor_parallel=ranks) as run:
        for step, batch in enumerate(run.loader(records_of(), steps=4, physical_batch_size=3)):
            if step in (0, 2):
                torch.manual_seed(0)
                model: nn.Module = Halves().double()
                if ranks > 1:
                    model = cut(model, dict(plans[(step == 0) == first]))
            releases.append(whole(run.backward(model, loss_of, batch).gradients))
    return torch.stack(releases)


@pytest.mark.parametrize("first", [True, False], ids=["no longer cut", "cut later"])
def test_correlated_noise_goes_on_where_layers_are_cut_midway(first: bool, tmp_path: Path) -> None:
    alone = cut_otherwise_midway(0, 1, first)
    for found in on_ranks(2, tmp_path, cut_otherwise_midway, 2, first):
        assert isinstance(found, Tensor), found
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)
