"""The secure source: its cipher, and the exactness of its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("cryptography")

from secure_source import FALSE_ALARM, KEY, SOURCE, STREAM, correlated

from quietgrad.noise.sources import rounded_normal as exact
from quietgrad.noise.sources.keystream import Keystream
from quietgrad.randomness import RandomKey


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


@pytest.mark.parametrize("below", [1, 2**9 - 1, 2**9, 2**12, 2**20])
def test_next_to_the_centre_float64_does_not_decide(below: int) -> None:
    """Mutant: of the 2^-54 next to one float64 makes one, and so a radius of 0 and no number."""
    stream = Chosen({0: [(2**63 - below, angle_word(0.1)), (2**62, 0), (2**62, 0)]})
    exactly = [exact._certain(stream, 0, column, 2.0**30) for column in (0, 1)]
    assert exact.rounded_normals(stream, 0, 2, 2.0**30).tolist() == exactly
    radius = 2.0**30 * math.sqrt(2 * below * 2.0**-63)
    assert exactly[0] == pytest.approx(radius * math.cos(0.1 * math.pi), abs=0.6)


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
