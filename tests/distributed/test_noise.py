"""Noise of several processes: once in total, on every parameter, and no two parameters' alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.world import on_ranks, plan_of
from torch import Tensor, nn

from quietgrad.distributed import exchange, ranks
from quietgrad.noise.sources import keyed
from quietgrad.noise.sources.keyed import KeyedSource

pytestmark = [pytest.mark.distributed, pytest.mark.statistical]

SIDE, STEPS = 40, 4
# Of about ten statistics a verdict: a right implementation is refused with probability 6e-6.
LIMIT = 5.0


def pure_noise(steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Releases of a model whose loss depends on no weight: noise and nothing else."""
    model = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False))
    found = []
    with plan_of(steps=steps, noise_multiplier=2.0).start() as run:
        for indices in run.batches():
            batch = torch.zeros(len(indices), SIDE)
            noisy = run.backward(model, lambda m, b: m(b).sum(dim=1), batch)
            found.append(noisy.gradients)
    return found


def problems(found: list[dict[str, Tensor]]) -> list[str]:
    """What is wrong with releases that should be independent normal noise of deviation 2."""
    noise = {name: torch.stack([release[name] for release in found]) / 2.0 for name in found[0]}
    wrong = []
    for name, values in noise.items():
        squares = (values.square().sum() - values.numel()) / math.sqrt(2 * values.numel())
        if not abs(float(squares)) < LIMIT:
            wrong.append(f"variance of {name}")
    one, two = noise.values()
    if not abs(float((one * two).sum()) / math.sqrt(one.numel())) < LIMIT:
        wrong.append("parameters are correlated")
    if not abs(float((one[0] * one[1]).sum()) / math.sqrt(one[0].numel())) < LIMIT:
        wrong.append("steps are correlated")
    return wrong


def sound(rank: int) -> list[str]:
    return problems(pure_noise())


def only_the_first_draws(rank: int) -> list[str]:
    draw = KeyedSource.normal
    KeyedSource.normal = lambda *a, **k: draw(*a, **k) * (rank == 0)  # type: ignore[method-assign]
    return problems(pure_noise())


def every_rank_draws_and_all_is_added(rank: int) -> list[str]:
    """Each rank covers its own sum, as it would by itself, and the covered sums are added."""
    own = ranks.Ranks.summed

    def summed(self: Any, clipped: Any, beside: Any) -> Any:
        for name, g in clipped.gradients.items():
            g += 2.0 * keyed.normal(g, _KEY[rank], rank, name)
        return own(self, clipped, beside)

    ranks.Ranks.summed = summed  # type: ignore[method-assign]
    return problems(pure_noise())


def divided_by_the_root_of_the_ranks(rank: int) -> list[str]:
    draw = KeyedSource.normal
    KeyedSource.normal = lambda *a, **k: draw(*a, **k) / 2**0.5  # type: ignore[method-assign]
    return problems(pure_noise())


def the_same_numbers_for_both(rank: int) -> list[str]:
    draw = KeyedSource.normal
    KeyedSource.normal = (  # type: ignore[method-assign]
        lambda self, like, key, step, name, scale=1.0: draw(self, like, key, step, "w", scale)
    )
    return problems(pure_noise())


def a_release_that_repeats_the_last(rank: int) -> list[str]:
    draw = KeyedSource.normal
    KeyedSource.normal = (  # type: ignore[method-assign]
        lambda self, like, key, step, name, scale=1.0: draw(self, like, key, 0, name, scale)
    )
    return problems(pure_noise())


def opposite_on_two_ranks(rank: int) -> list[str]:
    """All own all, rank 1 with the other sign, and the two are added: they cancel."""
    draw, gather = KeyedSource.normal, exchange.gathered
    KeyedSource.normal = (  # type: ignore[method-assign]
        lambda *a, **k: draw(*a, **k) * (1 if rank == 0 else -1)
    )
    ranks.Ranks.owned = lambda self, tensors: dict(tensors)  # type: ignore[method-assign]

    def summed(self: Any, clipped: Any, beside: Any) -> Any:
        return clipped

    def added(self: Any, noisy: Any, like: Any, beside: Any) -> Any:
        for g in noisy.gradients.values():
            torch.distributed.all_reduce(g)
        return noisy

    ranks.Ranks.summed, ranks.Ranks.gathered = summed, added  # type: ignore[method-assign]
    assert gather is not None
    return problems(pure_noise())


from quietgrad.randomness import RandomKey  # noqa: E402

_KEY = [RandomKey.from_seed(11), RandomKey.from_seed(12)]

BROKEN = {
    only_the_first_draws: "variance",
    every_rank_draws_and_all_is_added: "variance",
    divided_by_the_root_of_the_ranks: "variance",
    opposite_on_two_ranks: "variance",
    the_same_numbers_for_both: "parameters are correlated",
    a_release_that_repeats_the_last: "steps are correlated",
}


def test_noise_is_drawn_once_in_total_on_every_parameter(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, sound) == [[], []]


@pytest.mark.parametrize("broken", list(BROKEN), ids=lambda f: f.__name__)
def test_wrong_noise_is_seen(broken: Any, tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, broken):
        assert isinstance(found, list) and any(BROKEN[broken] in wrong for wrong in found), found


def drawn_by(rank: int) -> list[tuple[int, str]]:
    """(step, name) of every draw of this rank."""
    drawn = []
    draw = KeyedSource.normal

    def note(self: Any, like: Any, key: Any, step: int, name: str, scale: float = 1.0) -> Tensor:
        drawn.append((step, name))
        return draw(self, like, key, step, name, scale)

    KeyedSource.normal = note  # type: ignore[method-assign]
    pure_noise()
    return drawn


def test_every_number_is_drawn_by_one_rank_alone(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, drawn_by)
    every = [(step, f"{i}.weight") for step in range(STEPS) for i in range(2)]
    assert sorted(found[0] + found[1]) == sorted(every)
    assert all(found)


def test_owners_share_parameters_evenly_and_by_size_alone() -> None:
    sizes = {"a": 100, "b": 60, "c": 50, "d": 1, "e": 0}
    owner = exchange.owners_of(sizes, 2)
    assert owner == exchange.owners_of(dict(reversed(sizes.items())), 2)
    loads = [sum(n for name, n in sizes.items() if owner[name] == r) for r in range(2)]
    assert sorted(loads) == [101, 110]
