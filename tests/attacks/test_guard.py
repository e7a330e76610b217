"""Attacks on the guard: models and losses in which one record moves what another contributes, tried
the way a careless or hostile user would.

Every attack is refused before its first release. With the guard switched off, taking out one record
moves the clipped sum by more than C: that is the harm, and what shows that the tests test
something.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper, per_example_norms
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.soundness.guard import Guard, is_guarded
from quietgrad.plan import PrivacyConfig

Loss = Callable[[nn.Module, Any], Tensor]
RECORDS = 24


def records(n: int = RECORDS, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n, 6, generator=source) + 1.0,
        "y": torch.randint(0, 3, (n,), generator=source),
    }


def rows(batch: dict[str, Tensor], *which: int) -> dict[str, Tensor]:
    return {name: t[list(which)] for name, t in batch.items()}


def small(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def good(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


class With(nn.Module):
    """A small network with something done to its hidden features."""

    def __init__(self, change: Callable[[With, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 3)
        self.change = change
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.drop(self.change(self, torch.tanh(self.first(x)))))


def without_mean(model: With, h: Tensor) -> Tensor:
    return h - h.detach().mean(0, keepdim=True)


def normalised(model: With, h: Tensor) -> Tensor:
    spread = h.detach().std(0, unbiased=False) if len(h) > 1 else torch.ones(8)
    return (h - h.detach().mean(0)) / (spread + 1e-2)


def sorted_by_first(model: With, h: Tensor) -> Tensor:
    return h[h.detach()[:, 0].argsort()]


def each_feature_sorted(model: With, h: Tensor) -> Tensor:
    return h.sort(dim=0).values


def in_training_only(model: With, h: Tensor) -> Tensor:
    return without_mean(model, h) if model.training else h


def across_the_batch(model: With, h: Tensor) -> Tensor:
    return torch.softmax(h @ h.T, dim=1) @ h


def mixed_up(model: With, h: Tensor) -> Tensor:
    return 0.5 * h + 0.5 * h[torch.randperm(len(h))].detach()


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


def info_nce(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    h = F.normalize(model(batch["x"]), dim=1)
    partners = F.normalize(model(batch["x"].roll(1, dims=1)), dim=1)
    return F.cross_entropy(h @ partners.T / 0.1, torch.arange(len(h)), reduction="none")


def hardest_eight(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = good(model, batch)
    least = losses.detach().topk(max(min(len(losses) // 2, 8), 1)).values[-1]
    return losses * (losses.detach() >= least)


def hardest_sixteen(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """All of them, in the few examples of a small check."""
    losses = good(model, batch)
    least = losses.detach().topk(min(len(losses), 16)).values[-1]
    return losses * (losses.detach() >= least)


def by_the_number(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, batch) / len(batch["y"])


def by_the_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return good(model, batch) * torch.arange(1, len(batch["y"]) + 1)


def centred_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits - logits.detach().mean(0), batch["y"], reduction="none")


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
]  # fmt: skip


def moved(model: nn.Module, loss: Loss, batch: dict[str, Tensor]) -> float:
    """By how many C the sum moves, at most, when one record is taken out; the guard must be off."""
    clip = 0.2 * float(per_example_norms(model, loss, batch).max())
    bound = Clipper(clip, engine="bookkeeping", physical_batch_size=RECORDS).bind(model, loss)
    whole = bound.clip(batch).gradients
    found = []
    for out in range(RECORDS):
        rest = bound.clip(rows(batch, *(i for i in range(RECORDS) if i != out))).gradients
        found.append(
            sum(float((g - rest[name]).double().pow(2).sum()) for name, g in whole.items()) ** 0.5
            / clip
        )
    return max(found)


def switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "is_due", lambda *arguments: False)


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
    private = [x for x in seen if not torch.isin(x, public["x"]).all()]
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
# another loss, another step


def plan_of(steps: int = 40) -> Any:
    return PrivacyConfig(
        noise_multiplier=1.0,
        target_delta=1e-5,
        expected_batch_size=RECORDS,
        steps=steps,
        max_grad_norm=1.0,
    ).build(RECORDS)


def released(run: Any, model: nn.Module, losses: Callable[[int], Loss]) -> int:
    """Releases until the guard refuses."""
    batch = records()
    for step, chosen in enumerate(run.batches()):
        try:
            clipped = run.clip(model, losses(step), rows(batch, *chosen.tolist()))
        except ValueError as error:
            assert "depends on other examples" in str(error) or "keeps something" in str(error)
            return step
        run.release(clipped)
    return run.released


def test_second_loss_on_a_model_that_saw_a_good_one_is_guarded_anew() -> None:
    for steps_of_good in (1, 3, 6):
        with plan_of().start() as run:
            assert (
                released(run, small(), lambda step, n=steps_of_good: good if step < n else info_nce)
                == steps_of_good
            )


def test_a_fresh_lambda_at_every_step_is_one_loss_and_another_closure_is_not(monkeypatch) -> None:
    examined: list[int] = []
    right = Guard.examine
    monkeypatch.setattr(
        Guard,
        "examine",
        lambda self, s, b, n, step, c: examined.append(step) or right(self, s, b, n, step, c),
    )
    scale = torch.tensor(2.0)
    with plan_of().start() as run:
        assert (
            released(run, small(), lambda step: lambda model, batch: good(model, batch) * scale)
            == 40
        )
    assert examined == [step for step in range(40) if is_guarded(step)] == [0, 1, 3, 7, 15, 31]
    examined.clear()
    with plan_of(6).start() as run:
        assert (
            released(
                run, small(), lambda step: lambda model, batch: good(model, batch) * (1.0 + step)
            )
            == 6
        )
    assert examined == list(range(6))  # the step is closed over: six losses


def test_other_models_and_other_trainable_parameters_are_guarded_anew(monkeypatch) -> None:
    examined: list[int] = []
    right = Guard.examine
    monkeypatch.setattr(
        Guard,
        "examine",
        lambda self, s, b, n, step, c: examined.append(step) or right(self, s, b, n, step, c),
    )
    bound = Clipper(1.0).bind(small(), good)
    for step in (4, 4, 5, 6):  # none of them a guarded step
        bound.clip(records(), step=step)
    assert examined == [4]
    bound.model[0].requires_grad_(False)
    assert set(bound.clip(records(), step=8).gradients) == {"3.weight", "3.bias"}
    bound.model.eval()
    bound.clip(records(), step=8)
    bound.model.train().requires_grad_(True)
    assert len(bound.clip(records(), step=9).gradients) == 4
    assert examined == [4, 8, 8]


def test_nothing_about_models_or_losses_outlives_the_bound_clipper() -> None:
    """A contrastive loss is refused on a model that another clipper, or this one unbound, found
    good a moment ago.
    """
    model = small()
    clipper = Clipper(1.0)
    clipper.clip(model, good, records())
    with pytest.raises(ValueError, match="depends on other examples"):
        clipper.clip(model, info_nce, records())
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).clip(model, info_nce, records())


def test_a_gate_that_opens_later_is_seen_at_the_next_guarded_step() -> None:
    opened = {"at": 5}
    step_now = {"step": 0}

    def change(model: With, h: Tensor) -> Tensor:
        return without_mean(model, h) if step_now["step"] >= opened["at"] else h

    def losses(step: int) -> Loss:
        step_now["step"] = step
        return good

    with plan_of().start() as run:
        assert (
            released(run, With(change), losses) == 7
        )  # releases 1, 2, 4, 8 are guarded: the eighth is not made


def test_a_larger_micro_batch_than_any_before_is_examined_whatever_the_step() -> None:
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), hardest_sixteen)
    bound.clip(rows(records(), *range(4)), step=4)  # fewer than sixteen: nothing is mined yet
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=5)


def test_guarded_steps_are_the_powers_of_two_and_every_512th() -> None:
    assert [n + 1 for n in range(2100) if is_guarded(n)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1024,
        1536,
        2048,
    ]


# ------------------------------------------------------------------------------------------------
# found by a second attacker


def mixed_by_numpy(model: With, h: Tensor) -> Tensor:
    """Mixup as it is usually written: in training mode only, the share drawn by numpy."""
    import numpy as np

    if not model.training:
        return h
    share = float(np.random.beta(1, 1))
    return share * h + (1 - share) * h[torch.randperm(len(h))].detach()


def test_mixing_in_training_only_that_cannot_be_held_still_is_not_approved_by_evaluation_mode() -> (
    None
):
    together: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        together.append(len(batch["y"]))
        return good(model, batch)

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(With(mixed_by_numpy).train(), loss)
    for step in range(3):
        bound.clip(records(), step=step)
        assert together[-RECORDS:] == [1] * RECORDS
    assert not next(iter(bound._guard._verdicts.values())).together


def test_one_example_more_than_ever_before_is_examined() -> None:
    def hardest_of_thirteen(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        losses = good(model, batch)
        return losses * (losses.detach() >= losses.detach().topk(min(len(losses), 12)).values[-1])

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(small(), hardest_of_thirteen)
    bound.clip(rows(records(), *range(12)), step=4)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=5)  # twice as many, and not a guarded step


def test_a_guarded_step_is_examined_in_each_mode_that_it_is_made_in() -> None:
    opened = {"now": False}

    def change(model: With, h: Tensor) -> Tensor:
        return without_mean(model, h) if opened["now"] and not model.training else h

    model = With(change)
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(model, good)
    for train in (True, False):
        model.train(train)
        bound.clip(records(), step=0)
    opened["now"] = True
    bound.model.train()
    bound.clip(records(), step=1)
    bound.model.eval()
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(records(), step=1)


def mean_of(h: Tensor) -> Tensor:
    return h.detach().mean(0, keepdim=True).expand_as(h)


RARE: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform-below-0.3": lambda h: h - mean_of(h) if torch.rand(1).item() < 0.3 else h,
    "uniform-above-0.8": lambda h: h - mean_of(h) if torch.rand(()).item() > 0.8 else h,
    "normal-above-1": lambda h: h - mean_of(h) if torch.randn(1).item() > 1.0 else h,
    "one-integer-in-ten": lambda h: h - mean_of(h) if int(torch.randint(0, 10, (1,))) == 9 else h,
    "entries": lambda h: torch.where(torch.rand_like(h) < 0.05, mean_of(h), h),
    "rows": lambda h: torch.where(torch.bernoulli(torch.full((len(h), 1), 0.2)) > 0, mean_of(h), h),
    "mask-in-place": lambda h: torch.where(torch.empty_like(h).bernoulli_(0.05) > 0, mean_of(h), h),
}


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("kind", RARE)
def test_mixing_that_few_random_numbers_open_is_refused(kind: str, rate: float) -> None:
    model = With(lambda model, h: RARE[kind](h) if model.training else h, dropout=rate)
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=RECORDS).bind(model.train(), good).clip(records())


def test_integers_held_still_stay_inside_their_range() -> None:
    def crop(model: With, h: Tensor) -> Tensor:
        start = int(torch.randint(0, 1, (1,)))
        return h[:, start : start + 8]

    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(With(crop).train(), good)
    bound.clip(records())
    assert next(iter(bound._guard._verdicts.values())).together == RECORDS


class Side(nn.Module):
    """A branch of hardly any weight in the loss, in which the batch's mean is taken off; clipped on
    its own, it counts in full.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.side = nn.Linear(6, 3), nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.side(x - x.detach().mean(0, keepdim=True))


def test_mixing_in_a_layer_of_small_gradients_is_refused(monkeypatch) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, side = model(batch["x"])
        return F.cross_entropy(logits, batch["y"], reduction="none") + 1e-4 * side[:, 0]

    for groups in ("whole", "layer"):
        with pytest.raises(ValueError, match="depends on other examples"):
            Clipper(1e-4, groups=groups, physical_batch_size=RECORDS).bind(Side(), loss).clip(
                records()
            )
    switched_off(monkeypatch)
    bound = Clipper(1e-5, groups="layer", physical_batch_size=RECORDS).bind(Side(), loss)
    batch = records()
    batch["x"][-1] = 60.0
    whole, rest = (bound.clip(b).gradients for b in (batch, rows(batch, *range(RECORDS - 1))))
    assert sum(float((g - rest[n]).double().pow(2).sum()) for n, g in whole.items()) ** 0.5 > 5e-5


class ScaledByTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.weight * x * table


class WithTable(nn.Module):
    """Positions are weighted by a table that all examples share; the last one's weight outdoes the
    others'.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.scale = ScaledByTable()
        table = torch.ones(positions, 4)
        table[-1] = -2.0 * positions
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x, self.table).mean((1, 2))


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]).mean(
            (1, 2)
        )


@pytest.mark.parametrize("positions", [1, 2, 8, 15])
@pytest.mark.parametrize(
    "model", [WithTable, lambda positions: Causal()], ids=["table", "causal-mask"]
)
def test_a_shared_table_is_not_taken_apart_when_there_are_as_many_examples_as_positions(
    model: Callable[[int], nn.Module], positions: int
) -> None:
    torch.manual_seed(1)
    x = 1 + 0.1 * torch.randn(positions + 9, positions, 4)
    limit, chosen = 1e-3, model(positions)
    bound, exact = (
        Clipper(limit, engine=engine, physical_batch_size=size).bind(
            chosen, lambda m, batch: m(batch)
        )
        for engine, size in (("bookkeeping", 64), ("one-example", None))
    )
    bound.clip(x[: positions + 9], step=0)
    sums = {n: bound.clip(x[:n], step=4).gradients for n in range(positions, positions + 3)}
    for n, found in sums.items():
        for name, expected in exact.clip(x[:n], step=4).gradients.items():
            assert float((found[name] - expected).norm()) < 1e-3 * limit
    for n in (positions, positions + 1):
        assert (
            sum(float((g - sums[n + 1][k]).pow(2).sum()) for k, g in sums[n].items()) ** 0.5
            <= 1.001 * limit
        )


# ------------------------------------------------------------------------------------------------ a
# use that capture does not see


class Gated(nn.Module):
    """From some call on, a weight is also used without calling its module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.open = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        return self.head(h + (100 * F.linear(h, self.layer.weight) if self.open else 0))


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_unseen_use_of_a_weight_adds_nothing_and_is_refused_at_the_next_guarded_step(
    engine: str,
) -> None:
    model, batch = Gated(), records()
    bound = Clipper(0.1, engine=engine).bind(model, good)
    bound.clip(batch, step=4)
    model.open = True
    whole = bound.clip(
        batch, step=5
    ).gradients  # not guarded: the norm and the sum are made of the same factors
    for out in range(0, RECORDS, 6):
        rest = bound.clip(rows(batch, *(i for i in range(RECORDS) if i != out)), step=5).gradients
        assert sum(
            float((g - rest[n]).double().pow(2).sum()) for n, g in whole.items()
        ) ** 0.5 <= 0.1 * (1 + 1e-4)
    if engine == "bookkeeping":
        with pytest.raises(ValueError, match=r"'layer.weight'.*used outside its module's call"):
            bound.clip(batch, step=7)
    else:  # autograd sees every use
        bound.clip(batch, step=7)


# ------------------------------------------------------------------------------------------------
# buffers and parameters


class KeepsMean(nn.Module):
    """Publishes the mean of the private batch through state_dict, and does nothing else with it."""

    def __init__(self, how: str, opens_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("large", torch.zeros(2**19))
        self.how, self.opens_at, self.now = how, opens_at, 0

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.now >= self.opens_at:
            if self.how == "in-place":
                self.mean.copy_(mean)
            elif self.how == "assigned":
                self.mean = mean
            elif self.how == "data":
                self.mean.data.copy_(mean)
            elif self.how == "new":
                self.register_buffer("another", mean)
            elif self.how == "large":
                self.large[:6] = mean
            elif self.how == "parameter":
                with torch.no_grad():
                    self.inner.bias.add_(mean[:3])
            elif self.how == "parameter-data":
                self.inner.bias.data += mean[:3]
        return self.inner(x)


BUFFERS = ["in-place", "assigned", "data", "new", "large"]


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("how", [*BUFFERS, "parameter", "parameter-data"])
def test_what_a_forward_pass_writes_into_the_model_is_refused(how: str, engine: str) -> None:
    model = KeepsMean(how)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    what = "parameter 'inner.bias'" if "parameter" in how else "buffer '(mean|another|large)'"
    with pytest.raises(
        ValueError, match=f"{what} (changes|is rewritten) while the loss is computed"
    ):
        Clipper(1.0, engine=engine).bind(model, good).clip(records())
    if "parameter" not in how:  # buffers are put back
        after = model.state_dict()
        assert after.keys() == before.keys() and all(
            torch.equal(t, after[name]) for name, t in before.items()
        )


@pytest.mark.parametrize("how", [*BUFFERS, "parameter"])
def test_a_write_behind_a_gate_is_seen_in_the_call_that_makes_it(how: str) -> None:
    model = KeepsMean(how, opens_at=6)
    if (
        how == "data"
        # writes past the version counter are seen in small buffers at once, in large ones at
        # guarded steps
    ):
        del model.large
    bound = Clipper(1.0).bind(model, good)
    for step in range(6):
        model.now = step
        bound.clip(records(), step=step)
    model.now = 6  # not a guarded step
    with pytest.raises(ValueError, match="while the loss is computed"):
        bound.clip(records(), step=6)
    if how not in ("parameter", "large"):
        assert not model.state_dict()["mean"].any() and "another" not in model.state_dict()


def test_buffers_that_stay_and_weights_that_the_optimizer_writes_are_allowed() -> None:
    model = KeepsMean("not at all")
    bound = Clipper(1.0).bind(model, good)
    for step in range(3):
        bound.clip(records(), step=step)
        with torch.no_grad():
            model.inner.weight.add_(0.1)
            model.mean.fill_(step)  # between the calls they are the user's to write


class Remembers(nn.Module):
    """A running mean in a plain attribute, which no state_dict holds and every later forward pass
    reads.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 3)
        self.running = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        h = x - self.running
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return self.inner(h)


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_a_model_that_remembers_earlier_records_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match="keeps something between calls"):
        Clipper(1.0, engine=engine).bind(Remembers(), good).clip(records())


def test_an_attribute_that_nothing_reads_is_allowed() -> None:
    """It reaches neither state_dict nor any loss; docs/clipping.md says not to publish whole
    modules.
    """

    def note(model: With, h: Tensor) -> Tensor:
        model.last = h.detach()
        return h

    Clipper(1.0).bind(With(note), good).clip(records())


# ------------------------------------------------------------------------------------------------
# no false alarms


class Noisy(nn.Module):
    """Randomness of many kinds, each example on its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind
        self.source = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        n = len(h)
        if self.kind == "dropout":
            h = F.dropout(h, 0.4)
        elif self.kind == "feature-dropout":
            h = F.dropout1d(h.unsqueeze(2).expand(-1, -1, 4), 0.3).mean(2)
        elif self.kind == "stochastic-depth":
            h = h * (torch.rand(n, 1) < 0.8)
        elif self.kind == "normal":
            h = h + torch.randn_like(h)
        elif self.kind == "own-generator":
            h = h + torch.randn(n, 8, generator=self.source)
        elif self.kind == "gumbel":
            h = F.gumbel_softmax(h)
        elif self.kind == "masked-positions":
            h = h * (torch.rand(n, 8).argsort(dim=1) < 6)
        elif self.kind == "attention-dropout":
            h_bhtd = h.view(n, 2, 2, 2)
            h = F.scaled_dot_product_attention(h_bhtd, h_bhtd, h_bhtd, dropout_p=0.3).reshape(n, 8)
        elif self.kind == "in-place":
            h = h * torch.empty_like(h).bernoulli_(0.7)
        elif self.kind == "probabilities":
            h = h * torch.bernoulli(torch.sigmoid(h.detach()))
        elif self.kind == "multinomial":
            h = h * F.one_hot(torch.multinomial(torch.softmax(h.detach(), 1), 1)[:, 0], 8)
        return self.head(h)


KINDS = [
    "dropout", "feature-dropout", "stochastic-depth", "normal", "own-generator", "gumbel",
    "masked-positions", "attention-dropout", "in-place",
    "probabilities", "multinomial",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_random_models_are_not_refused_are_decided_and_see_the_random_state_unchanged(
    kind: str,
) -> None:
    import numpy as np

    model = Noisy(kind).train()
    bound = Clipper(1.0, engine="bookkeeping").bind(model, good)
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    source = model.source.get_state()
    bound.check(records(8, seed=2))
    drawn = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert torch.equal(drawn[0], torch.rand(2)) and drawn[1:] == (random.random(), np.random.rand())
    if kind != "own-generator":
        assert torch.equal(source, model.source.get_state())
    verdict = next(iter(bound._guard._verdicts.values()))
    assert verdict.together == 8  # it was compared: nothing was given up as random


@pytest.mark.parametrize("kind", KINDS)
def test_mixing_is_seen_behind_every_kind_of_randomness(kind: str) -> None:
    class MixesToo(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - 0.3 * x.detach().mean(0))

    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, engine="bookkeeping").clip(MixesToo(kind).train(), good, records())


def test_bert_with_dropout_padding_and_autocast_is_not_refused() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, num_labels=3, max_position_embeddings=20
    )  # fmt: skip
    ids = torch.randint(3, 40, (8, 9))
    mask = (torch.arange(9) < torch.arange(2, 10).unsqueeze(1)).long()
    batch = {"input_ids": ids * mask, "attention_mask": mask, "y": torch.randint(0, 3, (8,))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits, batch["y"], reduction="none")

    def half(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    def trimmed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        longest = int(batch["attention_mask"].sum(1).max())
        return loss(model, {k: t[:, :longest] if t.dim() > 1 else t for k, t in batch.items()})

    model = transformers.BertForSequenceClassification(config).train()
    for chosen in (loss, half, trimmed):
        bound = Clipper(1.0).bind(model, chosen)
        bound.clip(batch)
        assert next(iter(bound._guard._verdicts.values())).together
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0).clip(model, lambda m, b: half(m, b) * (1 + 0.2 * b["y"].float().mean()), batch)


# ------------------------------------------------------------------------------------------------
# mutants: a guard with a part missing


MIXING = "quietgrad.clipping.soundness.mixing"
MUTANTS = [
    ("losses-not-compared", f"{MIXING}._close", lambda *a: True, "hard-examples-mined"),
    ("factors-not-compared", f"{MIXING}._require_same_factors", lambda *a: None,
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
    if "losses" in name:  # its factors would show it too
        monkeypatch.setattr(f"{MIXING}._require_same_factors", lambda *a: None)
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
