"""The secure source: its cipher, the exactness of its numbers, the grid that releases live on, and
what rounding costs.

Statistical tests reject at FALSE_ALARM each; there are fewer than thirty of them, so a right
implementation fails one with probability below 3e-7. Seeds are fixed: it fails always or never.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("cryptography")

from plans import changed

from quietgrad import PrivacyConfig
from quietgrad.clipping import ClippedSum
from quietgrad.events import RandomizedClipping, SensitivityClaim
from quietgrad.noise import GaussianNoise, KeyedSource, PrefixSums, SecureSource, mixing_matrix
from quietgrad.noise.sources import grid as grids
from quietgrad.noise.sources import rounded_normal as exact
from quietgrad.noise.sources.grid import covered, noise_std, rounding_cost
from quietgrad.noise.sources.keystream import Keystream
from quietgrad.randomness import RandomKey

FALSE_ALARM = 1e-8
KEY = RandomKey.from_seed(11)
SOURCE = SecureSource()
STREAM = Keystream(bytes(range(32)))
SIGMA, CLIP = 1.7, 0.3


@dataclass(frozen=True)
class Chosen:
    """A stream whose blocks are given: pair -> its levels; other blocks are STREAM's."""

    blocks: dict[int, list[tuple[int, int]]]

    def block(self, level: int, index: int) -> tuple[int, int]:
        given_ = self.blocks.get(index, [])
        return given_[level] if level < len(given_) else STREAM.block(level, index)

    def words(self, level: int, start: int, count: int) -> torch.Tensor:
        made = [self.block(level, index) for index in range(start, start + count)]
        return torch.from_numpy(np.array(made, dtype=np.uint64).view(np.int64))


# The cipher.


def test_blocks_are_those_of_aes_256() -> None:
    # FIPS 197, appendix C.3: the counter block 00112233445566778899aabbccddeeff under the key 00 01
    # .. 1f.
    first, second = STREAM.block(0x0011223344556677, 0x8899AABBCCDDEEFF)
    made = first.to_bytes(8, "little") + second.to_bytes(8, "little")
    assert made.hex() == "8ea2b7ca516745bfeafc49904b496089"


def test_keys_of_streams_are_the_whole_root_under_a_name() -> None:
    names = [
        ("noise", 0, "w"),
        ("noise", 1, "w"),
        ("noise", 0, "v"),
        ("sampling", 0, "w"),
        ("noise", 0, ""),
    ]
    keys = [KEY.stream_key(*name) for name in names]
    assert {len(key) for key in keys} == {32} and len(set(keys)) == len(keys)
    assert keys == [RandomKey.from_seed(11).stream_key(*name) for name in names]
    flipped = RandomKey(KEY.root[:-1] + bytes([KEY.root[-1] ^ 1]), reproducible=True)
    assert flipped.stream_key(*names[0]) != keys[0]
    # 128 bits that the ordinary streams use say nothing of it.
    assert KEY.words(*names[0])[0].to_bytes(8, "little") not in keys[0]
    assert keys[0].hex() not in repr(Keystream(keys[0])) and str(keys[0]) not in repr(
        Keystream(keys[0])
    )


# Correctly rounded normal numbers.


@given(
    start=st.integers(0, 3000),
    count=st.integers(0, 300),
    chunk=st.sampled_from([1, 7, 64, 1 << 16]),
)
@settings(max_examples=60)
def test_any_cut_gives_the_same_numbers(start: int, count: int, chunk: int) -> None:
    whole = SOURCE.entries(KEY, 4, "w", 0, 3300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "CHUNK", chunk)
        assert torch.equal(SOURCE.entries(KEY, 4, "w", start, count), whole[start : start + count])


def test_a_parameters_noise_is_its_entries_in_order_whatever_its_dtype() -> None:
    whole = SOURCE.entries(KEY, 4, "w", 0, 60)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        drawn = SOURCE.normal(torch.zeros(3, 4, 5, dtype=dtype), KEY, 4, "w")
        assert drawn.dtype == torch.float64 and torch.equal(drawn.reshape(-1), whole)
    assert SOURCE.normal(torch.zeros(()), KEY, 4, "w").shape == ()
    assert SOURCE.normal(torch.zeros(0, 3), KEY, 4, "w").shape == (0, 3)
    far = SOURCE.entries(KEY, 4, "w", 10**15 + 1, 5)  # no draw before it is made
    assert torch.equal(far[1:], SOURCE.entries(KEY, 4, "w", 10**15 + 2, 4))


@pytest.mark.parametrize("scale", [0.3, 5.0, 2.0**30, 1.37 * 2.0**31, 2.0**38, 2.0**43])
def test_the_fast_way_rounds_as_many_digits_do(scale: float) -> None:
    # At 2^38 one entry in two hundred goes the slow way, at 2^43 every one.
    count = 600
    slow = [exact._certain(STREAM, i // 2, i % 2, scale) for i in range(count)]
    assert exact.rounded_normals(STREAM, 0, count, scale).tolist() == slow


def angle_word(turn: float) -> int:
    """The word of A = turn, in [-1, 1)."""
    return int(turn * 2**63) % 2**64


EDGES = [
    1,
    2,
    3,
    2**20 + 1,
    2**42,
    2**43 - 1,
    2**62,
    2**63 - 2**40,
    2**63 - 2**10 - 1,
    2**63 - 2,
    2**63 - 1,
]
TURNS = [0.0, 1e-18, -1e-9, 0.25, 0.5, 0.5 + 1e-12, -0.5, 0.75, 0.999999999, -1.0, -0.3333333333]


def test_float64_errs_by_less_than_a_quarter_of_what_is_allowed() -> None:
    rng = np.random.default_rng(0)
    words = [(u, angle_word(turn)) for u in EDGES for turn in TURNS]
    words += [(int(u), int(a)) for u, a in rng.integers(0, 2**63, (400, 2), dtype=np.uint64)]
    words += [
        (int(2.0 ** rng.uniform(1, 63)) | 1, int(a))
        for a in rng.integers(0, 2**63, 200, dtype=np.uint64)
    ]
    scale = 2.0**80  # so that whole numbers show the error
    drawn = torch.from_numpy(np.array(words, dtype=np.uint64).view(np.int64))
    uniform = (drawn[:, 0] & exact.POSITIVE).to(torch.float64) * 2.0**-63
    radius = (uniform.log() * -2).sqrt()
    angle = drawn[:, 1].to(torch.float64) * (math.pi * 2.0**-63)
    bounds = exact.error_bound(uniform, radius).tolist()
    for column, made in ((0, radius * angle.cos()), (1, radius * angle.sin())):
        for i, (u, a) in enumerate(words):
            # The rest of the bits at either end: what the pair can still become.
            ends = [
                exact._certain(Chosen({0: [(u, a), (rest, rest)]}), 0, column, scale)
                for rest in (0, 2**64 - 1)
            ]
            wrong = max(
                abs(Fraction(end) / Fraction(scale) - Fraction(made[i].item())) for end in ends
            )
            assert wrong < bounds[i] / 4 or bounds[i] == math.inf, (u, a, column)
    assert (
        max(b for b, r in zip(bounds, radius.tolist()) if exact.NARROW <= r <= exact.WIDE)
        < exact.ERROR
    )


@pytest.mark.parametrize(("scale", "column"), [(2.0**30, 0), (2.0**30, 1), (3.0, 0)])
def test_a_number_next_to_a_boundary_is_decided_by_later_bits(scale: float, column: int) -> None:
    # Bisect the first word until the boundary lies among what it leaves open; later bits alone then
    # decide, both ways.
    turn = angle_word(0.2 if column == 0 else 0.3)

    def at(word: int, rest: int) -> int:
        return exact._certain(Chosen({0: [(word, turn), (rest, 0), (rest, 0)]}), 0, column, scale)

    low, high = 2**61, 2**61 + 2**40 if scale > 4 else 2**62
    assert at(low, 0) > at(high, 0)
    target = at(low, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle, 0) == target else (low, middle)
    assert (
        at(low, 0) == target and at(low, 2**64 - 1) == target - 1
    )  # the boundary is within word ``low``
    for rest in (0, 2**64 - 1):
        stream = Chosen({0: [(low, turn), (rest, 0), (rest, 0)]})
        assert exact.rounded_normals(stream, 0, 2, scale)[column].item() == at(low, rest)


def test_the_tail_has_no_end() -> None:
    # 63 zero bits: float64 makes infinity of them; the next bits say how far it goes, beyond the
    # 9.3 at which 63 bits end.
    for rest, expected in (
        (1, math.sqrt(2 * 127 * math.log(2))),
        (2**63, math.sqrt(2 * 64 * math.log(2))),
    ):
        stream = Chosen({0: [(0, angle_word(0.0)), (rest, 0)]})
        value = exact.rounded_normals(stream, 0, 1, 2.0**30).item() / 2**30
        assert value == pytest.approx(expected, rel=0.01) and value > 9.3
    assert exact.rounded_normals(Chosen({0: [(0, 0), (0, 0), (1, 0)]}), 0, 1, 1.0).item() == 16


def masses(scale: float, reach: int) -> np.ndarray:
    """P(k) for |k| < reach, and what is beyond it."""
    inner = np.diff(stats.norm.cdf((np.arange(-reach + 1, reach + 1) - 0.5) / scale))
    return np.append(inner, 1 - inner.sum())


def misfit(values: np.ndarray, scale: float, reach: int) -> float:
    """p-value of the chi-square test that whole numbers have these masses."""
    inside = values[np.abs(values) < reach].astype(int) + reach - 1
    counts = np.append(
        np.bincount(inside, minlength=2 * reach - 1), np.sum(np.abs(values) >= reach)
    )
    return float(stats.chisquare(counts, masses(scale, reach) * len(values)).pvalue)


@pytest.mark.statistical
@pytest.mark.parametrize(("scale", "reach"), [(0.4, 2), (1.0, 4), (3.7, 13)])
def test_whole_numbers_have_the_masses_of_a_rounded_normal(scale: float, reach: int) -> None:
    values = exact.rounded_normals(STREAM, 0, 200_000, scale).numpy()
    assert misfit(values, scale, reach) > FALSE_ALARM
    # Wrong ones are told: two thirds of the size, 2 % too small, truncated instead of rounded, and
    # the tail cut at three deviations.
    assert (
        misfit(exact.rounded_normals(STREAM, 0, 200_000, 2 / 3 * scale).numpy(), scale, reach)
        < FALSE_ALARM
    )
    assert (
        misfit(exact.rounded_normals(STREAM, 0, 200_000, 0.98 * scale).numpy(), scale, reach)
        < FALSE_ALARM
    )
    fine = exact.rounded_normals(STREAM, 0, 200_000, 1024 * scale).numpy() / 1024
    assert misfit(np.floor(fine), scale, reach) < FALSE_ALARM
    if scale >= 1:
        assert (
            misfit(np.clip(values, -2.6 * scale, 2.6 * scale).round(), scale, reach) < FALSE_ALARM
        )


LARGE = 2_000_000


@pytest.fixture(scope="module")
def many() -> np.ndarray:
    return SOURCE.entries(KEY, 0, "many", 0, LARGE).numpy()


def tail_is_wrong(values: np.ndarray, at: float) -> bool:
    """Poisson, two-sided, on the number of entries beyond ``at``."""
    expected, found = 2 * stats.norm.sf(at) * len(values), int((np.abs(values) > at).sum())
    return (
        min(stats.poisson.cdf(found, expected), stats.poisson.sf(found - 1, expected))
        < FALSE_ALARM / 2
    )


@pytest.mark.statistical
def test_moments_shape_and_tails_are_normal(many: np.ndarray) -> None:
    assert stats.kstest(many, "norm").pvalue > FALSE_ALARM
    assert stats.kstest(many * 2 / 3, "norm").pvalue < FALSE_ALARM
    # Of the first eight moments each is off by less than its own standard error times the quantile.
    worst = stats.norm.isf(FALSE_ALARM / 2)
    for power in range(1, 9):
        mean = stats.norm.moment(power)
        error = math.sqrt((stats.norm.moment(2 * power) - mean**2) / LARGE)
        assert abs((many**power).mean() - mean) < worst * error
    for at in (2.0, 3.0, 4.0, 4.5):
        assert not tail_is_wrong(many, at)
        if at < 4.5:  # fourteen entries are too few to miss them
            assert tail_is_wrong(2 / 3 * many, at)
            assert tail_is_wrong(np.clip(many, -at, at), at)  # a truncated tail
    half = stats.chi2(LARGE)
    assert half.ppf(FALSE_ALARM / 2) < (many**2).sum() < half.isf(FALSE_ALARM / 2)


def correlated(one: np.ndarray, other: np.ndarray, comparisons: int) -> bool:
    cosine = float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
    return abs(cosine) * math.sqrt(len(one)) > stats.norm.isf(FALSE_ALARM / (2 * comparisons))


def any_correlation(length: int = 4096) -> bool:
    """Between streams of other steps, names and roots, of squares too, and within a stream at many
    distances.
    """
    other = RandomKey.from_seed(12)
    names = [(KEY, 0, "w"), (KEY, 1, "w"), (KEY, 0, "v"), (KEY, 256, "w"), (other, 0, "w")]
    rows = [SOURCE.entries(*name, 0, length).numpy() for name in names]
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    pairs += [(a**2 - 1, b**2 - 1) for a, b in pairs]
    distances = (1, 2, 3, 64, length // 2)
    pairs += [(rows[0][:-d], rows[0][d:]) for d in distances]
    pairs += [(rows[0][:-d] ** 2 - 1, rows[0][d:] ** 2 - 1) for d in distances]
    return any(correlated(a, b, len(pairs)) for a, b in pairs)


@pytest.mark.statistical
@pytest.mark.parametrize("wrong", ["", "step", "name", "root", "counter", "pair"])
def test_streams_are_independent(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "CHUNK", 1024)
    right_key, right_words = RandomKey.stream_key, Keystream.words
    if wrong == "step":
        monkeypatch.setattr(
            RandomKey,
            "stream_key",
            lambda self, purpose, step, name: right_key(self, purpose, 0, name),
        )
    if wrong == "name":
        monkeypatch.setattr(
            RandomKey,
            "stream_key",
            lambda self, purpose, step, name: right_key(self, purpose, step),
        )
    if wrong == "root":
        monkeypatch.setattr(
            RandomKey,
            "stream_key",
            lambda self, purpose, step, name: right_key(KEY, purpose, step, name),
        )
    if wrong == "counter":  # every chunk begins at the same block
        monkeypatch.setattr(
            Keystream, "words", lambda self, level, start, count: right_words(self, level, 0, count)
        )
    if wrong == "pair":  # both words of a block the same
        monkeypatch.setattr(
            Keystream, "words", lambda *at: right_words(*at)[:, :1].expand(-1, 2).contiguous()
        )
    assert any_correlation() == (wrong != "")


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
    clipped = ClippedSum({"w": torch.zeros(100, 100)}, claim)
    for noise, stated in (
        (GaussianNoise(SIGMA, source=SOURCE), std),
        (GaussianNoise(SIGMA), SIGMA * CLIP),
    ):
        assert noise.update(clipped, lambda _: KEY, noise.init())[0].noise_std == stated


def test_only_contributions_that_count_as_c_at_least_are_rounded() -> None:
    # With factor Z below 1 in the accounted law, C Z + rounding would not stay below (C + rounding)
    # Z.
    hutch = SensitivityClaim(CLIP, RandomizedClipping(32, "hutch", 100))
    with pytest.raises(ValueError, match=r"envelope='hutch'.*mixed"):
        noise_std(SIGMA, hutch, 100, 1, SOURCE.grid)
    assert noise_std(SIGMA, hutch, 100, 1, 0.0) == SIGMA * CLIP
    assert (
        noise_std(SIGMA, SensitivityClaim(CLIP, RandomizedClipping(32)), 100, 1, SOURCE.grid)
        > SIGMA * CLIP
    )


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
    from quietgrad.cli.noise import source_rows

    plan = config(bands=bands).build(100)
    [(name, text)] = source_rows(plan, 22_700_000).items()
    assert name == "noise source" and "22,700,000 entries" in text
    assert f"{rounding_cost(SIGMA, 22_700_000, bands, SOURCE.grid):.2g}" in text
    assert source_rows(config(source="keyed").build(100), 22_700_000) == {}
