"""The grid that secure releases live on, what rounding costs, correlated rows on the grid, and
plans with a secure source.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plans import changed
from scipy import stats
from torch import nn

pytest.importorskip("cryptography")

from secure_source import CLIP, FALSE_ALARM, KEY, SIGMA, SOURCE, correlated

from quietgrad import PrivacyConfig
from quietgrad.beside import TrainingLoss
from quietgrad.clipping import ClippedSum
from quietgrad.events import RandomizedClipping, SensitivityClaim
from quietgrad.ledger import read_ledger
from quietgrad.noise import (
    GaussianNoise,
    IndependentNoise,
    KeyedSource,
    PrefixSums,
    SecureSource,
    mixing_matrix,
)
from quietgrad.noise.correlation.banded import BandedLower
from quietgrad.noise.correlation.solver import unit_columns
from quietgrad.noise.sources import grid as grids
from quietgrad.noise.sources.grid import covered, noise_std, rounding_cost

# The grid.


def test_rounding_cost_is_what_the_formula_says_and_too_much_is_refused() -> None:
    million = 22_700_000
    assert rounding_cost(1.0, million, 1, SOURCE.grid) == pytest.approx(
        2 * math.sqrt(million) * 2.0**-30, rel=1e-4
    )
    assert rounding_cost(1.0, million, 1, SOURCE.grid) < 1e-5
    assert rounding_cost(1.0, million, 4, SOURCE.grid) == pytest.approx(
        3 * rounding_cost(1.0, million, 1, SOURCE.grid), rel=1e-4
    )
    assert rounding_cost(1.0, million, 1, 0.0) == 0.0
    with pytest.raises(ValueError, match="noise_multiplier=50 and 7,000,000,000 trainable entries"):
        rounding_cost(50, 7_000_000_000, 16, SOURCE.grid)


def test_the_noise_is_larger_by_what_rounding_costs() -> None:
    claim = SensitivityClaim(CLIP)
    std = noise_std(SIGMA, claim, 10_000, 1, SOURCE.grid)
    step = std * SOURCE.grid
    assert std >= SIGMA * (CLIP + 2 * step * math.sqrt(10_000))
    assert std <= SIGMA * (CLIP + 2 * step * math.sqrt(10_000)) * (1 + 1e-12)
    assert noise_std(SIGMA, claim, 10_000, 1, 0.0) == SIGMA * CLIP
    # Of all parameters together: a record moves them all.
    clipped = ClippedSum({"w": torch.zeros(60, 100), "v": torch.zeros(4000)}, claim)
    for noise, stated in (
        (GaussianNoise(SIGMA, source=SOURCE), std),
        (GaussianNoise(SIGMA), SIGMA * CLIP),
    ):
        assert noise.update(clipped, lambda _: KEY, noise.init())[0].noise_std == stated
    # An owner of some parameters says how many entries all have.
    part, noise = ClippedSum({"w": torch.zeros(9)}, claim), GaussianNoise(SIGMA, source=SOURCE)
    assert noise.update(part, lambda _: KEY, noise.init(), entries=10_000)[0].noise_std == std


def test_only_contributions_that_count_as_c_at_least_are_rounded() -> None:
    # With factor Z below 1 in the accounted law, C Z + rounding would not stay below (C + rounding)
    # Z.
    hutch = SensitivityClaim(CLIP, RandomizedClipping(32, "hutch", 100))
    with pytest.raises(ValueError, match=r"envelope='hutch'.*mixed"):
        noise_std(SIGMA, hutch, 100, 1, SOURCE.grid)
    assert noise_std(SIGMA, hutch, 100, 1, 0.0) == SIGMA * CLIP
    stds = [
        noise_std(SIGMA, SensitivityClaim(CLIP, clipping), 100, 1, SOURCE.grid) - SIGMA * CLIP
        for clipping in (RandomizedClipping(32), RandomizedClipping(32, "hutch++"))
    ]
    # What rounding adds is a larger part of a contribution that counts for 0.7 C.
    assert stds[0] > 0 and stds[1] == pytest.approx(2**0.5 * stds[0], rel=1e-3)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    st.lists(st.floats(-1.0, 1.0, width=32), min_size=20, max_size=20),
)
def test_rounded_neighbours_differ_by_two_steps_an_entry_at_most(
    entries: list[float], moved: list[float]
) -> None:
    std = noise_std(
        0.1, SensitivityClaim(CLIP), len(entries), 1, 2.0**-8
    )  # a coarse grid, to see it
    step = std * 2.0**-8
    one = torch.tensor(entries, dtype=torch.float64)
    other = one + torch.tensor(moved[: len(entries)], dtype=torch.float64)
    none = torch.zeros_like(one)
    apart = covered(one, none, std, 2.0**-8) - covered(other, none, std, 2.0**-8)
    assert ((apart - (one - other)).abs() <= 2 * step).all()
    assert apart.norm() <= (one - other).norm() + 2 * step * math.sqrt(len(entries))


def test_rounding_commutes_with_whole_steps_so_the_release_is_the_rounded_mechanism() -> None:
    # round(Q + noise) for Q on the grid and *real* noise is Q + round(noise): bit by bit, for any
    # data.
    std, step = 0.75, 0.75 * SOURCE.grid
    row = SOURCE.entries(KEY, 0, "w", 0, 500)
    base = covered(torch.zeros(500, dtype=torch.float64), row, std, SOURCE.grid)
    for shift in (1, -3, 2**20 + 1, -(2**31) - 7):
        moved = covered(
            torch.full((500,), shift * step, dtype=torch.float64), row, std, SOURCE.grid
        )
        assert torch.equal((moved / step).round(), (base / step).round() + shift)
    huge = covered(
        torch.tensor([1e30, -1e30]), torch.zeros(2, dtype=torch.float64), std, SOURCE.grid
    )
    assert huge.tolist() == pytest.approx(
        [2.0**51 * step, -(2.0**51) * step]
    )  # brought nearer, which adds to no distance


@pytest.mark.statistical
def test_a_release_covers_the_sum_with_noise_of_its_stated_size() -> None:
    clipped = ClippedSum(
        {"w": torch.full((300, 40), 0.25), "b": torch.full((50,), -2.0)}, SensitivityClaim(CLIP)
    )
    mechanism = GaussianNoise(SIGMA, source=SOURCE)
    released, _ = mechanism.update(clipped, lambda _: KEY, mechanism.init(3))
    noise = {
        n: (g.double() - clipped.gradients[n].double()).numpy()
        for n, g in released.gradients.items()
    }
    for values in noise.values():
        total, law = float((values**2).sum() / released.noise_std**2), stats.chi2(values.size)
        assert law.ppf(FALSE_ALARM / 2) < total < law.isf(FALSE_ALARM / 2)
        assert abs(values.mean()) < stats.norm.isf(
            FALSE_ALARM / 2
        ) * released.noise_std / math.sqrt(values.size)
        assert (
            not law.ppf(FALSE_ALARM / 2) < total * 4 / 9 < law.isf(FALSE_ALARM / 2)
            or values.size < 100
        )
    assert all(g.dtype == torch.float32 for g in released.gradients.values())
    assert torch.equal(
        clipped.gradients["b"], torch.full((50,), -2.0)
    )  # the sum itself is left as it was


def test_sums_in_single_precision_are_brought_to_the_grid_in_double() -> None:
    # A quotient in float32 would be off by up to 64 steps, where two are accounted for.
    total = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    none = torch.zeros(1000, dtype=torch.float64)
    assert torch.equal(covered(total, none, SIGMA * CLIP, SOURCE.grid), total)


# Correlated rows on the grid.

STEPS, BANDS = 7, 3


def banded(source=SOURCE, memory: str = "rows") -> GaussianNoise:
    return GaussianNoise(SIGMA, mixing_matrix(PrefixSums(STEPS), BANDS).banded, memory, source)


def test_correlated_rows_are_whole_steps_and_the_same_when_made_again() -> None:
    noise, like = banded(), {"w": torch.zeros(40), "v": torch.zeros(3, 5)}
    whole = noise.replay(like, lambda _: KEY, 0, STEPS)
    for row in whole.rows:
        for drawn in row.values():
            assert drawn.dtype == torch.float64 and torch.equal(
                drawn / SOURCE.grid, (drawn / SOURCE.grid).round()
            )
    half = noise.replay(
        {"w": like["w"][:17]}, lambda _: KEY, 0, STEPS
    )  # a shard that begins at 0 holds the same rows
    assert all(torch.equal(a["w"][:17], b["w"]) for a, b in zip(whole.rows, half.rows))


def explaining_draws(
    noise: GaussianNoise, releases: list[list[Fraction]], sums: list[list[int]], step: Fraction
) -> list[list[Fraction]]:
    """The independent draws, in steps of the grid, that give these releases on these (rounded)
    sums: exact arithmetic.
    """
    rows: list[list[Fraction]] = []
    draws = []
    for t, released in enumerate(releases):
        band = [float(c) for c in noise.mixing.row(t)]
        row = [r / step - q for r, q in zip(released, sums[t], strict=True)]
        drift = [Fraction(0)] * len(row)
        for m in range(1, min(len(band), t + 1)):
            share = Fraction(band[m] / band[0])
            drift = [d - share * w for d, w in zip(drift, rows[t - m], strict=True)]
        draws.append([w - round(d) for w, d in zip(row, drift, strict=True)])
        rows.append(row)
    return draws


@pytest.mark.parametrize("grid_bits", [6, 30])
def test_one_record_moves_the_draws_that_explain_the_releases_by_no_more_than_is_accounted(
    grid_bits: int,
) -> None:
    """The heart of the argument for correlated noise, run: the same releases, seen from the
    neighbouring data set, need draws that are nearer than C (1 + rounding_cost).
    """

    class Coarse(SecureSource):
        grid = 2.0**-grid_bits

    entries, claim = 12, SensitivityClaim(CLIP)
    sigma = (
        0.03 if grid_bits == 6 else SIGMA
    )  # on a coarse grid rounding is a large part, but below one per cent
    noise = replace(banded(Coarse()), noise_multiplier=sigma)
    std = noise_std(sigma, claim, entries, BANDS, noise.source.grid)
    step = Fraction(std) * Fraction(noise.source.grid)
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for taken in range(STEPS):  # the step in which the record takes part
        sums = torch.randn(STEPS, entries, generator=generator, dtype=torch.float64)
        record = torch.randn(entries, generator=generator, dtype=torch.float64)
        record *= CLIP / record.norm()
        neighbour = sums.clone()
        neighbour[taken] += record
        history, releases = noise.init(), []
        for t in range(STEPS):
            released, history = noise.update(
                ClippedSum({"w": sums[t]}, claim), lambda _: KEY, history
            )
            releases.append(
                [round(Fraction(float(x)) / step) * step for x in released.gradients["w"]]
            )
        rounded = [
            [[round(float(x) / float(step)) for x in row] for row in data]
            for data in (sums, neighbour)
        ]
        one, other = (explaining_draws(noise, releases, data, step) for data in rounded)
        assert all(float(d).is_integer() for row in one for d in row)
        apart = sum(
            (noise.mixing.row(t)[0] * float(a - b) * float(step)) ** 2
            for t in range(STEPS)
            for a, b in zip(one[t], other[t])
        )
        worst = max(worst, math.sqrt(apart))
    assert worst <= CLIP * (1 + rounding_cost(sigma, entries, BANDS, noise.source.grid))
    assert worst > 0.9 * CLIP  # it does move them


def test_the_first_release_of_correlated_noise_is_the_draw_that_the_source_gives() -> None:
    noise, claim = banded(), SensitivityClaim(CLIP)
    zero = ClippedSum({"w": torch.zeros(100, dtype=torch.float64)}, claim)
    released, history = noise.update(zero, lambda _: KEY, noise.init())
    scale = 1 / float(noise.mixing.row(0)[0])
    draw = SOURCE.entries(KEY, 0, "w", 0, 100, scale)
    assert torch.equal(history.rows[0]["w"], draw)
    std = noise_std(SIGMA, claim, 100, BANDS, SOURCE.grid)
    torch.testing.assert_close(released.gradients["w"], draw * std, rtol=1e-15, atol=0)


@pytest.mark.statistical
def test_correlated_noise_has_its_covariance() -> None:
    entries = 40_000
    zero = ClippedSum({"w": torch.zeros(entries)}, SensitivityClaim(CLIP))
    noise, rows = banded(), []
    history = noise.init()
    for _ in range(STEPS):
        released, history = noise.update(zero, lambda _: KEY, history)
        rows.append(released.gradients["w"].double().numpy())
    dense = np.zeros((STEPS, STEPS))
    for t in range(STEPS):
        for m, c in enumerate(noise.mixing.row(t)):
            dense[t, t - m] = c
    std = noise_std(SIGMA, zero.claim, entries, BANDS, SOURCE.grid)
    draws = dense @ np.stack(rows) / std  # independent standard normal rows again
    law = stats.chi2(entries)
    for t in range(STEPS):
        assert law.ppf(FALSE_ALARM / 20) < (draws[t] ** 2).sum() < law.isf(FALSE_ALARM / 20)
        assert not any(correlated(draws[t], draws[s], 100) for s in range(t))


def test_regenerated_rows_leave_the_grid_and_are_refused() -> None:
    with pytest.raises(ValueError, match=r"memory='regenerate'.*memory='rows'"):
        banded(memory="regenerate")
    assert banded(KeyedSource(), "regenerate").memory == "regenerate"


def test_a_matrix_whose_rows_float64_cannot_hold_on_the_grid_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quietgrad.noise import mechanism as module

    monkeypatch.setattr(
        module, "LARGEST_NORMAL", 14e7
    )  # as if rows were ten million times as large
    with pytest.raises(ValueError, match="float64 cannot keep its rows on the grid"):
        banded()


def test_every_band_of_a_row_counts_whatever_its_sign() -> None:
    # 660 times at the most, within what the mechanism takes: the sum of a row's bands as they are,
    # which nearly cancels, or one rounding for all of them would let it through.
    signs = np.sign(np.sin(np.arange(39) ** 2))
    columns = unit_columns(np.tile(np.append(1.0, 0.5 * signs), (50, 1)))
    with pytest.raises(ValueError, match="float64 cannot keep its rows on the grid"):
        GaussianNoise(SIGMA, BandedLower(columns), source=SOURCE)
    GaussianNoise(SIGMA, BandedLower(columns))


# In a plan.


def config(**changes) -> PrivacyConfig:
    settings_ = {
        "noise_multiplier": SIGMA,
        "max_grad_norm": CLIP,
        "expected_batch_size": 10,
        "steps": 4,
        "seed": 4,
        "data_are_public": True,
    }
    return changed(PrivacyConfig(**settings_), **({"source": "secure"} | changes))


@pytest.mark.parametrize("bands", [1, 2])
def test_a_plan_runs_with_it_and_its_ledger_says_so(bands: int, tmp_path) -> None:
    model = torch.nn.Linear(5, 3)
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    y = torch.arange(100) % 3

    def loss(m, b):
        return F.cross_entropy(m(b["x"]), b["y"], reduction="none")

    plan = config(bands=bands).build(100)
    with plan.start(ledger=tmp_path / "l.jsonl") as run:
        for indices in run.batches():
            released = run.step(model, loss, {"x": x[indices], "y": y[indices]})
    assert released.noise_std > 0
    header = json.loads((tmp_path / "l.jsonl").read_text().splitlines()[0])
    assert header["noise_source"] == "secure"
    if bands > 1:
        assert '"as": "secure' in (tmp_path / "l.jsonl").read_text().replace('"as":"', '"as": "')


def test_going_on_with_another_source_is_refused(tmp_path) -> None:
    config().build(100).start(ledger=tmp_path / "l.jsonl").close()
    with pytest.raises(ValueError, match="noise_source was 'secure' and is now 'keyed'"):
        config(source="keyed").build(100).start(ledger=tmp_path / "l.jsonl")


def test_how_it_is_drawn_tells_the_source() -> None:
    like = {"w": torch.zeros(2)}
    assert SOURCE.how_drawn(like) != KeyedSource().how_drawn(like)
    assert "secure" in SOURCE.how_drawn(like) and "AES-256" in SOURCE.how_drawn(like)


def test_a_missing_package_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "cryptography" else find(name)
    )
    with pytest.raises(ValueError, match=r"quietgrad\[secure\]"):
        config().build(100)
    config(source="keyed").build(100)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source='hardware' is unknown; valid: keyed, secure"):
        config(source="hardware").build(100)


def test_drawing_leaves_the_global_generators_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    SOURCE.normal(torch.zeros(10), KEY, 0, "w")
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])


def test_the_margin_that_rounds_up_covers_float64() -> None:
    rng = np.random.default_rng(0)
    for sigma, entries in zip(rng.uniform(0.1, 100, 200), rng.integers(1, 10**9, 200)):
        std = noise_std(float(sigma), SensitivityClaim(CLIP), int(entries), 1, SOURCE.grid)
        needed = Fraction(float(sigma)) * (
            Fraction(CLIP)
            + 2
            * Fraction(std)
            * Fraction(SOURCE.grid)
            * Fraction(math.isqrt(int(entries) * 10**40) + 1, 10**20)
        )
        assert Fraction(std) >= needed
    assert grids.ROUND_UP > 1


def test_noise_goes_to_the_device_of_the_gradients() -> None:
    drawn = SOURCE.normal(
        torch.zeros(3, 2, device="meta"), KEY, 0, "w"
    )  # a device that is everywhere
    assert drawn.device.type == "meta" and drawn.dtype == torch.float64 and drawn.shape == (3, 2)


@pytest.mark.parametrize("bands", [1, 2])
def test_what_it_costs_is_printed(bands: int) -> None:
    from quietgrad.cli.prepared import source_rows

    plan = config(bands=bands).build(100)
    [(name, text)] = source_rows(plan, 22_700_000).items()
    assert name == "noise source" and "22,700,000 entries" in text
    assert f"{rounding_cost(SIGMA, 22_700_000, bands, SOURCE.grid):.2g}" in text
    assert source_rows(config(source="keyed").build(100), 22_700_000) == {}


@pytest.mark.parametrize("beside", [False, True])
def test_a_grid_that_is_too_coarse_is_said_before_a_release_is_spent(
    tmp_path: Path, beside: bool
) -> None:
    plan = PrivacyConfig(
        noise_multiplier=1.0 if beside else 1e6,
        expected_batch_size=2,
        steps=3,
        noise=IndependentNoise(source="secure"),
        training_loss=TrainingLoss(own_noise=1e8) if beside else None,
    ).build(10)
    x = torch.randn(10, 100)
    with plan.start(tmp_path / "ledger.jsonl") as run:
        batches = run.batches()
        indices = next(batches)
        with pytest.raises(ValueError, match="would raise the sensitivity by"):
            run.step(nn.Linear(100, 9), lambda model, batch: model(batch).mean(1), x[indices])
        assert run.released == 0
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 0
