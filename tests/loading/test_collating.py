"""What a collate_fn makes of several records, or of the first one and keeps, in a run's loader."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from quietgrad import PrivacyConfig
from quietgrad.clipping import Clipper
from quietgrad.loading.collating import Collating

N, C = 24, 0.2
Made = Callable[[list[Any]], Any]


def records(shift: float = 0.0) -> list[tuple[Tensor, int]]:
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    x[0] += shift
    return [(row, i % 3) for i, row in enumerate(x)]


def mixup() -> Made:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return 0.5 * x + 0.5 * x.roll(1, 0), y

    return collate


def cut_from_the_first() -> Made:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return torch.where(torch.rand(6) < 0.5, x, x[:1]), y

    return collate


def of_the_batch() -> Made:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return (x - x.mean(0)) / (x.std(0) + 1e-3), y

    return collate


def of_the_first_batch() -> Made:
    kept: list[Tensor] = []

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        if not kept:
            kept.append(x.mean(0))
        return x - kept[0], y

    return collate


@dataclass
class Rows:
    x: Tensor
    y: Tensor

    def __getitem__(self, i: int) -> Tensor:
        return (self.x, self.y)[i]


def mixed_in_a_dataclass() -> Made:
    def collate(rows: list[Any]) -> Any:
        return Rows(*mixup()(rows))

    return collate


def length_of_the_batch(rows: list[Any]) -> tuple[Tensor, Tensor, float]:
    x, y = default_collate(rows)
    return x, y, float(x.norm())


@dataclass
class WithMean:
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.mean = self.x.mean(0).tolist()  # no field, and no tensor


def own_names(rows: list[Any]) -> dict[str, Any]:
    """A word for each record, and a number that is the same whatever they are."""
    x, y = default_collate(rows)
    return {"x": x, "y": y, "names": [f"{row.sum():.6f}" for row, _ in rows], "scale": 0.5}


def noisy() -> Made:
    """Noise of each record's own, from torch's generator."""

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x + 0.1 * torch.randn(x.shape), y

    return collate


def noisy_by_itself() -> Made:
    draw = np.random.default_rng(5)

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x + torch.from_numpy(draw.normal(size=x.shape)).float(), y

    return collate


def padded() -> Made:
    def collate(rows: list[Any]) -> Any:
        x = nn.utils.rnn.pad_sequence([x[: 3 + y] for x, y in rows], batch_first=True)
        return F.pad(x, (0, 6 - x.shape[1])), torch.tensor([y for _, y in rows])

    return collate


MIXING = [mixup, mixed_in_a_dataclass, cut_from_the_first, of_the_batch, of_the_first_batch]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def clipped(
    collate: Made | None,
    shift: float,
    size: int = N,
    workers: int = 0,
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy,
    few: list[Any] | None = None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    config = PrivacyConfig(
        noise_multiplier=1.0, sample_rate=1.0, steps=1, max_grad_norm=C, seed=7,
        data_are_public=True,
    )  # fmt: skip

    with config.build(N).start() as run:
        loader = run.loader(
            records(shift) if few is None else few,
            physical_batch_size=size,
            collate_fn=collate,
            num_workers=workers,
        )
        return run.clip(model, loss, next(iter(loader))).gradients


def moved(made: Callable[[], Made], size: int = N) -> float:
    """By how many C the sum moves where the first record is another one: 2 C are its own."""
    one, other = (clipped(made(), shift, size) for shift in (0.0, 30.0))
    return sum(float((g - other[name]).square().sum()) for name, g in one.items()) ** 0.5 / C


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("made", MIXING)
def test_rows_that_are_made_of_several_records_are_refused(
    made: Callable[[], Made], workers: int
) -> None:
    with pytest.raises(ValueError, match="a row of several records"):
        clipped(made(), 0.0, workers=workers)


@pytest.mark.parametrize("made", MIXING)
def test_without_the_look_one_record_moves_the_rows_of_others(
    made: Callable[[], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collating, "_examine", lambda *_: None)
    torch.manual_seed(1)
    assert moved(made) > 2.02
    assert moved(padded) < 2.0 + 1e-5


def test_a_first_micro_batch_of_one_record_leaves_nothing() -> None:
    made = of_the_first_batch()
    collating, few = Collating(made), records()
    collating(few[:1])
    with pytest.raises(ValueError, match="a row of several records"):
        collating(few[:4])


@pytest.mark.parametrize("place", [1, 3])
def test_a_row_that_is_made_of_the_one_before_it_is_seen_where_it_stands(place: int) -> None:
    """No other record's row is made of two."""

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        x[place] += x[place - 1]
        return x, y

    with pytest.raises(ValueError, match="a row of several records"):
        Collating(collate)(records()[:5])


@pytest.mark.parametrize("made", [noisy, noisy_by_itself, padded])
def test_rows_of_their_own_are_allowed_and_their_numbers_left_alone(
    made: Callable[[], Made],
) -> None:
    collating, plain, few = Collating(made()), made(), records()
    for _ in range(3):
        torch.manual_seed(3)
        found = collating(few[:5])
        torch.manual_seed(3)
        assert torch.equal(found[0], plain(few[:5])[0])


def by_what_stands_beside(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(30 * batch[0] / batch[2]), batch[1], reduction="none")


@pytest.mark.parametrize(
    "made", [length_of_the_batch, lambda rows: WithMean(*default_collate(rows))]
)
def test_a_number_of_the_whole_batch_beside_the_rows_is_refused(made: Made) -> None:
    with pytest.raises(ValueError, match="makes of several records beside their rows"):
        Collating(made)(records()[:6])


def test_without_the_look_beside_the_rows_one_record_moves_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quietgrad.loading.collating._same_beside", lambda *_, **__: True)
    monkeypatch.setattr(Collating, "_require_no_count", lambda *_: None)
    sums = [clipped(length_of_the_batch, s, loss=by_what_stands_beside) for s in (0.0, 300.0)]
    moved = sum(float((g - sums[1][name]).square().sum()) for name, g in sums[0].items()) ** 0.5
    assert moved > 3 * C  # 2 C are the record's own


def test_words_of_each_record_and_constants_may_stand_beside_the_rows() -> None:
    collating = Collating(own_names)
    for n in (2, 4, 6):
        assert len(collating(records()[:n])["names"]) == n


def scaled(draw: Callable[[int], Any]) -> Made:
    """Records times what is drawn, of their number."""

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return x * torch.as_tensor(draw(len(rows)), dtype=x.dtype).view(-1, 1), y

    return collate


ONE_FOR_ALL: dict[str, Callable[[int], Any]] = {
    "torch": lambda n: 2.0 * (torch.rand(()) < 0.5),
    "python": lambda n: random.choice([0.0, 2.0]),
    "numpy": lambda n: np.random.choice([0.0, 2.0]),
    "beside their own": lambda n: 2.0 * (torch.rand(()) < 0.5) + 1e-3 * torch.rand(n),
}
ITS_OWN: dict[str, Callable[[int], Any]] = {
    "torch": lambda n: 2.0 * (torch.rand(n) < 0.5),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.5)),
    "python": lambda n: [random.choice([0.0, 2.0]) for _ in range(n)],
    "numpy": lambda n: np.random.choice([0.0, 2.0], n),
    "normal numpy": lambda n: np.random.randn(n),
    "none": lambda n: 1.0,
}


@pytest.mark.parametrize("kind", ONE_FOR_ALL)
def test_a_number_that_all_records_of_a_micro_batch_share_is_refused(kind: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    with pytest.raises(ValueError, match="a random number that all records of a micro-batch share"):
        Collating(scaled(ONE_FOR_ALL[kind]))(records())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tobytes())


@pytest.mark.parametrize("kind", ITS_OWN)
def test_numbers_of_each_record_are_taken_wherever_generators_stand(kind: str) -> None:
    for before in (0, 617, 620, 622, 623):  # numpy's and Python's make 624 words at a time
        random.seed(0)
        np.random.seed(0)
        for _ in range(before):
            random.getrandbits(32)
            np.random.bytes(4)
        assert len(Collating(scaled(ITS_OWN[kind]))(records()[:5])[0]) == 5


@pytest.mark.parametrize("kind", ONE_FOR_ALL)
def test_without_the_look_one_record_reveals_records_that_cancel(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches of two, and one record more in front that adds nothing."""
    monkeypatch.setattr(Collating, "_require_own_numbers", lambda *_: None)
    one = torch.ones(6)
    signs = [1.0, -1.0, -1.0, 1.0] * 8

    def summed(first: list[float]) -> float:
        collating = Collating(scaled(ONE_FOR_ALL[kind]))
        rows = [(one, sign) for sign in first + signs]
        total = torch.zeros(6)
        for i in range(0, len(rows), 2):
            x, y = collating(rows[i : i + 2])
            total += (x * y.unsqueeze(1)).sum(0).float() / 6**0.5 / 2  # norm 1 at most
        return float(total.norm())

    assert max(summed([]) for _ in range(3)) < 0.1
    assert max(summed([0.0]) for _ in range(12)) > 1.5


def over_their_number(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x / len(rows), y


def number_beside(told: Callable[[int], Any]) -> Made:
    return lambda rows: (*default_collate(rows), told(len(rows)))


COUNTS: dict[str, Made] = {
    "rows": over_their_number,
    "number": number_beside(lambda n: n),
    "share": number_beside(lambda n: 1 / n),
    "text": number_beside(lambda n: "x" * n),
    "list": number_beside(lambda n: [n]),
    "array": number_beside(lambda n: np.zeros((1, n))),
    "lists": number_beside(lambda n: [[0] * n] * n),
    "pairs": lambda rows: (*default_collate(rows), torch.zeros(len(rows), len(rows))),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_what_follows_from_how_many_records_there_are_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="makes something of how many records there are"):
        Collating(COUNTS[kind])(records()[:6])


def by_their_number(model: nn.Module, batch: Any) -> Tensor:
    return 7e-4 * batch[2] ** 2 * F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_without_the_look_at_their_number_one_record_moves_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Collating, "_require_no_count", lambda *_: None)
    collating, model = Collating(COUNTS["number"]), nn.Linear(6, 3)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    rows = [(torch.ones(6), 0)] * 11
    clipper = Clipper(C, engine="one-example")
    sums = [clipper.clip(model, by_their_number, collating(rows[:n])).gradients for n in (10, 11)]
    moved = sum(float((g - sums[1][name]).square().sum()) for name, g in sums[0].items()) ** 0.5
    assert moved > 2 * C  # C is all that adding one may do


def test_the_number_of_words_beside_the_rows_is_the_records_own() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) / len(batch[2]) ** 2

    def own(model: nn.Module, batch: Any) -> Tensor:
        louder = torch.tensor([float(len(word)) for word in batch[2]])
        return cross_entropy(model, batch) * louder

    for collate in (None, number_beside(lambda n: ["word"] * n)):
        few = [(*row, "word") for row in records()] if collate is None else records()
        with pytest.raises(ValueError, match="the loss of one example depends on other examples"):
            clipped(collate, 0.0, loss=loss, few=few)
        assert clipped(collate, 0.0, loss=own, few=few)


def gathered_first(micro_batches: int) -> Made:
    """Their mean is taken off all that come after."""
    kept: list[Tensor] = []

    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        if len(kept) < micro_batches:
            kept.append(x.mean(0))
            return x, y
        return x - sum(kept) / micro_batches, y

    return collate


@pytest.mark.parametrize("first", [1, 3, 5])
def test_what_is_gathered_at_first_and_used_later_is_refused(first: int) -> None:
    collating, few, made = Collating(gathered_first(first)), records(), 0
    with pytest.raises(ValueError, match="uses what it kept of others"):
        for _ in range(8):
            collating(few[:4])
            made += 1
    assert made == {1: 1, 3: 3, 5: 7}[first]  # each at the first look since


def test_what_is_kept_and_not_used_is_allowed() -> None:
    seen: list[Any] = []
    collating = Collating(lambda rows: seen.append(rows) or default_collate(rows))
    for _ in range(8):
        collating(records()[:4])
    assert len(seen) == 8


def test_a_first_batch_without_records_leaves_nothing() -> None:
    """The first record shows what a batch looks like, and is in none."""
    config = PrivacyConfig(
        noise_multiplier=1.0, sample_rate=0.06, steps=24, max_grad_norm=C, seed=1,
        data_are_public=True,
    )  # fmt: skip
    model, made = nn.Linear(6, 3), of_the_first_batch()
    with config.build(N).start() as run:
        loader = run.loader(records(), collate_fn=made, steps=24)
        batches = iter(loader)
        (empty,) = next(batches)
        assert not len(empty.records[0])
        with pytest.raises(ValueError, match="a row of several records"):  # before: taken
            run.release(run.clip(model, cross_entropy, empty))
            for batch in batches:
                run.release(run.clip(model, cross_entropy, batch))


PICTURES = [torch.full((6,), float(i)).to(torch.uint8) for i in range(N)]
OF_TWO_TYPES: dict[str, tuple[list[Any], Any]] = {
    "pictures": (PICTURES, torch.ones(6)),
    "arrays": ([x.numpy() for x in PICTURES], np.ones(6)),
    "numbers": ([1_700_000_000 + i for i in range(N)], 0.5),
    "in a list": ([[i, 0.5] for i in range(N)], [1.5, 0.5]),
}


@pytest.mark.parametrize("kind", OF_TWO_TYPES)
def test_values_of_two_types_are_refused(kind: str) -> None:
    of_one, other = OF_TWO_TYPES[kind]
    collating = Collating(default_collate)
    assert collating(of_one) is not None and collating([other, other]) is not None
    for mixed in ([*of_one, other], [other, *of_one]):
        with pytest.raises(ValueError, match="values of different types in one place"):
            collating(mixed)
    with pytest.raises(ValueError, match=r"values of different types|a row of several records"):
        Collating(lambda rows: default_collate(rows))([other, *of_one[:3]])


def test_without_the_look_at_types_one_record_changes_the_numbers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes wrap below 0, and floats do not."""
    monkeypatch.setattr("quietgrad.loading.collating.collate_one_type", default_collate)
    labelled = [(x, i % 3) for i, x in enumerate(PICTURES)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, ((batch[0] - 100) / 50, batch[1]))

    sums = [
        clipped(None, 0.0, loss=loss, few=[(first, 0), *labelled[1:]])
        for first in (PICTURES[0], torch.zeros(6))
    ]
    moved = sum(float((g - sums[1][name]).square().sum()) for name, g in sums[0].items()) ** 0.5
    assert moved > 3 * C  # 2 C are the record's own
