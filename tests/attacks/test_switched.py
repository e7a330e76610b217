"""A switch in plain Python that a rare record throws for good is seen in its own call, whatever the
step: all later records would find it thrown, alone and in company.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, rows, small
from attacks.switches import RARE, SWITCHES, back, is_rare, other
from quietgrad.clipping import Clipper, UserBatch
from quietgrad.clipping.soundness.switches.switched import Switches
from quietgrad.clipping.soundness.switches.torch_settings import TorchSettings

REFUSED = "was changed while records went through"
ENGINES: dict[str, dict[str, Any]] = {
    "together": {"engine": "bookkeeping", "physical_batch_size": RECORDS},
    "in parts": {"engine": "bookkeeping", "physical_batch_size": 7},
    "alone": {"engine": "one-example"},
}


@pytest.fixture(autouse=True)
def global_is_put_back() -> Iterator[None]:
    yield
    back()


def with_rare(batch: dict[str, Tensor], row: int = 5) -> dict[str, Tensor]:
    made = {name: t.clone() for name, t in batch.items()}
    made["x"][row, 0] = RARE
    return made


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Switches, "begin", lambda *arguments: None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", SWITCHES)
def test_it_is_refused_in_the_call_of_the_record_that_throws_it(where: str, engine: str) -> None:
    model, loss = SWITCHES[where]()
    bound = Clipper(0.2, **ENGINES[engine]).bind(model, loss)
    for step in range(6):
        before = bound.clip(records(), step=step).gradients
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(with_rare(records()), step=6)  # not a guarded step
    after = bound.clip(records(), step=8).gradients  # it was put back
    assert all(torch.allclose(after[name], g, rtol=1e-5, atol=1e-7) for name, g in before.items())


@pytest.mark.parametrize("where", SWITCHES)
def test_without_the_look_one_record_moves_all_later_ones(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet(monkeypatch)
    model, loss = SWITCHES[where]()
    bound = Clipper(0.2, **ENGINES["together"]).bind(model, loss)
    for step in range(6):
        before = bound.clip(records(), step=step).gradients
    bound.clip(with_rare(records()), step=6)
    after = bound.clip(records(), step=8).gradients
    moved = sum(float((g - after[name]).square().sum()) for name, g in before.items()) ** 0.5
    assert moved > 2 * 0.2


# ------------------------------------------------------------------------------------------------
# what waits to be looked at


def thrown_by_rare() -> tuple[nn.Module, Any, dict[str, Any]]:
    kept: dict[str, Any] = {"mode": "usual"}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if kept["mode"] == "other" else batch)
        if is_rare(batch["x"]):
            kept["mode"] = "other"
        return found

    return small(), loss, kept


def test_a_record_that_comes_alone_is_looked_at_beside_made_up_ones() -> None:
    model, loss, kept = thrown_by_rare()
    bound = Clipper(0.2).bind(model, loss)
    bound.clip(records(), step=0)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(rows(with_rare(records()), 5), step=4)
    assert kept["mode"] == "usual"


def test_where_none_can_be_made_up_it_waits_for_the_next_records() -> None:
    """Records of one whole number: nothing of them can be moved around."""
    seen: list[int] = []
    model = nn.Embedding(5, 3)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(batch["id"]).square().sum(-1) * (3.0 if seen else 1.0)
        if (batch["id"] == 4).any():
            seen.append(1)
        return found * (batch["id"] != 4)

    bound = Clipper(0.2).bind(model, loss)
    bound.clip({"id": torch.tensor([0, 1, 2, 3])}, step=0)
    bound.clip({"id": torch.tensor([4])}, step=4)
    assert seen  # the record's own loss shows nothing
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip({"id": torch.tensor([1, 2])}, step=5)
    assert not seen


@pytest.mark.parametrize("unit", ["views", "user"])
def test_rows_of_one_record_or_user_are_no_others(unit: str) -> None:
    """Before: the change stayed, as several rows had shown that nothing of theirs is another, and
    everybody else's was.
    """
    seen: list[int] = []
    model = nn.Embedding(5, 3)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch).square().sum(-1) * (3.0 if seen else 1.0)
        if (batch > 2).any():
            seen.append(1)
        return found * (batch < 3)

    def those(*ids: int) -> Any:
        if unit == "views":
            return torch.tensor(ids).view(-1, 2)
        return UserBatch(torch.tensor(ids), (2,) * (len(ids) // 2))

    settings: Any = {"views": 2} if unit == "views" else {"combined": "mean"}
    bound = Clipper(0.2, **settings).bind(model, loss)
    bound.clip(those(0, 1, 2, 0), step=0)
    bound.clip(those(3, 4), step=4)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(those(1, 2, 2, 0), step=5)
    assert not seen


def test_what_a_call_that_failed_has_changed_is_looked_at_in_the_next() -> None:
    model, loss, kept = thrown_by_rare()

    def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = loss(model, batch)
        if is_rare(batch["x"]):
            raise RuntimeError("out of memory")
        return found

    bound = Clipper(0.2).bind(model, failing)
    bound.clip(records(), step=0)
    with pytest.raises(RuntimeError, match="out of memory"):
        bound.clip(with_rare(records()), step=4)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(records(), step=5)
    assert kept["mode"] == "usual"


def test_what_is_another_one_with_each_call_is_looked_at_again_at_guarded_releases() -> None:
    """Once no kind of value is new: a switch that hides among words."""
    last = {"word": ""}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if last["word"] == "w99" else batch)
        if last["word"] != "w99":
            last["word"] = "w99" if is_rare(batch["x"]) else f"w{int(batch['y'].sum()) % 90}"
        return found

    bound = Clipper(0.2).bind(small(), loss)
    for step in range(150):
        bound.clip(records(seed=step), step=step)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(with_rare(records()), step=150)
        bound.clip(records(), step=255)


def test_a_change_is_looked_at_once_so_many_records_went_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A switch that the third rare record throws: a third change, to a kind that was known."""
    rare = [0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if rare[0] > 2 else batch)
        rare[0] += is_rare(batch["x"])
        return found

    bound = Clipper(0.2).bind(small(), loss)
    for step in (0, 4, 5):
        bound.clip(with_rare(records()) if step else records(), step=step)
    bound.clip(with_rare(records()), step=6)
    assert rare == [3]  # not seen yet
    monkeypatch.setattr("quietgrad.clipping.soundness.switches.switched.PAUSE", RECORDS)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(records(), step=8)
    assert rare == [2]
    with pytest.raises(ValueError, match=REFUSED):  # from then on in the call itself
        bound.clip(with_rare(records()), step=9)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_kept_for_one_length_is_refused_where_others_would_read_it(engine: str) -> None:
    """The first batch's length, to which every later record is brought: by a shorter record."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)
            self.length = 0

        def forward(self, words: Tensor) -> Tensor:
            self.length = self.length or words.shape[1]
            return self.head(self.words(words).sum(1) / self.length)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return good(model, {"x": batch["words"], "y": batch["y"]})

    source = torch.Generator().manual_seed(0)
    batch = {
        "words": torch.randint(0, 9, (RECORDS, 8), generator=source),
        "y": torch.randint(0, 3, (RECORDS,), generator=source),
    }
    model = Padded()
    with pytest.raises(ValueError, match="model was changed while records went through"):
        Clipper(0.2, **ENGINES[engine]).bind(model, loss).clip(batch, step=0)
    assert model.length == 0


# ------------------------------------------------------------------------------------------------
# what stays


class Keeping:
    """A loss that keeps much and reads nothing of it, with a weight that its caller sets."""

    def __init__(self) -> None:
        self.weight, self.calls, self.largest = 1.0, 0, 0.0
        self.log: list[float] = []
        self.by_label: dict[int, float] = {}
        self.rare: list[Tensor] = []
        self.last: Tensor | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        self.calls += 1
        self.log.append(float(found.detach().sum()))
        self.by_label[int(batch["y"][0])] = self.log[-1]
        self.largest = max(self.largest, self.log[-1])
        self.last = found.detach()
        if is_rare(batch["x"]):
            self.rare.append(batch["x"])
        return self.weight * found


@pytest.mark.parametrize("engine", ENGINES)
def test_what_nobody_reads_is_left_as_it_is(engine: str) -> None:
    loss = Keeping()
    bound = Clipper(0.2, **ENGINES[engine]).bind(small(), loss)
    for step in range(12):
        calls = len(loss.log)
        bound.clip(with_rare(records(seed=step)) if step == 6 else records(seed=step), step=step)
        assert loss.calls == len(loss.log) > calls
    assert loss.rare and loss.by_label


def test_what_the_caller_changes_between_calls_is_the_callers() -> None:
    """Also beside a count that the loss itself keeps in the same place."""
    loss = Keeping()
    bound = Clipper(0.2).bind(small(), loss)
    for step in range(20):
        loss.weight = 0.9**step
        bound.clip(records(seed=step), step=step)
    assert loss.weight == 0.9**19


def test_looks_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, looks = Keeping(), []
    right = Switches._look

    def counted(self: Switches, *arguments: Any) -> None:
        looks.append(1)
        right(self, *arguments)

    monkeypatch.setattr(Switches, "_look", counted)
    bound = Clipper(0.2).bind(small(), loss)
    for step in range(100):
        bound.clip(records(seed=step), step=step)
    first = len(looks)
    for step in range(100, 200):
        bound.clip(records(seed=step), step=step)
    assert 5 <= first <= 25
    assert len(looks) - first <= 5


def test_a_table_for_each_length_is_made_and_stays() -> None:
    made: dict[int, Tensor] = {}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        width = batch["x"].shape[1]
        if width not in made:
            made[width] = torch.ones(width)
        return good(model, {**batch, "x": batch["x"] * made[width]})

    bound = Clipper(0.2).bind(small(), loss)
    for step in range(6):
        bound.clip(records(), step=step)
    assert list(made) == [6]


def test_public_records_may_throw_it() -> None:
    model, loss, kept = thrown_by_rare()
    bound = Clipper(0.2).bind(model, loss, guard_batch=with_rare(records(8, seed=3), row=2))
    assert kept["mode"] == "other"
    for step in range(6):
        bound.clip(records(), step=step)
    assert kept["mode"] == "other"


def test_records_that_are_not_the_first_are_looked_at_too() -> None:
    """A switch that matters to some records alone."""
    seen: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        if is_rare(batch["x"]):
            seen.append(1)
        matters = (batch["y"] == 2) & bool(seen)
        return torch.where(matters, 3 * found, found)

    bound = Clipper(0.2).bind(small(), loss)
    batch = records()
    batch["y"] = torch.tensor([0] * 10 + [2] * 3 + [0] * 11)
    bound.clip(batch, step=0)
    with pytest.raises(ValueError, match=REFUSED):
        bound.clip(with_rare(batch), step=4)


def test_messages_tell_the_place_and_nothing_of_a_record() -> None:
    kept: dict[str, Any] = {}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, other(batch) if kept else batch)
        if is_rare(batch["x"]):
            kept[f"patient {float(batch['x'][0, 0])}"] = True
        return found

    bound = Clipper(0.2).bind(small(), loss)
    bound.clip(records(), step=0)
    with pytest.raises(ValueError, match=r"kept \(in .*loss\) was changed") as refused:
        bound.clip(with_rare(records()), step=4)
    assert "patient" not in str(refused.value) and str(RARE) not in str(refused.value)


# ------------------------------------------------------------------------------------------------
# settings of torch's


SETTINGS: dict[str, tuple[Any, Any]] = {
    "torch.set_default_dtype": (torch.set_default_dtype, torch.float64),
    "torch.set_num_threads": (torch.set_num_threads, 3),
    "torch.set_float32_matmul_precision": (torch.set_float32_matmul_precision, "medium"),
    "torch.use_deterministic_algorithms": (torch.use_deterministic_algorithms, True),
    "torch.set_autocast_enabled('cpu')": (partial(torch.set_autocast_enabled, "cpu"), True),
    "torch.backends.mkldnn.enabled": (torch._C._set_mkldnn_enabled, False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_record_that_switches_a_setting_of_torch_is_refused_in_its_call(name: str) -> None:
    switched, value = SETTINGS[name]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        if is_rare(batch["x"]):
            switched(value)
        return found

    bound = Clipper(0.2).bind(small(), loss)
    bound.clip(records(), step=0)
    before = TorchSettings()
    try:
        with pytest.raises(ValueError, match=re.escape(f"{name} is switched while the loss")):
            bound.clip(with_rare(records()), step=4)
    finally:
        left = before.switched()  # puts it back for other tests
    assert left is None
    bound.clip(records(), step=5)


def test_without_the_look_a_setting_moves_all_later_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchSettings, "switched", lambda self: None)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        if is_rare(batch["x"]):
            torch.set_default_dtype(torch.float64)
        return found * (torch.ones(1).element_size() // 4 % 2)

    bound = Clipper(0.2, physical_batch_size=RECORDS).bind(small(), loss)
    usual, rare = records(), with_rare(records())
    before = bound.clip(usual, step=0).gradients
    try:
        bound.clip(rare, step=4)
        after = bound.clip(usual, step=8).gradients
    finally:
        torch.set_default_dtype(torch.float32)
    moved = sum(float((g - after[name]).square().sum()) for name, g in before.items()) ** 0.5
    assert moved > 2 * 0.2


def test_what_is_too_large_to_be_put_back_is_refused_by_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quietgrad.clipping.soundness.switches.standing.MOST_BYTES", 100)
    bank, seen = torch.zeros(50, 6), [0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, {**batch, "x": batch["x"] + bank[0]})
        if is_rare(batch["x"]):
            bank[0] = 5.0
            seen[0] = 1
        return found

    bound = Clipper(0.2).bind(small(), loss)
    bound.clip(records(), step=0)
    with pytest.raises(ValueError, match=r"bank \(in .*loss\) changes .* too large to be put back"):
        bound.clip(with_rare(records()), step=4)
    assert seen == [0]  # what could be put back was
