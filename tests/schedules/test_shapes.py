"""Shapes of schedules, in Python and in files: their values, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quietgrad.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Listed,
    Phase,
    Schedules,
    Stepwise,
)
from quietgrad.schedules.phases import course_of
from quietgrad.schedules.shapes import factors_of, shape_from
from quietgrad.training.settings.config import config_from, load_config

FACTORS = st.floats(0.01, 100.0)


@given(st.sampled_from([Linear, Cosine, Exponential]), FACTORS, FACTORS, st.integers(1, 60))
def test_ramps_go_from_the_first_factor_to_the_last_and_stay_between(
    kind, first, last, steps
) -> None:
    values = kind(first, last).values(steps)
    assert len(values) == steps and values[0] == pytest.approx(first, rel=1e-12)
    if steps > 1:
        assert values[-1] == pytest.approx(last, rel=1e-12)
    low, high = min(first, last), max(first, last)
    assert all(low * (1 - 1e-12) <= value <= high * (1 + 1e-12) for value in values)
    assert list(values) == sorted(values, reverse=first > last)


def test_values_by_hand() -> None:
    assert Constant(2.0).values(3) == [2.0] * 3
    assert Linear(1.0, 3.0).values(3) == [1.0, 2.0, 3.0]
    assert Exponential(1.0, 4.0).values(3) == pytest.approx([1.0, 2.0, 4.0])
    assert Cosine(1.0, 0.0001).values(4)[1] == pytest.approx(
        1 - 0.9999 * (0.5 - 0.5 * math.cos(math.pi / 3))
    )
    assert Stepwise((1.0, 0.5, 2.0), (2, 3)).values(5) == [1.0, 1.0, 0.5, 2.0, 2.0]
    assert Listed((1.0, 2.0)).values(2) == [1.0, 2.0]


@given(st.sampled_from([Linear, Cosine, Exponential]), FACTORS, st.integers(1, 60))
def test_a_ramp_between_equal_factors_is_constant_to_the_bit(kind, factor, steps) -> None:
    assert set(kind(factor, factor).values(steps)) == {factor}


class WithValues:
    """As a column of pandas has."""

    values = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Linear(0.0, 1.0), "first=0.0 must be positive"),
        (lambda: Cosine(1.0, math.inf), "last=inf"),
        (lambda: Linear("1", 1.0), "first='1' must be a number"),
        (lambda: Stepwise((1.0, 2.0)), "one fewer than factors"),
        (lambda: Stepwise((1.0, 2.0, 3.0), (4, 4)), "must rise"),
        (lambda: factors_of("noise", Stepwise((1.0, 2.0), (9,)), 9), "use steps below 9"),
        (lambda: factors_of("noise", Listed((1.0, 2.0)), 3), "2 entries for 3 steps"),
        (lambda: factors_of("noise", -1.0, 3), "noise=-1.0 must be positive"),
        (lambda: factors_of("noise", math.nan, 3), "noise=nan"),
        (lambda: factors_of("noise", "cosine", 3), "is no schedule; pass a number or one of"),
        (lambda: factors_of("noise", {0: 1.0, 2: 0.5}, 3), "is no schedule; pass a number or one"),
        (lambda: factors_of("noise", WithValues(), 3), "is no schedule; pass a number or one of"),
        (lambda: shape_from("noise", {"shape": "cosin"}), "did you mean 'cosine'"),
        (lambda: shape_from("noise", {"shape": "linear", "end": 1.0}), "noise.end=1.0 is no key"),
        (lambda: shape_from("noise", {"shape": "linear", "last": 0}), "noise.last=0"),
        (lambda: course_of([(3, Schedules(batch_size=20.0), "s")], 0.1, 1.0), "at most 10"),
        (lambda: course_of([(2_000_000, Schedules(Linear(1, 2)), "s")], 0.1, 1.0), "100,000"),
        (lambda: Phase(steps=3, epochs=1.0).steps_at(0.1, "phases[0]."), "exactly one of"),
        (lambda: Phase(batch_size=Linear(1, 2), epochs=1).steps_at(0.1, "p."), "give steps"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_with_the_remedy(made, told) -> None:
    with pytest.raises((ValueError, TypeError), match=told.replace("[", r"\[").replace("(", r"\(")):
        made()


class Odd:
    """A schedule of a user's own."""

    def __init__(self, values: list[float]) -> None:
        self.own = values

    def values(self, steps: int) -> list[float]:
        return self.own


def test_a_schedule_of_ones_own_is_checked_step_by_step() -> None:
    assert factors_of("noise", Odd([1.0, 2.0]), 2) == [1.0, 2.0]
    with pytest.raises(ValueError, match="gives 2 factors for 3 steps"):
        factors_of("noise", Odd([1.0, 2.0]), 3)
    with pytest.raises(ValueError, match=r"noise at step 1=0\.0 must be positive"):
        factors_of("noise", Odd([1.0, 0.0]), 2)


def test_a_file_s_schedules_read_back(tmp_path) -> None:
    tree = {
        "schedules": {
            "noise": {"shape": "cosine", "first": 2, "last": 1.0},
            "clipping_norm": {"shape": "step", "factors": [1, 0.5], "begins": [10]},
            "batch_size": 2,
        }
    }
    config = config_from(tree)
    assert config.schedules.of_run == Schedules(Cosine(2, 1), Stepwise((1.0, 0.5), (10,)), 2.0)
    path = tmp_path / "c.toml"
    path.write_text(config.to_toml())
    assert load_config(path) == config
    phases = [{"steps": 5}, {"epochs": 2, "noise": {"shape": "linear", "last": 0.5}}]
    config = config_from({"schedules": {"phases": phases}})
    assert config.schedules.of_phases == (Phase(steps=5), Phase(Linear(1.0, 0.5), epochs=2))
    path.write_text(config.to_toml())
    assert load_config(path) == config
    override = 'schedules.noise={shape="linear", first=2, last=1}'
    assert load_config(None, [override]).schedules.of_run == Schedules(Linear(2, 1))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"noise": {"shape": "wave"}}, "schedules.noise.shape='wave' is unknown"),
        ({"noise": {"first": 1.0}}, "schedules.noise.shape=None is unknown"),
        ({"noise": 0}, "schedules.noise=0"),
        ({"noise": "cosine"}, "schedules.noise='cosine'"),
        ({"phases": [{"steps": 3, "sigma": 1.0}]}, "phases[0].sigma=1.0 is no key of a phase"),
        ({"phases": [{"noise": 1.0}]}, "give exactly one of phases[0].steps and"),
        ({"phases": [{"steps": 3}], "noise": 2.0}, "leave schedules.noise out"),
        ({"sigma": 1.0}, "unknown key schedules.sigma"),
    ],
)
def test_a_file_s_mistakes_are_named(table, told) -> None:
    with pytest.raises(ValueError, match=told.replace("[", r"\[").replace(".", r"\.")):
        config_from({"schedules": table})


def test_a_number_of_numpys_is_a_number() -> None:
    assert factors_of("noise", np.float32(0.5), 2) == [0.5, 0.5]
