"""What is made of the first records and kept for ever: refused before a private record is clipped,
and put back.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, With, good, records, rows, small, switched_off
from attacks.lazies import HIDDEN, PLACES, Pair, handles, mean_of, shifted
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.switches.switched import Switches

REFUSED = "which example the model and the loss met first"


@pytest.fixture(autouse=True)
def no_hooks_stay() -> Iterator[None]:
    yield
    while handles:
        handles.pop().remove()


def contribution(build: Callable[[], Pair], out: int = 0, clip: float = 0.2) -> float:
    """By how many C the sum moves, where each run begins anew with or without a record."""
    sums: list[dict[str, Tensor]] = []
    for left_out in (None, out):
        while handles:
            handles.pop().remove()
        model, loss = build()
        batch = records()
        batch["x"][out] = 40.0
        kept = [i for i in range(RECORDS) if i != left_out]
        bound = Clipper(clip, engine="bookkeeping", physical_batch_size=RECORDS).bind(model, loss)
        sums.append(bound.clip(rows(batch, *kept)).gradients)
    whole, rest = sums
    moved = sum(float((g - rest[name]).double().pow(2).sum()) for name, g in whole.items())
    return moved**0.5 / clip


@pytest.mark.parametrize("where", PLACES)
def test_what_is_made_of_the_first_records_and_kept_is_refused(where: str) -> None:
    for engine in ("auto", "bookkeeping", "one-example"):
        for batch in (records(), rows(records(), 0), rows(records(), 0, 1)):
            model, loss = PLACES[where]()
            with pytest.raises(ValueError, match=REFUSED):
                Clipper(1.0, engine=engine).bind(model, loss).clip(batch)


@pytest.mark.parametrize("where", PLACES)
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    assert contribution(PLACES[where]) > 1.5


def test_the_rest_of_the_guard_does_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "look_at_the_first", lambda *_: ())
    monkeypatch.setattr(Switches, "begin", lambda *_: None)
    assert contribution(PLACES["list_in_a_closure"]) > 1.5


@pytest.mark.parametrize("where", HIDDEN)
def test_what_is_out_of_reach_is_filled_by_a_made_up_record(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contribution(HIDDEN[where]) < 1.0 + 1e-5
    switched_off(monkeypatch)
    assert contribution(HIDDEN[where]) > 1.5


def test_messages_name_the_place_and_nothing_of_a_record() -> None:
    named = {
        "list_in_a_closure": "kept (in list_in_a_closure.<locals>.loss)",
        "attribute_of_a_layer_inside": "model.1.scale",
        "global_dictionary": "global attacks.lazies._KEPT",
        "class_attribute": "class attribute class_attribute.<locals>.Shared.mean",
        "default_argument": "a default argument of default_argument.<locals>.loss",
    }
    for where, place in named.items():
        model, loss = PLACES[where]()
        with pytest.raises(ValueError, match=REFUSED) as refused:
            Clipper(1.0).bind(model, loss).clip(records())
        assert place in str(refused.value) and str(RECORDS) not in str(refused.value)

    seen: dict[str, Tensor] = {}

    def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.setdefault(f"patient {float(batch['x'][0, 0])}", mean_of(batch))
        return good(model, shifted(batch, next(iter(seen.values()))))

    with pytest.raises(ValueError, match=REFUSED) as refused:
        Clipper(1.0).bind(small(), by_name).clip(records())
    assert "patient" not in str(refused.value)


def test_public_records_may_fill_it() -> None:
    model, loss = PLACES["list_in_a_closure"]()
    public = records(8, seed=3)
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(model, loss, guard_batch=public)
    kept: Any = loss.__closure__[0].cell_contents  # type: ignore[attr-defined]
    before = kept[0].clone()
    for step in range(3):
        bound.clip(records(), step=step)
    assert len(kept) == 1 and torch.equal(kept[0], before)


# ------------------------------------------------------------------------------------------------
# gathered now, read later


class Gathering:
    """Means of the first batches, which the loss reads from the day on that it is opened."""

    def __init__(self, number: bool) -> None:
        self.opened, self.number = False, number
        self.total: Any = 0.0 if number else torch.zeros(1, 6)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mean = mean_of(batch)
        if not self.opened:
            self.total = 0.9 * self.total + 0.02 * (float(mean.mean()) if self.number else mean)
        return good(model, shifted(batch, self.total) if self.opened else batch)


@pytest.mark.parametrize("number", [True, False])
@pytest.mark.parametrize("public", [True, False])
def test_what_is_gathered_first_and_read_later_is_refused_at_the_next_guarded_release(
    number: bool, public: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken in (False, True):
        loss = Gathering(number)
        look = {"guard_batch": records(8, seed=3)} if public else {}
        bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), loss, **look)
        for step in range(4):
            bound.clip(records(), step=step)
        loss.opened = True
        bound.clip(records(), step=4)
        if broken:
            monkeypatch.setattr(guard, "require_unread", lambda *_: None)
            bound.clip(records(), step=7)
            continue
        was = loss.total if number else loss.total.clone()
        with pytest.raises(ValueError, match=r"per_example_loss.total keeps .* and is read now"):
            bound.clip(records(), step=7)
        assert np.array_equal(was, loss.total)


# ------------------------------------------------------------------------------------------------
# what is allowed, and is put back


def test_what_depends_on_shapes_alone_and_what_nothing_reads_is_allowed() -> None:
    class Rotating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}
            self.calls, self.last = 0, None

        @functools.lru_cache  # noqa: B019
        def angle(self, width: int) -> float:
            return 1.0 / width

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x.detach()
            width = x.shape[1]
            if width not in self.tables:
                self.tables[width] = torch.cos(torch.arange(width) * self.angle(width))
            return x * self.tables[width]

    model = nn.Sequential(nn.Linear(6, 8), Rotating(), nn.Linear(8, 3))
    losses: list[float] = []
    met: set[float] = set()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        losses.extend(found.tolist())
        met.update(batch["x"][:, 0].tolist())
        return found

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(model, loss)
    for step in range(5):
        bound.clip(records(), step=step)
        losses.append(0.0)
    assert len(losses) > 5 * RECORDS and len(met) >= RECORDS


def test_everything_is_put_back() -> None:
    draw, numbers, own = (
        torch.Generator().manual_seed(5),
        random.Random(5),
        np.random.default_rng(5),
    )
    array, table = np.zeros(3), torch.zeros(3)

    class Everything(With):
        shared: ClassVar[list[Any]] = []

        def forward(self, x: Tensor) -> Tensor:
            self.made, Everything.made = x.mean(), x.sum()
            self.shared.append(x)
            array[0] += 1
            table[0] += 1
            table.data[1] += 1
            x = x + torch.rand((), generator=draw) + numbers.random() + own.random()
            return super().forward(x)

    model = Everything(lambda model, h: h)
    shared, before = Everything.shared, draw.get_state()
    snapshot = Snapshot(model, good)
    assert snapshot.changed() == []
    one = [float(good(model, records()).detach().sum()) for _ in range(2)]
    assert one[0] != one[1] and snapshot.changed()
    assert snapshot.put_back() == [] and snapshot.changed() == []
    assert shared == [] and not hasattr(model, "made") and not hasattr(Everything, "made")
    assert not array.any() and not table.any() and torch.equal(draw.get_state(), before)
    assert one[0] == float(good(model, records()).detach().sum())


def test_a_large_tensor_that_is_written_into_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quietgrad.clipping.soundness.kept.snapshot.MOST_BYTES", 100)
    bank = torch.zeros(50, 6)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not bank.any():
            bank[:] = batch["x"].mean(0)
        return good(model, shifted(batch, bank[:1]))

    with pytest.raises(ValueError, match=r"bank \(in .* is too large to be put back"):
        Clipper(1.0).bind(small(), loss).clip(records())
