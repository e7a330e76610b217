"""The noise in the figure of peers is what the accountants say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "noise_peers.py"))
FOUND: dict[str, float] = json.loads(SCRIPT["RESULTS"].read_text())["noise_multipliers"]


def test_they_are_asked_again() -> None:
    exact = SCRIPT["quietgrad"](SCRIPT["Clipping"]("exact"))
    assert exact == pytest.approx(FOUND["quietgrad"], rel=1e-4)
    sketched = SCRIPT["quietgrad"](SCRIPT["Clipping"]("hutch++", 32))
    assert sketched == pytest.approx(FOUND["quietgrad-hutch++-32"], rel=1e-4)
    assert SCRIPT["opacus"]("rdp") == pytest.approx(FOUND["opacus-rdp"], rel=1e-3)


def test_accountants_of_one_mechanism_agree_and_looser_bounds_cost_more() -> None:
    exact = FOUND["quietgrad"]
    assert FOUND["jax-privacy-pld"] == pytest.approx(exact, rel=1e-3)
    assert exact <= FOUND["opacus-prv"] * (1 + 1e-3) < FOUND["opacus-rdp"]
    assert FOUND["jax-privacy-rdp"] == pytest.approx(FOUND["opacus-rdp"], rel=1e-3)
    drawn = runpy.run_path(str(ROOT / "scripts" / "peers_figure.py"))["NOISE"]
    assert set(drawn) == set(FOUND)
