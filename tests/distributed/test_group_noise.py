"""Noise of a model on four processes, two and two with the same records: once in total, on every
part and shard of a part, no two blocks' alike, and one and the same on all copies.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cutting import cut
from distributed.sharding import whole
from distributed.test_noise import LIMIT
from distributed.world import on_ranks, plan_of
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.plan.session import noise_session

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.statistical,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

SIDE, STEPS = 40, 4
NAMES = ("rows", "columns", "copies")
Found = list[dict[str, Tensor]]


def pure_noise(sharded: bool) -> Found:
    """Releases of a model whose loss depends on no weight: noise and nothing else."""
    model = nn.Sequential()
    for name in NAMES:
        model.add_module(name, nn.Linear(SIDE, SIDE, bias=False))
    cut(model, {"rows": ColwiseParallel(), "columns": RowwiseParallel()}, 2, sharded)
    found = []
    with plan_of(steps=STEPS, noise_multiplier=2.0).start(tensor_parallel=2) as run:
        for indices in run.batches():
            batch = torch.zeros(len(indices), SIDE)
            noisy = run.backward(model, lambda m, b: m(b).sum(dim=1), batch)
            model.zero_grad()
            sums = {name.split(".")[0]: g for name, g in noisy.gradients.items()}
            found.append({n: whole({n: sums[n]}).view(SIDE, SIDE) for n in NAMES})
    return found


def blocks_of(noise: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """[steps, ...] what single ranks hold of each: of columns a quarter, of rows a quarter of them,
    of what is whole on neighbours half of the rows.
    """
    half = SIDE // 2
    return {
        "rows": list(noise["rows"].split(SIDE // 4, dim=1)),
        "columns": [
            part for rows in noise["columns"].split(half, 1) for part in rows.split(half, dim=2)
        ],
        "copies": list(noise["copies"].split(half, dim=1)),
    }


def wrong_with(found: Found) -> list[str]:
    """What is wrong with releases that should be independent normal noise of deviation 2. Of 29
    statistics: a right implementation is refused with probability 2e-5.
    """
    noise = {name: torch.stack([release[name] for release in found]) / 2.0 for name in NAMES}
    wrong = []

    def related(one: Tensor, two: Tensor) -> bool:
        return not abs(float((one * two).sum())) / math.sqrt(one.numel()) < LIMIT

    for kind, parts in blocks_of(noise).items():
        for i, values in enumerate(parts):
            squares = (values.square().sum() - values.numel()) / math.sqrt(2 * values.numel())
            if not abs(float(squares)) < LIMIT:
                wrong.append(f"variance of {kind} {i}")
        for one, two in itertools.combinations(parts, 2):
            if related(one, two):
                wrong.append(f"blocks of {kind} are correlated")
    for i, name in enumerate(NAMES):
        if related(noise[name], noise[NAMES[i - 1]]):
            wrong.append("parameters are correlated")
        if related(noise[name][:-1], noise[name][1:]):
            wrong.append("steps are correlated")
    return wrong


def judged(rank: int) -> dict[str, Any]:
    """By how the model lies over the groups."""
    found = {way: pure_noise(way == "sharded") for way in ("sharded", "copied")}
    return {way: (wrong_with(f), [whole(release) for release in f]) for way, f in found.items()}


def times(factor: Any) -> None:
    """All noise of this rank, drawn as it would be, times something."""
    for name in ("stretch", "normal"):
        draw = getattr(KeyedSource, name)
        setattr(KeyedSource, name, lambda *a, draw=draw, **k: draw(*a, **k) * factor)


def one_group_alone_draws(rank: int) -> dict[str, Any]:
    times(rank < 2)
    return judged(rank)


def one_neighbour_alone_draws(rank: int) -> dict[str, Any]:
    times(rank % 2 == 0)
    return judged(rank)


def divided_by_the_root_of_the_groups(rank: int) -> dict[str, Any]:
    draw = KeyedSource.stretch
    KeyedSource.stretch = lambda *a, **k: draw(*a, **k) / 2**0.5  # type: ignore[method-assign]
    return judged(rank)


def the_same_numbers_in_both_groups(rank: int) -> dict[str, Any]:
    """What the first group has there."""
    places = noise_session.places_of

    def first(tensors: Any) -> Any:
        def moved(name: str, place: Any) -> Any:
            if isinstance(place, Columns):
                return place._replace(first=0)
            mesh = tensors[name].device_mesh
            over_groups = mesh.ndim == 2 or "copies" in name
            rows = (SIDE // 4 if mesh.ndim == 2 else SIDE // 2) * (rank // 2) * over_groups
            return Stretch(place.start - rows * SIDE, place.whole)

        return {name: moved(name, place) for name, place in places(tensors).items()}

    noise_session.places_of = first  # type: ignore[assignment]
    return judged(rank)


# What is noticed, where the rows of parts are sharded over the groups and where they are copied.
BROKEN: dict[Any, tuple[str, str]] = {
    one_group_alone_draws: ("variance of rows 1", "variance of"),
    one_neighbour_alone_draws: ("variance of columns 1", "variance of columns 1"),
    divided_by_the_root_of_the_groups: ("variance of rows 3", "variance of columns 3"),
    the_same_numbers_in_both_groups: ("blocks of rows are correlated", ""),
}


def test_noise_is_drawn_once_on_every_block_and_alike_on_copies(tmp_path: Path) -> None:
    found = on_ranks(4, tmp_path, judged)
    for of_rank in found:
        assert isinstance(of_rank, dict), of_rank
        for way, (wrong, releases) in of_rank.items():
            assert wrong == [], way
            for mine, theirs in zip(releases, found[0][way][1], strict=True):
                assert torch.equal(mine, theirs)
        # Of one root: the same numbers, wherever they were drawn.
        for one, two in zip(of_rank["sharded"][1], of_rank["copied"][1], strict=True):
            assert torch.equal(one, two)


@pytest.mark.usefixtures("no_looks")
@pytest.mark.parametrize("broken", list(BROKEN), ids=lambda f: f.__name__)
def test_wrong_noise_of_groups_is_seen(broken: Any, tmp_path: Path) -> None:
    for found in on_ranks(4, tmp_path, broken):
        assert isinstance(found, dict), found
        for way, text in zip(("sharded", "copied"), BROKEN[broken], strict=True):
            assert any(text in wrong for wrong in found[way][0]) or not text, (way, found[way][0])
