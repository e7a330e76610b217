"""Noise of a model that is sharded over processes: once in total, on every shard, and no two
shards' alike.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.sharding import sharded
from distributed.test_noise import LIMIT, SIDE, problems
from distributed.world import on_ranks, plan_of
from torch import Tensor, nn

from quietgrad.distributed.sharded import ShardedCompany
from quietgrad.noise.sources import keyed
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.noise.sources.secure import SecureSource
from quietgrad.noise.sources.stretch import Stretch
from quietgrad.plan.session import noise_session
from quietgrad.randomness import RandomKey

pytestmark = [pytest.mark.distributed, pytest.mark.statistical]

STEPS = 4


def pure_noise() -> list[dict[str, Tensor]]:
    """Releases of a model whose loss depends on no weight: noise and nothing else."""
    model = sharded(
        nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False))
    )
    found = []
    with plan_of(steps=STEPS, noise_multiplier=2.0).start() as run:
        for indices in run.batches():
            batch = torch.zeros(len(indices), SIDE)
            noisy = run.backward(model, lambda m, b: m(b).sum(dim=1), batch)
            found.append({name: g.full_tensor() for name, g in noisy.gradients.items()})
    return found


def wrong_with(found: list[dict[str, Tensor]]) -> list[str]:
    """``problems``, for two shards each, and whether the shards have to do with each other. Of
    about fourteen statistics a verdict: a right implementation is refused with probability 8e-6.
    """
    half = SIDE // 2
    wrong = problems(found)
    for rows in (slice(half), slice(half, SIDE)):
        wrong += [f"{text} of a shard" for text in problems([_rows(r, rows) for r in found])]
    noise = torch.stack([g for release in found for g in release.values()]) / 2.0
    product = float((noise[:, :half] * noise[:, half:]).sum())
    if not abs(product) / math.sqrt(noise[:, :half].numel()) < LIMIT:
        wrong.append("shards are correlated")
    return wrong


def _rows(release: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: g[rows] for name, g in release.items()}


def sound(rank: int) -> list[str]:
    return wrong_with(pure_noise())


def one_rank_alone_draws(rank: int) -> list[str]:
    draw = KeyedSource.stretch
    KeyedSource.stretch = lambda *a, **k: draw(*a, **k) * (rank == 0)  # type: ignore[method-assign]
    return wrong_with(pure_noise())


def the_same_numbers_on_both_shards(rank: int) -> list[str]:
    noise_session.places_of = lambda tensors: {  # type: ignore[assignment]
        name: Stretch(0, t.numel()) for name, t in tensors.items()
    }
    return wrong_with(pure_noise())


def every_rank_draws_for_the_whole_and_all_is_added(rank: int) -> list[str]:
    scattered = ShardedCompany.scattered
    key = RandomKey.from_seed(11 + rank)

    def noisy(self: Any, sums_wn: Tensor) -> Tensor:
        drawn = keyed.normal(sums_wn, key, int(key.words("noise", 0)[0] % 1000), "w")
        return scattered(self, sums_wn + 2.0 * drawn)

    ShardedCompany.scattered = noisy  # type: ignore[method-assign]
    return wrong_with(pure_noise())


def divided_by_the_root_of_the_ranks(rank: int) -> list[str]:
    draw = KeyedSource.stretch
    KeyedSource.stretch = lambda *a, **k: draw(*a, **k) / 2**0.5  # type: ignore[method-assign]
    return wrong_with(pure_noise())


BROKEN = {
    one_rank_alone_draws: "of a shard",
    the_same_numbers_on_both_shards: "shards are correlated",
    every_rank_draws_for_the_whole_and_all_is_added: "variance",
    divided_by_the_root_of_the_ranks: "variance",
}


def test_noise_is_drawn_once_in_total_on_every_shard(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, sound) == [[], []]


@pytest.mark.parametrize("broken", list(BROKEN), ids=lambda f: f.__name__)
def test_wrong_noise_is_seen(broken: Any, tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, broken):
        assert isinstance(found, list) and any(BROKEN[broken] in wrong for wrong in found), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("secure", [False, True])
def test_a_stretch_is_what_the_whole_has_there(secure: bool, dtype: torch.dtype) -> None:
    if secure:
        pytest.importorskip("cryptography")
    source: Any = SecureSource() if secure else KeyedSource()
    key = RandomKey.from_seed(5)
    rows = 7 if secure else 3 * keyed.BLOCK // 40 + 7
    like = torch.zeros(rows, 40, dtype=dtype)
    whole = source.normal(like, key, 3, "w", 2.0)
    for first, last in ((0, rows), (0, 1), (1, 5), (rows // 2, rows), (rows - 1, rows), (2, 2)):
        place = Stretch(first * 40, like.numel())
        part = source.stretch(like[first:last], key, 3, "w", place, 2.0)
        assert torch.equal(part, whole[first:last])


def test_blocks_of_one_parameter_have_numbers_of_their_own() -> None:
    """Two blocks' correlation is a normal number: a right one is refused with probability 6e-7."""
    key, size = RandomKey.from_seed(6), keyed.BLOCK
    drawn = keyed.normal(torch.zeros(3 * size), key, 0, "w").view(3, size)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(drawn[one] @ drawn[other])) / math.sqrt(size) < LIMIT
    # What has one block alone is drawn as it was before there were blocks.
    few = torch.from_numpy(key.generator("noise", 0, "w").standard_normal(50, dtype="float32"))
    assert torch.equal(keyed.normal(torch.zeros(50), key, 0, "w"), few)


def drawn_by(rank: int) -> list[tuple[int, str, int, int]]:
    """(step, name, first entry, entries) of every draw of this rank."""
    drawn = []
    draw = KeyedSource.stretch

    def note(
        self: Any, like: Tensor, key: Any, step: int, name: str, place: Stretch, scale: float = 1.0
    ) -> Tensor:
        drawn.append((step, name, place.start, like.numel()))
        return draw(self, like, key, step, name, place, scale)

    KeyedSource.stretch = note  # type: ignore[method-assign]
    pure_noise()
    return drawn


def test_every_number_is_drawn_by_one_rank_alone(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, drawn_by)
    half = SIDE * SIDE // 2
    for rank, drawn in enumerate(found):
        assert sorted(drawn) == [
            (step, f"{i}.weight", rank * half, half) for step in range(STEPS) for i in range(2)
        ]
