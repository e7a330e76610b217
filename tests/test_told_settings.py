"""What is told of settings that change: bounds, rounded to the side on which they are true."""

from __future__ import annotations

from typing import Any

import pytest

from quietgrad.accounting import epsilon_report
from quietgrad.cli import accounting
from quietgrad.events import EventSequence, PoissonGaussian
from quietgrad.training.files.card import privacy_lines

LEAST, MOST = 1.23456, 0.12345678
PHASES = EventSequence((PoissonGaussian(LEAST, 0.1, 3), PoissonGaussian(2.0, MOST, 3)))


def test_the_card_tells_no_more_noise_and_no_lower_rate_than_there_were() -> None:
    record: dict[str, Any] = {
        "data": "a file", "private": True, "epsilon": 1.0, "delta": 1e-5, "steps": 6,
        "neighbouring": "add-remove", "noise_multiplier": LEAST, "sample_rate": MOST, "bands": 1,
        "settings_change": True, "data_declared_public": False, "quietgrad": "0",
    }  # fmt: skip
    (line,) = (line for line in privacy_lines(record) if "Mechanism" in line)
    assert "at least 1.2345," in line and "at most 0.123457," in line
    del record["settings_change"]  # of one setting: the noise that is enough for the epsilon
    assert "multiplier 1.2346, Poisson" in "".join(privacy_lines(record))


def test_the_command_tells_no_more_noise_and_no_lower_rate_than_there_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    accounting._show("Privacy spent", PHASES, epsilon_report(PHASES, 1e-5), False, {})
    told = capsys.readouterr().out
    assert "at least 1.2345," in told and "at rate at most 0.123457" in told
