"""One ledger under two names: hard links of a run's files, a link to its directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attacks.guarded import RECORDS, good, records, rows, small
from quietgrad.plan import PrivacyConfig, PrivacyPlan


def plan() -> PrivacyPlan:
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=12, steps=9)
    return config.build(RECORDS)


def released(run: Any) -> None:
    for indices in run.batches(1):
        run.backward(small(), good, rows(records(), *indices.tolist()))


def hard_links(ledger: Path, other: Path) -> None:
    other.mkdir()
    for name in (ledger.name, f"{ledger.name}.count"):
        os.link(ledger.parent / name, other / name)


def link_to_the_directory(ledger: Path, other: Path) -> None:
    other.symlink_to(ledger.parent, target_is_directory=True)


@pytest.mark.filterwarnings("ignore:the model was trained by another private run")
@pytest.mark.parametrize("named", [hard_links, link_to_the_directory])
def test_two_names_of_one_ledger_are_one_run(
    named: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    ledger, other = tmp_path / "run" / "ledger.jsonl", tmp_path / "other"
    ledger.parent.mkdir()
    with plan().start(ledger) as run:
        released(run)
    named(ledger, other)
    with plan().start(ledger) as run:
        with pytest.raises(ValueError, match="in use"):
            plan().start(other / ledger.name)
        released(run)
    with plan().start(other / ledger.name) as run:
        assert run.released == 2
        released(run)
    with plan().start(ledger) as run:
        assert run.released == 3


def test_a_second_name_without_its_count_is_refused(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with plan().start(ledger) as run:
        released(run)
    os.link(ledger, tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match="lacks its count file"):
        plan().start(tmp_path / "other.jsonl")
