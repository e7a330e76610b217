"""Attacks on the guard: models and losses in which one record moves what another contributes, tried
the way a careless or hostile user would.

Every attack is refused before its first release. With the guard switched off, taking out one record
moves the clipped sum by more than C: that is the harm, and what shows that the tests test
something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import (
    RECORDS,
    KeepsMean,
    Loss,
    Remembers,
    With,
    good,
    hardest_eight,
    hardest_sixteen,
    in_training_only,
    info_nce,
    mixed_up,
    moved,
    records,
    rows,
    small,
    sorted_by_first,
    switched_off,
    without_mean,
)
from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper


def normalised(model: With, h: Tensor) -> Tensor:
    spread = h.detach().std(0, unbiased=False) if len(h) > 1 else torch.ones(8)
    return (h - h.detach().mean(0)) / (spread + 1e-2)


def each_feature_sorted(model: With, h: Tensor) -> Tensor:
    return h.sort(dim=0).values


def across_the_batch(model: With, h: Tensor) -> Tensor:
    return torch.softmax(h @ h.T, dim=1) @ h


class _Centred(torch.autograd.Function):
    """Nothing forward; backward the gradients' mean over the batch is subtracted."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0, keepdim=True)


class _OfOneSize(torch.autograd.Function):
    """Nothing forward; backward the batch's gradient is scaled to norm 1 as a whole."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


def by_the_number(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, batch) / len(batch["y"])


def by_the_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, batch) * torch.arange(1, len(batch["y"]) + 1)


def centred_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits - logits.detach().mean(0), batch["y"], reduction="none")


def each_text_once(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Copies of an earlier record count nothing."""
    same = (batch["x"].unsqueeze(0) == batch["x"].unsqueeze(1)).all(2)
    return good(model, batch) * ~same.tril(-1).any(1)


def shared_by_copies(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    same = (batch["x"].unsqueeze(0) == batch["x"].unsqueeze(1)).all(2)
    return good(model, batch) / same.sum(1)


class _OfCopiesOnce(torch.autograd.Function):
    """Nothing forward; backward only the first of equal rows has a gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.later = (torch.cdist(h, h) < 1e-3).tril(-1).any(1)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ~ctx.later.unsqueeze(1)


@dataclass(frozen=True)
class Attack:
    name: str
    model: Callable[[], nn.Module]
    loss: Loss = good
    harmful: bool = True  # whether the sum moves by more than C on these records

    def __str__(self) -> str:
        return self.name


ATTACKS = [
    Attack("contrastive-loss", small, info_nce),
    Attack("batch-mean-in-the-loss", small, centred_logits),
    Attack("hard-examples-mined", small, hardest_eight),
    Attack("sixteen-hard-examples-mined", small, hardest_sixteen, harmful=False),
    Attack("divided-by-the-number-of-examples", small, by_the_number, harmful=False),
    Attack("weighted-by-place", small, by_the_place, harmful=False),
    Attack("detached-batch-mean", lambda: With(without_mean)),
    Attack("detached-batch-statistics", lambda: With(normalised)),
    Attack("detached-batch-statistics-under-dropout", lambda: With(normalised, dropout=0.3),
    harmful=False),
    Attack("batch-mean-in-training-only-under-dropout", lambda: With(in_training_only, dropout=0.3),
    harmful=False),
    Attack("sorted-batch", lambda: With(sorted_by_first)),
    Attack("each-feature-sorted", lambda: With(each_feature_sorted)),
    Attack("attention-over-the-batch", lambda: With(across_the_batch)),
    Attack("mixup", lambda: With(mixed_up), harmful=False),
    Attack("backward-pass-that-centres", lambda: With(lambda model, h: _Centred.apply(h)),
    harmful=False),
    Attack("backward-pass-that-rescales", lambda: With(lambda model, h: _OfOneSize.apply(h)),
    harmful=False),
    Attack("copies-dropped", small, each_text_once, harmful=False),
    Attack("copies-share-one-record", small, shared_by_copies, harmful=False),
    Attack("backward-pass-that-drops-copies", lambda: With(lambda model, h: _OfCopiesOnce.apply(h)),
    harmful=False),
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_attack_is_refused(attack: Attack) -> None:
    for engine in ("auto", "bookkeeping"):
        with pytest.raises(ValueError, match="depends on other examples"):
            Clipper(1.0, engine=engine, physical_batch_size=RECORDS).clip(
                attack.model(), attack.loss, records()
            )


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.harmful], ids=str)
def test_without_the_guard_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    attack: Attack, monkeypatch
) -> None:
    switched_off(monkeypatch)
    assert moved(attack.model(), attack.loss, records()) > 1.02
    assert (
        moved(small(), good, records()) < 1.0 + 1e-5
    )  # and by no more where each example is on its own


# ------------------------------------------------------------------------------------------------
# the first batch


@pytest.mark.grid(5, "the same attacks as in the test before")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_first_batch_of_one_record_skips_nothing(attack: Attack) -> None:
    """As the issue was filed: one record first, then the real batch."""
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(attack.model(), attack.loss)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(rows(records(), 0))  # refused here by made-up records, or open
        bound.clip(records())


def test_first_batch_of_one_record_is_refused_by_made_up_ones() -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).bind(small(), info_nce).clip(rows(records(), 0))


@pytest.mark.grid(5, "the same attacks as in the test before")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_empty_first_batch_skips_nothing(attack: Attack) -> None:
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(attack.model(), attack.loss)
    assert not any(g.any() for g in bound.clip(rows(records())).gradients.values())
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records())


def test_two_identical_first_records_do_not_satisfy_the_guard_for_good() -> None:
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(With(without_mean), good)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(rows(records(), 0, 0))
        bound.clip(records())


def test_public_records_are_examined_when_the_clipper_is_bound() -> None:
    public = records(8, seed=3)
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).bind(small(), info_nce, guard_batch=public)
    with pytest.raises(ValueError, match="fewer than two"):
        Clipper(1.0).bind(small(), good, guard_batch=rows(public, 0))
    seen: list[Tensor] = []

    def watching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch["x"])
        return good(model, batch)

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), watching, guard_batch=public)
    seen.clear()
    bound.clip(records(), step=1)  # a guarded step
    private = [x for x in seen if not torch.isin(x[1:], public["x"]).all()]  # but for louder ones
    assert (
        len(seen) > 1 and len(private) == 1
    )  # the pass that clips, and no other, saw private records


def test_undecided_batches_are_taken_one_example_at_a_time() -> None:
    """Losses that draw from numpy cannot be compared; a batch of not-a-numbers neither."""
    import numpy as np

    together: list[int] = []

    def random_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        together.append(len(batch["y"]))
        return good(model, batch) * torch.from_numpy(np.random.rand(len(batch["y"])) + 0.5).float()

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), random_loss)
    bound.clip(records())
    assert together[-RECORDS:] == [1] * RECORDS


# ------------------------------------------------------------------------------------------------
# mutants: a guard with a part missing


MIXING = "quietgrad.clipping.soundness.mixing"
MUTANTS = [
    ("losses-not-compared", f"{MIXING}.close", lambda *a: True, "hard-examples-mined"),
    ("factors-not-compared", f"{MIXING}.require_same", lambda *a: None,
     "backward-pass-that-rescales"),
    ("first-batch-of-one-counts", "quietgrad.clipping.soundness.guard.with_companions",
     lambda *a: None, "contrastive-loss"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "broken", "attack"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_each_part_of_the_guard_is_needed(
    name: str, part: str, broken: Any, attack: str, monkeypatch
) -> None:
    chosen = next(a for a in ATTACKS if a.name == attack)
    few = rows(records(), 0) if "one" in name else records()
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(chosen.model(), chosen.loss)
    monkeypatch.setattr(part, broken)
    if "losses" in name:  # its factors would show it too, and a record many times
        monkeypatch.setattr(f"{MIXING}.require_room_for_all", lambda *a: None)
        monkeypatch.setattr(f"{MIXING}.require_same", lambda *a: None)
    bound.clip(few)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=RECORDS).bind(chosen.model(), chosen.loss).clip(few)


# ------------------------------------------------------------------------------------------------
# messages


def test_messages_hold_no_sizes_of_private_batches() -> None:
    n, other = 37, 36
    batch = {"x": torch.randn(n, 6), "y": torch.randint(0, 3, (n,))}
    wrong: list[tuple[nn.Module, Loss, dict[str, Tensor]]] = [
        (small(), good, {"x": batch["x"], "y": batch["y"][:other]}),
        (small(), lambda m, b: good(m, b)[:other], batch),
        (small(), lambda m, b: good(m, b).mean(), batch),
        (small(), info_nce, batch),
        (KeepsMean("in-place"), good, batch),
        (Remembers(), good, batch),
    ]
    for model, loss, chosen in wrong:
        with pytest.raises(ValueError) as refused:
            Clipper(1.0, physical_batch_size=n).clip(model, loss, chosen)
        assert str(n) not in str(refused.value) and str(other) not in str(refused.value)


def test_bound_clipper_is_what_bind_returns() -> None:
    assert isinstance(Clipper(1.0).bind(small(), good), BoundClipper)
