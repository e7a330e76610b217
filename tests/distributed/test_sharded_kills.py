"""A sharded run whose ranks are killed under torchrun's elastic agent: the campaign of
``benchmarks/sharded_kills.py`` in small, and what it looks for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sharded_kills.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # its frozen records look their module up
    spec.loader.exec_module(module)
    return module


KILLS = script()
CASE = KILLS.Case(kills=1, steps=3)


@pytest.mark.slow("torchrun starts two processes three times")
def test_a_sharded_run_survives_kills_of_its_ranks() -> None:
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--case", "smoke"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)["cases"]["smoke"]
    assert told["wrong"] == []
    assert len(told["kills"]) == 2 and told["starts"] == 3
    assert told["releases"] == KILLS.CASES["smoke"].steps >= told["releases_drawn"]
    assert told["epsilon"] <= told["target_epsilon"]


def end_of(case: Any, applied: Tensor) -> Tensor:
    """Stands for the replay: an end that tells what was applied."""
    return applied.double()


def sound() -> Any:
    """Of a run of which release 1 was lost when a rank was killed in it."""
    applied = torch.tensor([True, False, True])
    draws = [
        {"step": step, "name": name, "from": 0, "entries": p.numel(), "counted": step + 1}
        for step in (0, 2)
        for name, p in KILLS.model_of().named_parameters()
    ]
    starts = [{"kills": 0, "counted": 0, "drawn": 0}, {"kills": 1, "counted": 2, "drawn": 1}]
    ends = [applied.double(), applied.double()]
    return KILLS.Facts([0, 1, 2], 7.9, draws, starts, [{"rank": 0}], ends, applied)


Break = Callable[[Any], Any]
BROKEN: dict[str, tuple[Break, str]] = {
    "a release is lost from the ledger": (
        lambda f: replace(f, releases=[0, 2]),
        "the ledger's releases are",
    ),
    "a release is counted twice": (
        lambda f: replace(f, releases=[0, 1, 1, 2]),
        "the ledger's releases are",
    ),
    "more is spent than planned": (lambda f: replace(f, epsilon=8.1), "above the target"),
    "noise comes before the ledger": (
        lambda f: replace(f, draws=[f.draws[0] | {"counted": 0}, *f.draws[1:]]),
        "before the ledger counted releases [0]",
    ),
    "a start has forgotten a release": (
        lambda f: replace(f, starts=[f.starts[0], f.starts[1] | {"counted": 0}]),
        "found 1 releases drawn, 0 counted",
    ),
    "noise is drawn twice": (
        lambda f: replace(f, draws=[*f.draws, f.draws[-1]]),
        "was drawn 2 times",
    ),
    "a shard has no noise": (lambda f: replace(f, draws=f.draws[1:]), "release 0 was applied"),
    "a kill did not come": (lambda f: replace(f, kills=[]), "0 of 1 kills"),
    "a rank ends elsewhere": (
        lambda f: replace(f, ends=[f.ends[0], f.ends[1] + 1]),
        "rank 1 does not end",
    ),
    "what was lost is applied": (
        lambda f: replace(f, ends=[torch.ones(3).double()] * 2),
        "rank 0 does not end",
    ),
}


def test_a_sound_run_passes() -> None:
    assert KILLS.problems(sound(), CASE, end_of) == []


@pytest.mark.parametrize("broken", list(BROKEN))
def test_what_is_broken_is_seen(broken: str) -> None:
    breaks, said = BROKEN[broken]
    found = KILLS.problems(breaks(sound()), CASE, end_of)
    assert any(said in text for text in found), found
