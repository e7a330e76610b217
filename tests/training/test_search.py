"""Settings found by Optuna: proposals, and refusals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import BANDS, EVERYTHING, LEARNING_RATE, METHOD, peak, study, table

from quietgrad.comparing.search import RATE, Range, SearchTable, propose, search_table

pytest.importorskip("optuna")


def test_the_next_trial_depends_on_the_trials_before_it_and_the_seed_alone() -> None:
    searched = table(*EVERYTHING)
    trials = study(searched, "banded", peak, 8)
    for told in (0, 3, 4, 7):
        propose(searched, "other", [])  # what else this process asks for does not matter
        assert propose(searched, "banded", trials[:told]) == trials[told][0]
    turned = [(proposed, -value) for proposed, value in trials]
    assert propose(searched, "banded", turned) != propose(searched, "banded", trials)
    assert propose(table(*EVERYTHING, search_seed=1), "banded", trials) != propose(
        searched, "banded", trials
    )
    assert len({proposed for proposed, _ in trials}) == len(trials)


def test_another_process_makes_the_same_trials() -> None:
    trials = study(table(*EVERYTHING), "banded", peak, 6)
    code = (
        f"from quietgrad.comparing.search import *\nprint(propose({table(*EVERYTHING)!r}, "
        f"'banded', {trials!r}))"
    )
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == repr(propose(table(*EVERYTHING), "banded", trials))


def test_a_variant_is_asked_for_its_own_settings_within_their_bounds() -> None:
    for variant in ("banded", "other"):
        for proposed, _ in study(table(*EVERYTHING), variant, peak, 12):
            found = dict(proposed)
            assert set(found) == {r.key for r in EVERYTHING} - (
                set() if variant == "banded" else {"noise.bands"}
            )
            assert 1e-4 <= found[RATE] <= 1.0 and 0.1 <= found["privacy.max_grad_norm"] <= 10
            assert found["denoising.method"] in METHOD.choices
            bands = found.get("noise.bands", 1)
            assert isinstance(bands, int) and 1 <= bands <= 20
            assert proposed == tuple(sorted(proposed))


def test_random_trials_of_two_variants_agree_on_what_they_share() -> None:
    searched = table(*EVERYTHING, startup=3)
    one, two = (study(searched, variant, peak, 5) for variant in ("banded", "other"))
    for (banded, _), (other, _) in zip(one[:3], two[:3], strict=True):
        assert dict(other).items() <= dict(banded).items()
    # Not so what they learn from.
    worse = study(searched, "other", lambda found: -peak(found), 5)
    assert [t for t, _ in worse[:3]] == [t for t, _ in two[:3]] and worse[3][0] != two[3][0]


def test_trials_are_random_until_the_last_of_the_startup() -> None:
    searched = table(LEARNING_RATE, startup=4)
    trials = study(searched, "other", peak, 6)
    turned = [(proposed, -value) for proposed, value in trials]
    same = [
        propose(searched, "other", trials[:n]) == propose(searched, "other", turned[:n])
        for n in range(6)
    ]
    assert same == [True, True, True, True, False, False]


@pytest.mark.parametrize("seed", range(4))
def test_the_sampler_learns_from_earlier_trials(seed: int) -> None:
    values = [v for _, v in study(table(LEARNING_RATE, search_seed=seed), "other", peak, 25)]
    assert max(values[4:]) > max(values[:4])
    random = [
        v for _, v in study(table(LEARNING_RATE, search_seed=seed, startup=25), "other", peak, 25)
    ]
    # Half of what is learnt lies within a factor of 5.6 of the best rate; of random ones, half
    # within a factor of 10.
    assert np.median(values[4:]) > -3 > np.median(random[4:])


@given(
    low=st.floats(1e-6, 1e3),
    ratio=st.floats(1.00001, 1e4),
    log=st.booleans(),
    negative=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=150)
def test_rounding_keeps_the_bounds(
    low: float, ratio: float, log: bool, negative: bool, seed: int
) -> None:
    high = low * ratio
    if negative and not log:
        low, high = -high, -low
    searched = table(Range("a.b", low, high, log=log), search_seed=seed, startup=2)
    for proposed, _ in study(searched, "x", lambda found: found["a.b"], 4):
        value = dict(proposed)["a.b"]
        assert low <= value <= high
        assert value in (low, high) or value == float(f"{value:.3g}")


@given(
    low=st.integers(1, 50), width=st.integers(1, 50), log=st.booleans(), seed=st.integers(0, 1000)
)
@settings(deadline=None, max_examples=30)
def test_whole_numbers_stay_whole_and_reach_both_bounds(
    low: int, width: int, log: bool, seed: int
) -> None:
    searched = table(Range("a.b", low, low + width, log=log), search_seed=seed, startup=2)
    for proposed, _ in study(searched, "x", lambda found: found["a.b"], 4):
        value = dict(proposed)["a.b"]
        assert isinstance(value, int) and low <= value <= low + width


def test_both_bounds_of_whole_numbers_are_tried() -> None:
    found = {
        dict(p)["a.b"]
        for p, _ in study(table(Range("a.b", 1, 2), startup=12), "x", lambda found: 0.0, 12)
    }
    assert found == {1, 2}


def test_a_table_is_read_as_written() -> None:
    values = {
        "trials": 7,
        "search_seed": 3,
        "ranges": {
            RATE: {"low": 1e-4, "high": 1.0, "log": True},
            "denoising.method": {"choices": ["none", "persistent", "published"]},
            "noise.bands": {"low": 1, "high": 20, "variants": ["banded"]},
        },
    }
    found = search_table(values, ["other", "banded"])
    assert found == SearchTable(7, 4, 3, (LEARNING_RATE, METHOD, BANDS))
    assert [r.key for r in found.ranges_of("other")] == [RATE, "denoising.method"]
    assert "ranges" in values  # the caller's table is left as it was


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trials": 0}, "search.trials=0"),
        ({"trials": None}, "search.trials"),
        ({"trials": 2.5}, "search.trials=2.5 must be a whole number"),
        ({"trials": True}, "search.trials=True must be a whole number"),
        ({"startup": "two"}, "search.startup='two' must be a whole number"),
        ({"search_seed": 0.5}, "search.search_seed=0.5"),
        ({"trails": 3}, "unknown key search.trails; did you mean 'trials'"),
        ({"ranges": {}}, 'has no "optimizer.learning_rate"'),
        ({"ranges": None}, 'has no "optimizer.learning_rate"'),
        ({"ranges": {"noise.bands": {"low": 1, "high": 4}}}, 'has no "optimizer.learning_rate"'),
    ],
    ids=str,
)
def test_a_bad_search_is_refused(changes: dict, message: str) -> None:
    values = {"trials": 4, "ranges": {RATE: {"low": 0.1, "high": 1.0}}} | changes
    with pytest.raises(ValueError, match=message):
        search_table(
            {name: value for name, value in values.items() if value is not None}, ["banded"]
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"low": 1.0, "high": 1.0}, "must have low < high"),
        ({"low": 2.0, "high": 1.0}, "must have low < high"),
        ({"low": 0.0, "high": 1.0, "log": True}, "low > 0 with log = true"),
        ({"low": -1.0, "high": 1.0, "log": True}, "low > 0 with log = true"),
        ({"low": 1.0}, "must have low < high"),
        ({"high": 1.0}, "must have low < high"),
        ({"low": "a", "high": "b"}, "low='a' must be a whole number or a number, not a string"),
        ({}, "must have low < high"),
        ({"choices": []}, "or choices"),
        ({"low": 0.1, "height": 1.0}, 'unknown key search.ranges."optimizer.learning_rate".height; '
                                      'did you mean'),
        ({"key": "a.b", "low": 0.1, "high": 1.0}, 'unknown key '
                                                  'search.ranges."optimizer.learning_rate".key'),
        ({"low": 0.1, "high": 1.0, "variants": ["bandit"]},
         "'bandit', which is no variant; did you mean 'banded'"),
        (0.5, "=0.5 must be a table"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_range_is_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search_table({"trials": 4, "ranges": {RATE: values}}, ["banded"])
