"""What a model draws for records while they are clipped: known to who knows the script's seed, and
shifted for all others by one record more, unless it is from the run's secret.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import good, records, rows, small
from quietgrad.clipping import Clipper
from quietgrad.generators import KeyedByStep, keyed_generators
from quietgrad.plan import PrivacyConfig, PrivateRun

CLIP, SEED = 0.05, 4  # and what the script says: torch.manual_seed(4)
CONFIG = PrivacyConfig(
    max_grad_norm=CLIP, noise_multiplier=1.0, expected_batch_size=12, steps=3, data_are_public=True
)
Sum = dict[str, Tensor]


def pythons(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    drawn = torch.tensor([random.gauss(0, 3) for _ in batch["y"]])
    return good(model, {**batch, "x": batch["x"] * drawn[:, None]})


def numpys(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    drawn = torch.from_numpy(np.random.randn(len(batch["y"]), 1)).float()
    return good(model, {**batch, "x": batch["x"] * drawn})


LOSSES = [good, pythons, numpys]


def seeded() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def by_run(loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> Sum:
    model = small(dropout=0.5).train()
    with CONFIG.build(len(batch["y"])).start() as run:
        seeded()
        next(run.batches())
        return run.clip(model, loss, batch).gradients


def by_clipper(loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> Sum:
    model = small(dropout=0.5).train()
    seeded()
    return Clipper(CLIP).bind(model, loss).clip(batch).gradients


def apart(one: Sum, other: Sum) -> float:
    """In units of C."""
    return sum(float((g - other[k]).double().pow(2).sum()) for k, g in one.items()) ** 0.5 / CLIP


def unkeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken mechanism: the generators are left as the script seeded them."""
    for keyed in ("_drawing", "_looping"):
        monkeypatch.setattr(PrivateRun, keyed, lambda *_: nullcontext())
    for place in ("_put_back_after", "seed_all"):
        monkeypatch.setattr(f"quietgrad.generators.{place}", lambda *_: nullcontext())


WAYS = [by_run, by_clipper]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_scripts_seed_does_not_say_what_records_meet(
    loss: Callable[..., Tensor], way: Callable[..., Sum]
) -> None:
    assert apart(way(loss, records()), way(loss, records())) > 0.5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
def test_with_the_scripts_seed_one_record_moves_what_all_others_meet(
    loss: Callable[..., Tensor], way: Callable[..., Sum], monkeypatch: pytest.MonkeyPatch
) -> None:
    unkeyed(monkeypatch)
    batch = records()
    assert apart(way(loss, batch), way(loss, batch)) < 1e-6
    without_the_first = rows(batch, *range(1, len(batch["y"])))
    assert apart(way(loss, batch), way(loss, without_the_first)) > 2.0  # C is all that it may move


def in_the_loop(dataset: list[int] | None) -> list[list[Any]]:
    """What a loop draws at each of its steps, by ``run.batches()`` or by a loader."""
    drawn: list[list[Any]] = []
    with CONFIG.build(24).start() as run:
        seeded()
        for _ in run.batches() if dataset is None else run.loader(dataset, steps=3):
            drawn.append([*torch.rand(2).tolist(), random.random(), np.random.rand()])
            run._released += 1  # nothing of this is released
    return drawn


@pytest.mark.parametrize("dataset", [None, list(range(24))])
def test_the_scripts_seed_does_not_say_what_a_loop_draws(dataset: list[int] | None) -> None:
    """A crop of each record, or noise, before it is clipped."""
    one, other = in_the_loop(dataset), in_the_loop(dataset)
    assert len({number for step in (*one, *other) for number in step}) == 6 * 4
    after = torch.rand(2), random.random(), np.random.rand()
    seeded()
    assert torch.equal(after[0], torch.rand(2))
    assert after[1:] == (random.random(), np.random.rand())


@pytest.mark.parametrize("dataset", [None, list(range(24))])
def test_unkeyed_it_says_what_a_loop_draws(
    dataset: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrivateRun, "_looping", lambda *_: nullcontext())
    assert in_the_loop(dataset) == in_the_loop(dataset)


def test_what_a_loop_draws_is_the_same_again_by_seed() -> None:
    plan = PrivacyConfig(
        max_grad_norm=CLIP, noise_multiplier=1.0, expected_batch_size=12, steps=3,
        data_are_public=True, seed=7,
    ).build(24)  # fmt: skip
    found = []
    for _ in range(2):
        with plan.start() as run:
            next(run.batches())
            with run._looping():
                found.append(torch.rand(3))
    assert torch.equal(*found)


def test_parts_of_a_batch_and_steps_meet_other_numbers_and_the_scripts_go_on() -> None:
    batch, model = records(), small(dropout=0.5).train()
    with CONFIG.build(24).start() as run:
        sums: list[Any] = []
        for _ in run.batches():
            seeded()
            parts = [run.clip(model, good, batch) for _ in range(2)]
            drawn = torch.rand(2), random.random(), np.random.rand()
            seeded()
            assert torch.equal(drawn[0], torch.rand(2))
            assert drawn[1:] == (random.random(), np.random.rand())
            sums += [part.gradients for part in parts]
            run._released += 1  # nothing of this is released
    for i, one in enumerate(sums):
        assert all(apart(one, other) > 0.5 for other in sums[:i])


def test_parts_go_on_in_one_stream() -> None:
    """So a batch's masks do not depend on who calls ``clip``: the loop, part by part, or
    ``backward``.
    """
    batch, model = records(), small(dropout=0.5).train()
    halves = [rows(batch, *range(12)), rows(batch, *range(12, 24))]
    with CONFIG.build(24).start() as run:
        next(run.batches())
        by_hand = run.clip(model, good, halves[0]) + run.clip(model, good, halves[1])
        run._model_draws = KeyedByStep()
        at_once = run.clip(model, good, iter(halves))
    assert apart(by_hand.gradients, at_once.gradients) < 1e-6


def test_what_a_failed_pass_drew_is_put_back_too() -> None:
    def fails(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        torch.rand(3)
        raise KeyError("labels")

    bound = Clipper(CLIP).bind(small(), fails)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="labels"):
        bound.clip(records())
    assert torch.equal(state, torch.get_rng_state())


def test_a_loop_that_ends_in_anothers_draws_leaves_them_alone() -> None:
    """A loop that was broken off ends when Python collects it, be it while another engine draws for
    its records: the script's own state was put under those draws.
    """
    torch.manual_seed(0)
    own, left = torch.get_rng_state(), KeyedByStep()
    broken_off = left.of(0, lambda: 1)
    broken_off.__enter__()
    first = torch.rand(3)
    with keyed_generators(2):
        found = [torch.rand(3)]
        broken_off.__exit__(None, None, None)
        found.append(torch.rand(3))
    assert torch.equal(torch.get_rng_state(), own)
    with keyed_generators(2):
        assert torch.equal(torch.cat(found), torch.rand(6))
    with left.of(0, lambda: 1):  # and its own stream goes on where it was
        second = torch.rand(3)
    with keyed_generators(1):
        assert torch.equal(torch.cat([first, second]), torch.rand(6))
    assert torch.equal(torch.get_rng_state(), own)


@pytest.mark.usefixtures("examined_once")
def test_reading_the_loop_and_the_model_draw_numbers_of_their_own() -> None:
    """Mutant: one stream for all three, so that a crop told of the mask that came after it."""
    drawn: dict[str, list[float]] = {"reading": [], "loop": [], "model": []}

    def draw(what: str) -> float:
        drawn[what].append(float(torch.rand((), dtype=torch.float64)))
        return drawn[what][-1]

    class Drawing(list[Tensor]):
        def __getitem__(self, place: Any) -> Any:
            return super().__getitem__(place) + 0 * draw("reading")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        draw("model")
        return model(x).square().sum(1)

    model, config = nn.Linear(2, 1), PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=2)
    with config.build(4).start() as run:
        for batch in run.loader(Drawing(torch.ones(4, 2)), steps=2):
            draw("loop")
            run.backward(model, loss, batch)
    found = [set(numbers) for numbers in drawn.values()]
    assert all(found) and sum(map(len, found)) == len(set().union(*found))
