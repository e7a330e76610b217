"""What records add to numbers beside the gradients, against the slow oracle: under every engine and
cut into micro-batches, with views, sketches and groups; and that it is never more than 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.beside.adaptive import RAMP
from quietgrad.beside.values import Observed, side_sums
from quietgrad.clipping import ClippedSum, Clipper, UserBatch
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.rounding import SHARE
from quietgrad.clipping.soundness.oracle import oracle_gradients, oracle_norms
from quietgrad.plan.contribution import clip_given
from quietgrad.randomness import RandomKey

pytestmark = pytest.mark.usefixtures("examined_once")

LOSS, ADAPTIVE = TrainingLoss(low=1.0, high=1.2), AdaptiveClipping()
BOTH = (LOSS, ADAPTIVE)
DEEP = ("mlp", "cnn-groupnorm", "bare-parameters", "recurrent-attention", "bert", "llama-tied")


def linear(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return nn.Linear(5, 3), (torch.randn(6, 5), torch.randint(0, 3, (6,)))


def clipped_to(value: float, centre: float, width: float) -> float:
    return min(max((value - centre) / width, -1.0), 1.0)


def expected(
    losses: list[float], norms: list[float], clip: float, centre: float = 1.1, width: float = 0.1
) -> dict[str, float]:
    shares = [n * (1 + SHARE) / clip for n in norms]
    return {
        LOSS.name: sum(clipped_to(one, centre, width) for one in losses),
        ADAPTIVE.name: sum(clipped_to(2 - share, 1.0, RAMP) for share in shares),
    }


def sums_of(clipped: ClippedSum) -> dict[str, float]:
    return {name: float(total) for name, total in clipped.private.beside.items()}


@pytest.mark.grid(3, "models times engines")
@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in DEEP], ids=str)
def test_sums_are_the_oracles_whatever_the_micro_batches(case: Case, engine: Any) -> None:
    model, loss, batch = case.build()
    norms = oracle_norms(oracle_gradients(model, loss, batch)).tolist()
    losses = [float(loss(model, slice_batch(batch, i, i + 1)).detach()) for i in range(len(norms))]
    clip = sorted(norms)[1] * (1 + RAMP / 2)  # one record below, one on the ramp, the others above
    high = sum(sorted(losses)[1:3]) / 2  # two losses are cut off
    wanted = expected(losses, norms, clip, high / 2, high / 2)
    beside = (TrainingLoss(high=high), ADAPTIVE)
    for size in (None, 1, 3) if engine == "bookkeeping" else (None,):
        clipper = Clipper(clip, engine=engine, physical_batch_size=size, beside=beside)
        found = clipper.clip(model, loss, batch)
        assert sums_of(found) == pytest.approx(wanted, rel=1e-4, abs=1e-4), size
        if size is not None:
            continue
        # What is summed beside them leaves the gradients as they are.
        plain = replace(clipper, beside=()).clip(model, loss, batch)
        assert sums_of(plain) == {}
        assert all(torch.equal(g, plain.gradients[n]) for n, g in found.gradients.items())


def test_sums_of_a_wrong_cut_are_noticed() -> None:
    model, (x, y) = small()
    norms = oracle_norms(oracle_gradients(model, linear, (x, y))).tolist()
    losses = linear(model, (x, y)).detach().tolist()
    clip = sorted(norms)[3] * (1 + RAMP / 2)
    found = sums_of(Clipper(clip, beside=BOTH).clip(model, linear, (x, y)))
    assert found == pytest.approx(expected(losses, norms, clip), abs=1e-4)
    for wrong in (
        expected(losses[:-1], norms[:-1], clip),  # a record left out
        expected([sum(losses) / 6] * 6, norms, clip),  # the mean clipped, not the losses
        expected(losses, norms, 2 * clip),  # another clipping norm
    ):
        assert found != pytest.approx(wrong, abs=1e-2)


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_the_views_of_a_record_are_one_loss(engine: Any) -> None:
    model, (x, y) = small()
    views = (x.reshape(2, 3, 5), y.reshape(2, 3))
    clipper = Clipper(1.0, engine=engine, views=3, beside=BOTH)
    losses = linear(model, (x, y)).detach().reshape(2, 3).mean(1).tolist()
    found = sums_of(clipper.clip(model, linear, views))[LOSS.name]
    assert found == pytest.approx(sum(clipped_to(one, 1.1, 0.1) for one in losses), abs=1e-6)


def test_with_groups_a_record_counts_where_none_of_them_is_shortened() -> None:
    model, batch = small()
    groups = {"weight": 0.9, "bias": 0.1}
    found = sums_of(Clipper(1.0, groups=groups, beside=BOTH).clip(model, linear, batch))
    limits = torch.tensor([0.9, 0.1]) / math.hypot(0.9, 0.1)
    total = 0.0
    for one in oracle_gradients(model, linear, batch):
        norms = torch.stack([one["weight"].norm(), one["bias"].norm()])
        total += clipped_to(2 - float((norms * (1 + SHARE) / limits).max()), 1.0, RAMP)
    assert found[ADAPTIVE.name] == pytest.approx(total, abs=1e-4)


def test_with_sketches_the_number_that_divides_is_compared_in_every_micro_batch() -> None:
    model, batch = small()
    drawn = Projections(RandomKey.from_seed(3), 0)
    sums, norms = [], None
    for size in (1, 2, 6):
        clipper = Clipper(0.9, "hutch", 8, physical_batch_size=size, beside=BOTH)
        bound = clipper.bind(model, linear)
        sums.append(sums_of(bound.clip(batch, drawn, step=0)))
        norms = bound.norms(batch, drawn, step=0).tolist()
    assert norms is not None
    shares = [n * (1 + SHARE) / 0.9 for n in norms]
    count = sum(clipped_to(2 - share, 1.0, RAMP) for share in shares)
    for found in sums:
        assert found[ADAPTIVE.name] == pytest.approx(count, abs=2e-2)
        assert found == pytest.approx(sums[0], abs=1e-4)
    exact = oracle_norms(oracle_gradients(model, linear, batch)).tolist()
    assert norms != pytest.approx(exact, rel=1e-2)  # estimates they are


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_record_that_is_not_finite_adds_a_bound_and_changes_no_other(
    bad: float, engine: Any
) -> None:
    model, (x, y) = small()
    clipper = Clipper(1.0, engine=engine, beside=BOTH)

    def spoilt(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return linear(model, batch[:2]) + batch[2]

    zeros = torch.zeros(6)
    good = sums_of(clipper.clip(model, spoilt, (x[:5], y[:5], zeros[:5])))
    zeros[5] = bad
    found = sums_of(clipper.clip(model, spoilt, (x, y, zeros)))
    assert found[LOSS.name] - good[LOSS.name] == pytest.approx(-1 if bad == -math.inf else 1)


def test_a_gradient_that_is_not_finite_is_not_below_the_norm() -> None:
    model, (x, y) = small()
    clipper = Clipper(1e3, beside=BOTH)
    x[5] = math.inf
    found = clipper.clip(model, linear, (x, y))
    assert sums_of(found)[ADAPTIVE.name] == pytest.approx(5 - 1)
    given = clip_given(
        {"w": torch.tensor([[1.0], [math.nan]])}, 2, clipper.claim, BOTH, torch.tensor([9.0, 0.0])
    )
    assert sums_of(given) == {LOSS.name: 0.0, ADAPTIVE.name: 0.0}


any_number = st.floats(width=64, allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(any_number, any_number), min_size=1, max_size=6))
def test_one_record_adds_at_most_one_and_nothing_that_depends_on_others(records) -> None:
    def of(some) -> dict[str, float]:
        losses, shares = (torch.tensor(c, dtype=torch.float64) for c in zip(*some))
        return {n: float(t) for n, t in side_sums(BOTH, Observed(losses, shares)).items()}

    whole = of(records)
    for name in whole:
        assert abs(of(records[-1:])[name]) <= 1
        rest = of(records[:-1])[name] if len(records) > 1 else 0.0
        assert whole[name] - rest == pytest.approx(of(records[-1:])[name], abs=1e-12)


def test_the_bound_is_kept_whatever_a_component_says() -> None:
    class Careless:
        name, share, own_noise, every = "careless", None, None, 1

        def of(self, observed: Observed) -> Tensor:
            return observed.shares * 1e9

    observed = Observed(None, torch.tensor([1.0, -1.0, 3.0]))
    assert float(side_sums((Careless(),), observed)["careless"]) == 1.0


def test_several_losses_of_one_gradient_are_refused() -> None:
    # They would add up to more than 1.
    observed = Observed(torch.tensor([9.0, 9.0]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="has not one value for each clipped gradient"):
        side_sums(BOTH, observed)


def test_a_norm_that_differs_by_rounding_moves_the_count_by_rounding() -> None:
    # With a jump at C, the size of a micro-batch, and so another record, would move it by 1.
    shares = torch.tensor([1.0, 1.0 + 1e-7], dtype=torch.float64)
    one, other = ADAPTIVE.of(Observed(None, shares)).tolist()
    assert 0 < one - other < 1e-5


def test_sums_beside_are_stamped_with_the_gradients() -> None:
    model, batch = small()
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=3, training_loss=LOSS).build(
        6
    )
    with plan.start() as run:
        for _ in run.batches(1):
            halves = [run.clip(model, linear, slice_batch(batch, i, i + 3)) for i in (0, 3)]
            total = halves[0] + halves[1]
            assert sums_of(total)[LOSS.name] == pytest.approx(
                sum(sums_of(h)[LOSS.name] for h in halves)
            )
            run.release(total)
        for _ in run.batches(1):
            changed = run.clip(model, linear, batch)
            changed.private.beside[LOSS.name].add_(5)
            with pytest.raises(RuntimeError, match="was changed after it was clipped"):
                run.release(changed)
            left_out = run.clip(model, linear, batch)
            without = replace(left_out, private=replace(left_out.private, beside={}))
            with pytest.raises(RuntimeError, match="was changed after it was clipped"):
                run.release(without)
            run.release(run.clip(model, linear, batch))


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("combined", ["mean", "sum"])
def test_a_user_s_loss_is_the_mean_over_that_user_s_own_records(engine: Any, combined: Any) -> None:
    """A mutant divided by the largest user's number of records: one who has more then moves what
    every other user adds, and the bound of 1 says nothing of that.
    """
    torch.manual_seed(3)
    model, sizes = nn.Linear(5, 3), (1, 3, 2)
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    each = linear(model, (x, y)).detach()
    wide = TrainingLoss(low=0.0, high=2 * float(each.max()))
    clipper = Clipper(1.0, engine=engine, combined=combined, beside=(wide,))

    def told(users: slice) -> float:
        begin, own = sum(sizes[: users.start]), sizes[users]
        rows = slice(begin, begin + sum(own))
        clipped = clipper.clip(model, linear, UserBatch((x[rows], y[rows]), own))
        return sums_of(clipped)[wide.name]

    means = [float(part.mean()) for part in each.split(list(sizes))]
    alone = [told(slice(i, i + 1)) for i in range(3)]
    assert alone == pytest.approx([(m - wide.centre) / wide.width for m in means], abs=1e-5)
    assert told(slice(0, 3)) == pytest.approx(sum(alone), abs=1e-5)
    assert told(slice(0, 2)) == pytest.approx(sum(alone[:2]), abs=1e-5)
