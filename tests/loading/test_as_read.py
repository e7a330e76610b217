"""What a loop writes into the micro-batches of a run's loader, before it clips them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.loading import batches

N, C = 24, 0.2
PRIVACY = PrivacyConfig(
    noise_multiplier=1.0, sample_rate=1.0, steps=1, max_grad_norm=C, seed=7, data_are_public=True
)


def records(shift: float = 0.0) -> list[dict[str, Any]]:
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    x[0] += shift
    return [{"x": row, "y": i % 3, "name": f"record {i}"} for i, row in enumerate(x)]


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def in_place(part: Any) -> None:
    part.records["x"].sub_(part.records["x"].mean(0))


def by_numpy(part: Any) -> None:
    x = part.records["x"].numpy()
    x -= x.mean(0)


def by_data(part: Any) -> None:
    part.records["x"].data -= part.records["x"].mean(0)


def another_tensor(part: Any) -> None:
    part.records["x"] = part.records["x"] - part.records["x"].mean(0)


def a_number_beside(part: Any) -> None:
    part.records["n"] = len(part.records["x"])


def words_beside(part: Any) -> None:
    part.records["name"][0] = "another"


def between_what_is_looked_at(part: Any) -> None:
    """Torch counts it, and no entry that is compared is another one."""
    part.records["x"].view(-1)[1] += 100


def another_between(part: Any) -> None:
    """In another tensor, whose writes torch has not counted."""
    x = part.records["x"].numpy().copy()
    x.reshape(-1)[1] += 100
    part.records["x"] = torch.from_numpy(x)


CHANGES = [in_place, by_numpy, by_data, another_tensor, a_number_beside, words_beside]
CHANGES += [between_what_is_looked_at, another_between]


def clipped(change: Callable[[Any], None], shift: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    with PRIVACY.build(N).start() as run:
        (part,) = next(iter(run.loader(records(shift), physical_batch_size=N)))
        change(part)
        return run.clip(model, loss, part).gradients


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_loop_makes_of_a_micro_batch_is_not_clipped(change: Callable[[Any], None]) -> None:
    with pytest.raises(RuntimeError, match="the records of this micro-batch were changed"):
        clipped(change)


def test_a_micro_batch_keeps_its_records_and_whose_they_are() -> None:
    with PRIVACY.build(N).start() as run:
        (part,) = next(iter(run.loader(records(), physical_batch_size=N)))
        for name in ("records", "sizes", "release", "source", "is_last"):
            with pytest.raises(AttributeError, match=f"a MicroBatch's {name} cannot be set"):
                setattr(part, name, None)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_was_read_is_not_copied(copied: Callable[[Any], Any]) -> None:
    """Before: a copy in another micro-batch's place was clipped too, 2 C a record."""
    with PRIVACY.build(N).start() as run:
        batch = next(iter(run.loader(records(), physical_batch_size=4)))
        for read in (batch, next(iter(batch))):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled.*count twice"):
                copied(read)


def test_what_a_loop_looks_at_is_clipped() -> None:
    def looks(part: Any) -> None:
        float(part.records["x"].mean()), len(part.records["name"]), part.records["x"].numpy()

    found, plain = clipped(looks), clipped(lambda part: None)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("change", [in_place, by_numpy, another_tensor])
def test_without_the_look_one_record_moves_all_others(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches.AsRead, "still", lambda *_: True)
    one, other = (clipped(change, shift) for shift in (0.0, 1000.0))
    moved = sum(float((g - other[name]).square().sum()) for name, g in one.items()) ** 0.5
    assert moved > 3 * C  # 2 C are the record's own


def test_a_micro_batch_is_taken_once() -> None:
    micro = batches.MicroBatch((torch.ones(2, 3),), True, 0, object())
    micro.take()
    with pytest.raises(RuntimeError, match="was clipped already"):
        micro.take()
