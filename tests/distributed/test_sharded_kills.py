"""A sharded run whose ranks are killed under torchrun's elastic agent: the campaign of
``benchmarks/sharded_kills.py`` in small, and what it looks for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.world import on_ranks, without_looks
from torch import Tensor

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sharded_kills.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None and spec.loader is not None
    sys.path.append(str(SCRIPT.parent))  # what stands beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # its frozen records look their module up
    spec.loader.exec_module(module)
    return module


KILLS = script()
CASE = KILLS.Case(kills=1, steps=3)


def told_of(rank: int, name: str) -> Any:
    """Guards look in the plain run alone: each start would begin with looks, at what is trained in
    other tests."""
    with contextlib.nullcontext() if name == "smoke" else without_looks():
        return KILLS.told_of(name)


@pytest.mark.slow("an elastic agent starts the processes of a run two or three times")
@pytest.mark.parametrize("name", ["smoke", "smoke, adapters", "smoke, by Trainer"])
def test_a_sharded_run_survives_kills_of_its_ranks(name: str, tmp_path: Path) -> None:
    """Full, or LoRA: in a loop that goes on on one process in the end, or by PrivateTrainer."""
    pytest.importorskip("peft")  # before the agent's process is forked
    (told,) = on_ranks(1, tmp_path, told_of, name)
    assert isinstance(told, dict), told
    case = KILLS.CASES[name]
    assert told["wrong"] == []
    assert len(told["kills"]) == case.kills and told["starts"] == case.kills + 1
    assert told["releases"] == case.steps >= told["releases_drawn"]
    assert told["epsilon"] <= told["target_epsilon"]


def result() -> dict[str, Any]:
    place = SCRIPT.parent / "results" / "sharded_kills.json"
    told: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))["cases"]
    return told


def test_the_committed_campaigns_killed_as_often_as_they_say() -> None:
    """And nothing was wrong; adapters were killed some twenty times, and changed ranks."""
    told = result()
    assert set(told) == {name for name in KILLS.CASES if "smoke" not in name}
    for name, one in told.items():
        case = KILLS.CASES[name]
        assert one["wrong"] == [] and len(one["kills"]) == case.kills == one["starts"] - 1
        assert one["releases"] == case.steps >= one["releases_drawn"]
        assert one["epsilon"] <= one["target_epsilon"]
    adapted = [name for name in told if KILLS.CASES[name].adapters]
    assert sum(len(told[name]["kills"]) for name in adapted) >= 20
    for name in adapted:
        after = [kill["ranks_after"] for kill in told[name]["kills"]]
        assert set(after) == set(KILLS.CASES[name].ranks)


STARTS = {
    "nothing lost": ([(0, 0)], [], 6),
    "two lost": ([(0, 0), (2, 4)], [2, 3], 6),
    "a start that saved nothing": ([(0, 0), (2, 3), (2, 5)], [2, 3, 4], 6),
    "back to the one before": ([(0, 0), (2, 3), (4, 5)], [2, 4], 6),
    "from the beginning": ([(0, 0), (0, 2)], [0, 1], 6),
    "after the last release": ([(0, 0), (4, 6)], [4, 5], 6),
}


@pytest.mark.parametrize("name", list(STARTS))
def test_what_was_applied_follows_from_where_starts_went_on(name: str) -> None:
    starts, lost, steps = STARTS[name]
    noted = [dict(zip(("from", "to"), start, strict=True)) for start in starts]
    applied = KILLS.killed_adapters.applied_in(noted, steps)
    assert (~applied).nonzero().flatten().tolist() == lost


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
