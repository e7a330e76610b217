"""Random numbers that are seeded from records: passes that hold randomness still see nothing of it,
and all others' masks change with one record.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, rows, small, switched_off
from quietgrad.clipping import Clipper
from quietgrad.generators import keyed_generators


def number_of(batch: dict[str, Tensor]) -> int:
    return int(batch["x"].double().sum() * 1e4) % 2**31


def torchs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(number_of(batch))
    return good(model, batch)


def torchs_afterwards(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Which the next micro-batch draws from."""
    losses = good(model, batch)
    torch.manual_seed(number_of(batch))
    return losses


def own_generator(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    draw = torch.Generator().manual_seed(number_of(batch))
    noise = torch.empty_like(batch["x"]).normal_(generator=draw)
    return good(model, {**batch, "x": batch["x"] + 5 * noise})


def pythons(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    random.seed(number_of(batch))
    return good(model, {**batch, "x": batch["x"] * random.gauss(0, 3)})


def numpys(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    np.random.seed(number_of(batch))
    return good(model, {**batch, "x": batch["x"] * float(np.random.randn())})


LOSSES = [torchs, torchs_afterwards, own_generator, pythons, numpys]


def moved(loss: Callable[..., Tensor], micro_batch: int) -> float:
    """By how many C the sum moves when the first record is another one, all else and all seeds the
    same; its own contribution moves by 2 C at most.
    """
    clip, sums = 0.05, []
    for shift in (0.0, 1.0):
        batch = records()
        batch["x"][0] += shift
        torch.manual_seed(3)
        model = small(dropout=0.5).train()
        bound = Clipper(clip, engine="bookkeeping", physical_batch_size=micro_batch)
        with keyed_generators(4):
            sums.append(bound.bind(model, loss).clip(batch).gradients)
    whole, rest = sums
    return sum(float((g - rest[k]).double().pow(2).sum()) for k, g in whole.items()) ** 0.5 / clip


@pytest.mark.parametrize("loss", LOSSES)
def test_numbers_that_are_seeded_from_records_are_refused(loss: Callable[..., Tensor]) -> None:
    for batch in (records(), rows(records(), 0)):
        with pytest.raises(ValueError, match="random numbers are seeded from the records"):
            Clipper(1.0).bind(small(dropout=0.5).train(), loss).clip(batch)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_the_look_one_record_changes_the_numbers_of_all(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    micro_batch = RECORDS // 2
    assert moved(good, micro_batch) < 2.0 + 1e-5 < 2.5 < moved(loss, micro_batch)


def dropping(batch: dict[str, Tensor], drawn: Tensor) -> dict[str, Tensor]:
    """The batch with half of its numbers."""
    return {**batch, "x": batch["x"] * (drawn < 0.5)}


def inside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(0)
    return good(model, batch)


def afterwards(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Which all but the first micro-batch draw from."""
    losses = good(model, batch)
    torch.manual_seed(0)
    return losses


def forked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return good(model, batch)


def made_anew(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    drawn = torch.rand(batch["x"].shape, generator=torch.Generator().manual_seed(0))
    return good(model, dropping(batch, drawn))


def numpys_inside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    np.random.seed(0)
    return good(model, dropping(batch, torch.from_numpy(np.random.rand(*batch["x"].shape))))


TORCHS, NUMPYS, PYTHONS = torch.Generator(), np.random.default_rng(0), random.Random(0)


def torchs_that_goes_on(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, dropping(batch, torch.rand(batch["x"].shape, generator=TORCHS)))


def numpys_that_goes_on(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, dropping(batch, torch.from_numpy(NUMPYS.random(batch["x"].shape))))


def pythons_that_goes_on(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    drawn = [PYTHONS.random() for _ in range(batch["x"].numel())]
    return good(model, dropping(batch, torch.tensor(drawn).view_as(batch["x"])))


def made_in_the_first_pass(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if not hasattr(model, "draws"):
        model.draws = np.random.default_rng(0)  # type: ignore[assignment]
    drawn = model.draws.random(batch["x"].shape)  # type: ignore[operator]
    return good(model, dropping(batch, torch.from_numpy(drawn)))


def made_in_the_backward_pass(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = model[0](batch["x"])
    if x.requires_grad:
        draw = torch.Generator().manual_seed(5)
        x.register_hook(lambda g: g * (torch.rand(g.shape, generator=draw) < 0.5))
    return F.cross_entropy(model[1:](x), batch["y"], reduction="none")


KNOWN = [
    inside, afterwards, forked, made_anew, numpys_inside, torchs_that_goes_on, numpys_that_goes_on,
    pythons_that_goes_on, made_in_the_first_pass, made_in_the_backward_pass,
]  # fmt: skip


@pytest.mark.parametrize("micro_batch", [1, RECORDS])
@pytest.mark.parametrize("loss", KNOWN)
def test_numbers_of_a_known_seed_are_refused(loss: Callable[..., Tensor], micro_batch: int) -> None:
    clipper = Clipper(1.0, physical_batch_size=micro_batch)
    with pytest.raises(ValueError, match="the run does not know the seed"):
        clipper.bind(small(dropout=0.5).train(), loss).clip(records())


@pytest.mark.parametrize(
    "loss", [inside, made_anew, numpys_that_goes_on, made_in_the_backward_pass]
)
def test_without_the_look_one_record_moves_the_others_to_other_numbers(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    sums = []
    for batch in (records(), rows(records(), *range(1, RECORDS))):
        monkeypatch.setattr(f"{__name__}.NUMPYS", np.random.default_rng(0))
        model = small(dropout=0.5 if loss is inside else 0.0).train()
        bound = Clipper(0.05, physical_batch_size=RECORDS).bind(model, loss)
        sums.append(bound.clip(batch).gradients)
    whole, rest = sums
    squares = [float((g - rest[name]).double().pow(2).sum()) for name, g in whole.items()]
    assert sum(squares) ** 0.5 / 0.05 > 1.5  # C is all that one record may add


def test_without_the_look_all_but_the_first_micro_batch_draw_known_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched_off(monkeypatch)

    def moved_by(loss: Callable[..., Tensor]) -> float:
        """By how many C the mean sum over secret streams moves when the first record goes."""
        sums: list[dict[str, Tensor]] = [{}, {}]
        for total, batch in zip(
            sums, (records(), rows(records(), *range(1, RECORDS))), strict=True
        ):
            bound = Clipper(0.05, physical_batch_size=4).bind(small(dropout=0.5).train(), loss)
            for seed in range(50):
                with keyed_generators(seed):
                    found = bound.clip(batch).gradients
                for name, g in found.items():
                    total[name] = total.get(name, 0) + g.double() / 50
        whole, rest = sums
        return sum(float((g - rest[k]).pow(2).sum()) for k, g in whole.items()) ** 0.5 / 0.05

    assert moved_by(good) < 1.3 < 2.0 < moved_by(afterwards)


@pytest.mark.parametrize("loss", [inside, made_anew, numpys_inside, numpys_that_goes_on])
def test_a_seed_that_is_set_later_is_refused_at_the_next_look(loss: Callable[..., Tensor]) -> None:
    model = small(dropout=0.5).train()
    model.rate = 0.0  # type: ignore[assignment]

    def grows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, batch) if model.rate else good(model, batch)

    bound = Clipper(1.0).bind(model, grows)
    bound.clip(records(), step=0)
    model.rate = 0.5  # type: ignore[assignment]
    with pytest.raises(ValueError, match="draw from torch's default generator"):
        bound.clip(records(), step=1)


def test_numbers_that_all_records_share_may_have_a_seed() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        own = torch.Generator().manual_seed(0)
        drawn = torch.rand(batch["x"].shape[1], generator=own)  # one a feature
        return good(model, dropping(batch, drawn))

    Clipper(1.0, physical_batch_size=RECORDS).bind(small(dropout=0.5).train(), loss).clip(records())


def test_numbers_that_all_records_share_may_come_from_the_default_generator() -> None:
    """It is seeded before each draw, and nothing else is drawn from it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return good(model, dropping(batch, torch.rand(batch["x"].shape[1])))

    Clipper(1.0).bind(small(), loss).clip(records(6))


def test_a_known_seed_is_refused_where_records_come_one_at_a_time() -> None:
    def alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["y"]) > 1:
            raise RuntimeError("one at a time")
        return inside(model, batch)

    with pytest.raises(ValueError, match="the run does not know the seed"):
        Clipper(1.0, engine="one-example").bind(small(dropout=0.5).train(), alone).clip(records(6))


def test_a_seed_that_the_operating_system_gives_is_known_to_nobody() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        random.seed()
        return good(model, batch)

    Clipper(1.0).bind(small(), loss).clip(records(6))


def test_the_default_generators_are_welcome() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        chosen = random.random() < 2.0 and np.random.rand() < 2.0
        drawn = torch.rand(batch["x"].shape, generator=torch.default_generator)
        return good(model, dropping(batch, drawn) if chosen else batch)

    Clipper(1.0, physical_batch_size=RECORDS).bind(small(dropout=0.5).train(), loss).clip(records())
