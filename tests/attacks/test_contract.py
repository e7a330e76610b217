"""The contract of a run under attack: sums of the wrong records, or added twice. Each attack that a
protection stops is also run with the protection off, where it has to succeed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attacks.contract import RECORDS, at, data, loss, model_of, opened, plan_of
from quietgrad.clipping import ClippedSum, Clipper, clipped_gradients
from quietgrad.events import RandomizedClipping, SensitivityClaim
from quietgrad.plan import PrivateRun
from quietgrad.plan.contribution import clip_given
from quietgrad.plan.open_batch import OpenBatch

# The sum of the wrong records


def three_times(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    one = private.clip(model_of(), loss, at(indices))
    return one + one + one


def a_part_twice(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    one, other = (private.clip(model_of(), loss, at(part)) for part in np.array_split(indices, 2))
    return (one + other) + one


def everybody(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.clip(model_of(), loss, data())


def four_copies(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.clip(model_of(), loss, at(np.tile(indices, 4)))


def a_part_left_out(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.clip(model_of(), loss, at(indices[1:]))


def of_another_run(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return plan_of().start().clip(model_of(), loss, at(indices))


def of_a_bare_clipper(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.plan.clipper.clip(model_of(), loss, at(indices))


def of_the_function(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return clipped_gradients(model_of(), loss, at(indices), 1.0)


def put_together(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return ClippedSum(
        {"weight": torch.full((3, 5), 100.0), "bias": torch.zeros(3)}, private.plan.clipper.claim
    )


def scaled_in_place(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    for gradient in clipped.gradients.values():
        gradient *= 100
    return clipped


def replaced(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    clipped.gradients["weight"] = 100 * clipped.gradients["weight"]
    return clipped


def scaled_before_adding(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    one, other = (private.clip(model_of(), loss, at(part)) for part in np.array_split(indices, 2))
    one.gradients["weight"].mul_(100)
    return one + other


def scaled_behind_autograd(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    clipped.gradients["weight"].data.mul_(100)  # no version counts this
    return clipped


def scaled_by_numpy(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    clipped.gradients["weight"].numpy()[...] *= 100
    return clipped


def a_number_for_a_matrix(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    rest = private.clip(model_of(), loss, at(indices[1:]))
    return rest + private.contribution({name: torch.tensor(1.0) for name in rest.gradients})


def with_one_of_another_run(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    first, rest = indices[:1], indices[1:]
    return private.clip(model_of(), loss, at(first)) + plan_of().start().clip(
        model_of(), loss, at(rest)
    )


WRONG_SUMS: list[tuple[Callable[[PrivateRun, np.ndarray], ClippedSum], str]] = [
    (three_times, "cannot add a clipped sum twice"),
    (a_part_twice, "cannot add a clipped sum twice"),
    (everybody, "does not hold as many records as the open batch"),
    (four_copies, "does not hold as many records as the open batch"),
    (a_part_left_out, "does not hold as many records as the open batch"),
    (of_another_run, "was not made by this run"),
    (of_a_bare_clipper, "was not made by this run"),
    (of_the_function, "was not made by this run"),
    (put_together, "was not made by this run"),
    (scaled_in_place, "was changed after it was clipped"),
    (replaced, "was changed after it was clipped"),
    (scaled_before_adding, "was changed after it was clipped"),
    (scaled_behind_autograd, "was changed after it was clipped"),
    (scaled_by_numpy, "was changed after it was clipped"),
    (with_one_of_another_run, "of different runs or releases"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), WRONG_SUMS, ids=[wrong.__name__ for wrong, _ in WRONG_SUMS]
)
def test_a_sum_of_the_wrong_records_is_not_released(
    wrong: Callable[[PrivateRun, np.ndarray], ClippedSum], message: str, tmp_path: Path
) -> None:
    private, indices = opened()
    with pytest.raises((RuntimeError, ValueError), match=message) as refused:
        private.release(wrong(private, indices))
    assert private.released == 0 and private.epsilon() == 0
    # The sizes of the batch are private, and the message could go into a log.
    assert not any(character.isdigit() for character in str(refused.value))
    private.release(private.clip(model_of(), loss, at(indices)))  # the right one still is


def test_a_contribution_of_another_shape_is_not_spread_over_a_parameter() -> None:
    # Before: a record given as a number contributed 10 C.
    private, indices = opened()
    with pytest.raises(ValueError, match=r"different shapes or types.*'weight'"):
        a_number_for_a_matrix(private, indices)


def test_a_closed_run_releases_nothing() -> None:
    private, indices = opened()
    clipped = private.clip(model_of(), loss, at(indices))
    private.close()
    with pytest.raises(RuntimeError, match="is closed"):
        private.release(clipped)
    assert private.released == 0


def test_two_threads_release_one_batch_once() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            private, indices = opened()
            sums = [private.clip(model_of(), loss, at(indices)) for _ in range(2)]
            outcomes: list[bool] = []

            def release(
                clipped: ClippedSum, private: PrivateRun = private, outcomes: list[bool] = outcomes
            ) -> None:
                with contextlib.suppress(RuntimeError):
                    private.release(clipped)
                    outcomes.append(True)

            threads = [threading.Thread(target=release, args=(s,)) for s in sums]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert outcomes == [True] and private.released == 1
    finally:
        sys.setswitchinterval(before)


def test_a_sum_of_an_earlier_release_is_not_released_again() -> None:
    private = plan_of(
        sample_rate=1.0, expected_batch_size=None
    ).start()  # every batch holds everybody: the count alone would not tell
    first = private.clip(model_of(), loss, at(next(private.batches())))
    private.release(first)
    next(private.batches())
    with pytest.raises(RuntimeError, match="was not made by this run for the batch that is open"):
        private.release(first)
    late = private.clip(model_of(), loss, data())
    with pytest.raises(ValueError, match="of different runs or releases"):
        _ = first + late


def test_a_shuffled_loader_without_batches_is_refused() -> None:
    # True epsilon 24 at a printed 1.17: every record took part in every epoch.
    private, x = plan_of().start(), torch.randperm(RECORDS)
    for step in (private.step, lambda *batch: private.release(private.clip(*batch))):
        with pytest.raises(RuntimeError, match=r"there is no open batch.*loop over run\.loader"):
            step(model_of(), loss, at(x[:12]))
    assert private.released == 0


def test_parts_of_the_open_batch_add_up_in_any_grouping() -> None:
    private, indices = opened()
    parts = [private.clip(model_of(), loss, at(part)) for part in np.array_split(indices, 3)]
    private.release(parts[2] + (parts[0] + parts[1]))
    assert private.released == 1


def test_an_empty_batch_takes_an_empty_sum_only() -> None:
    private = plan_of(expected_batch_size=None, sample_rate=1e-9).start()
    for indices in private.batches():
        assert not len(indices)
        with pytest.raises(RuntimeError, match="as many records"):
            private.release(private.clip(model_of(), loss, at(np.arange(3))))
        private.step(model_of(), loss, at(indices))


@pytest.mark.parametrize(
    "wrong", [everybody, four_copies, scaled_in_place], ids=lambda wrong: wrong.__name__
)
def test_without_the_check_the_wrong_sum_goes_out(
    wrong: Callable[[PrivateRun, np.ndarray], ClippedSum], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mutant: what is released then moves by far more than C for one record, at an unchanged
    # epsilon.
    monkeypatch.setattr(OpenBatch, "require_sum", lambda *_: None)
    private, indices = opened()
    private.release(wrong(private, indices))
    assert private.released == 1


def test_without_stamps_one_sum_is_added_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClippedSum, "_joined", lambda self, *_: self.stamp)
    private, indices = opened()
    assert float(three_times(private, indices).gradients["weight"].norm()) == pytest.approx(
        3 * float(private.clip(model_of(), loss, at(indices)).gradients["weight"].norm())
    )


# Gradients made otherwise


@pytest.mark.grid(8, "lengths between the extremes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-42, 1e-3, 1.0, 1e4, 1e30, 3e38])
def test_contributions_are_shortened_to_c_and_never_lengthened(
    dtype: torch.dtype, size: float
) -> None:
    private, _ = opened(max_grad_norm=0.7)
    generator = torch.Generator().manual_seed(1)
    given = {
        "weight": (torch.randn(3, 5, generator=generator, dtype=torch.float64) * size).to(dtype),
        "bias": (torch.randn(3, generator=generator, dtype=torch.float64) * size).to(dtype),
        "scalar": torch.tensor(size).to(dtype),
    }
    clipped = private.contribution(given)
    length = math.sqrt(sum(float(g.double().square().sum()) for g in clipped.gradients.values()))
    assert length <= 0.7
    finite = all(bool(torch.isfinite(g).all()) for g in given.values())
    true = math.hypot(*(float(v) for g in given.values() for v in g.double().flatten()))
    assert length == pytest.approx(min(true, 0.7) if finite else 0.0, rel=2e-6, abs=1e-44)
    assert all(g.dtype in (torch.float32, torch.float64) for g in clipped.gradients.values())


def test_contributions_count_and_add_up_with_clipped_sums() -> None:
    private, indices = opened()
    canary = {"weight": torch.full((3, 5), 9.0), "bias": torch.zeros(3)}
    rest = private.clip(model_of(), loss, at(indices[1:]))
    with pytest.raises(RuntimeError, match="as many records"):
        private.release(private.clip(model_of(), loss, at(indices)) + private.contribution(canary))
    private.release(rest + private.contribution(canary))
    indices = next(private.batches())
    several = {"weight": torch.ones(len(indices), 3, 5), "bias": torch.zeros(len(indices), 3)}
    clipped = private.contribution(several, len(indices))
    assert float(clipped.gradients["weight"].norm()) == pytest.approx(len(indices), rel=1e-5)
    private.release(clipped)
    with pytest.raises(ValueError, match="does not have the number of records as first dimension"):
        private.contribution(several, len(indices) + 1)
    with pytest.raises(ValueError, match="gradients is empty"):
        private.contribution({})


def test_a_contribution_that_is_not_finite_counts_and_contributes_nothing() -> None:
    private, _ = opened()
    rows = torch.ones(4, 3)
    rows[1, 0], rows[2, 1] = math.nan, math.inf
    clipped = private.contribution({"w": rows}, 4)
    assert clipped.private.examples == 4
    torch.testing.assert_close(
        clipped.gradients["w"], 2 * torch.ones(3) / math.sqrt(3), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    "clipper",
    [Clipper(1.0, estimator="hutch", sketch_dim=2), Clipper(100.0)],
    ids=["sketched", "longer"],
)
def test_another_clipper_than_the_plans_releases_nothing(clipper: Clipper) -> None:
    # Before: a sum was compared with what the run's clipper claimed, whatever that was by then, so
    # sketched norms went out at the epsilon of exact ones.
    private, indices = opened()
    private.bindings.clipper = clipper
    clipped = private.clip(model_of(), loss, at(indices))
    with pytest.raises(ValueError, match="but the plan accounts for"):
        private.release(clipped)
    assert private.released == 0


def test_exact_norms_are_none_of_a_law_that_lies_below_them() -> None:
    # The "hutch" envelope is of sums of sketches: a record may count for less than C there.
    gradients = {"w": torch.ones(3)}
    for envelope, rank in (("hutch", 100), ("mixed", None), ("convex", None)):
        claim = SensitivityClaim(1.0, RandomizedClipping(32, envelope, rank))
        if envelope == "hutch":
            with pytest.raises(ValueError, match="holds for sketched norms alone"):
                clip_given(gradients, None, claim, (), None)
        else:
            assert float(clip_given(gradients, None, claim, (), None).gradients["w"].norm()) <= 1
