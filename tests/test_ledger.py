"""The ledger: on disk before the noise is drawn, nothing lost by a kill, nothing repeated by a
resume, nothing private in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import changed

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.accounting import epsilon
from quietgrad.checks import SettingsWarning
from quietgrad.clipping import ClippedSum
from quietgrad.events import PoissonGaussian, RandomizedClipping
from quietgrad.ledger import LedgerContents, LedgerWriter, SessionStart, read_ledger
from quietgrad.ledger.chain import SLOT, START, count_path, create_count, encoded
from quietgrad.ledger.records import (
    ClippingNorm,
    EarlierRun,
    Extension,
    Mechanism,
    NoiseBlock,
    NoiseDrawn,
    PrivacyGivenUp,
    Release,
    record_from_json,
)
from quietgrad.noise import GaussianNoise
from quietgrad.plan import PrivateRun
from quietgrad.schedules import Course, StepSettings

CONFIG = PrivacyConfig(
    noise_multiplier=1.1, expected_batch_size=8, steps=12, seed=3, data_are_public=True
)
RECORDS = 80
EVENT = PoissonGaussian(1.1, 0.1, 1)

# What may stand in a ledger: public facts of the mechanism. A new key has to be added here on
# purpose.
PUBLIC_KEYS = {
    "type", "format", "event", "planned_steps", "delta", "dataset_size", "max_grad_norm",
    "neighbouring", "sampler", "step", "data_declared_public",
    "line", "chain", "seeded", "name", "seal", "source", "noise_source",
    "kind", "noise_multiplier", "sample_rate", "steps", "bands", "randomized_clipping",
    "sketch_dim", "envelope", "total_rank",
}  # fmt: skip


def plan_of(**changes: object) -> PrivacyPlan:
    return changed(CONFIG, **changes).build(RECORDS)


def some_sum(run: PrivateRun) -> ClippedSum:
    """Nothing, of all records of the next batch."""
    examples = len(next(run.batches()))
    return run.contribution({"w": torch.zeros(examples, 3)}, examples)


def release(run: PrivateRun, count: int) -> list[torch.Tensor]:
    return [run.release(some_sum(run)).gradients["w"] for _ in range(count)]


def released_batches(run: PrivateRun) -> list[np.ndarray]:
    found = []
    for indices in run.batches():
        release(run, 1)
        found.append(indices)
    return found


def slots_of(path: Path) -> list[bytes]:
    counts = count_path(path).read_bytes()
    return [counts[:SLOT], counts[SLOT:]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_event_is_on_disk_before_the_noise_is_drawn(path: Path, monkeypatch) -> None:
    seen = []

    def no_noise(*_: object) -> None:
        seen.append(
            read_ledger(path).releases
        )  # through another file descriptor: flushed, not only buffered
        raise OSError("killed while drawing")

    monkeypatch.setattr(GaussianNoise, "update", no_noise)
    with plan_of().start(path) as run:
        for expected in (1, 2):
            with pytest.raises(OSError, match="killed while drawing"):
                run.release(some_sum(run))
            assert seen[-1] == expected
            assert run.released == expected
    assert read_ledger(path).releases == 2


def test_line_and_count_are_synced_to_disk_in_this_order(path: Path, monkeypatch) -> None:
    # Line, count, noise. Two syncs a release, however long the ledger is.
    synced = []
    right = os.fsync
    inodes = {}

    def noting(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, path.stat().st_size))
        right(descriptor)

    with plan_of().start(path) as run:
        inodes = {"line": path.stat().st_ino, "count": count_path(path).stat().st_ino}
        monkeypatch.setattr(os, "fsync", noting)
        for count in range(3):
            release(run, 1)
            size = path.stat().st_size
            assert synced[2 * count :] == [(inodes["line"], size), (inodes["count"], size)]


KILLED = """
import sys, torch
from quietgrad import PrivacyConfig
plan = PrivacyConfig(noise_multiplier=1.1, expected_batch_size=8, steps=1_000_000).build(80)
run = plan.start(sys.argv[1])
for batch in run.batches():
    run.release(run.contribution({"w": torch.zeros(len(batch), 3)}, len(batch)))
    print(run.released, flush=True)
"""


def test_kill_loses_no_event(path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    reported = [int(child.stdout.readline()) for _ in range(30)]
    child.kill()  # SIGKILL: no handler, no flush
    # Not communicate(): it reads past what readline() has taken into its buffer.
    rest = child.stdout.read().split("\n")
    child.stdout.close()
    child.wait(timeout=60)
    reported += [int(line) for line in rest[:-1]]  # a line without its end may be cut off
    assert reported == list(range(1, len(reported) + 1))
    assert len(reported) <= read_ledger(path).releases <= len(reported) + 2


@pytest.mark.parametrize("left", [1, 5, 20, -1])
def test_torn_last_line_is_counted(path: Path, left: int) -> None:
    with plan_of().start(path) as run:
        release(run, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    assert read_ledger(path).releases == 3
    with plan_of().start(path) as run:
        assert run.released == 3
        release(run, 1)
    assert read_ledger(path).releases == 4  # also after the torn line was ended


def test_no_cut_of_the_file_undercounts(path: Path) -> None:
    # Whatever is cut off at the end: the ledger is refused, or it still counts all that was
    # released.
    with plan_of().start(path) as run:
        release(run, 3)
    whole, counted = path.read_bytes(), count_path(path).read_bytes()
    lines = whole.splitlines(keepends=True)
    last = len(whole) - len(lines[-1])
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        if cut > last:
            assert read_ledger(path).releases == 3
        else:
            with pytest.raises(ValueError, match="was shortened"):
                read_ledger(path)
    assert count_path(path).read_bytes() == counted  # reading changes nothing


@pytest.mark.parametrize("released", [0, 1, 3])
def test_every_state_that_a_power_cut_can_leave_counts_the_release(
    path: Path, released: int
) -> None:
    # A line is written and synced, then its count: any part of the line may be there, then all of
    # it, then any part of the slot of the count.
    with plan_of().start(path) as run:
        release(run, released)
        ledger, count = path.read_bytes(), count_path(path).read_bytes()
        release(run, 1)
    after, counted = path.read_bytes(), count_path(path).read_bytes()
    changed = [i for i in range(len(count)) if count[i] != counted[i]]
    states = [(after[:cut], count) for cut in range(len(ledger) + 1, len(after) + 1, 5)] + [
        (after, count)
    ]
    states += [
        (after, counted[:cut] + count[cut:]) for cut in range(changed[0], changed[-1] + 2, 7)
    ]
    for ledger_then, count_then in states:
        path.write_bytes(ledger_then)
        count_path(path).write_bytes(count_then)
        assert read_ledger(path).releases == released + 1
        with plan_of().start(path) as run:
            assert run.released == released + 1
            release(run, 2)
        assert read_ledger(path).releases == released + 3


@pytest.mark.parametrize(
    "damage",
    [b"{not json\n", b'{"no": "type"}\n', b"\xff\xfe\n", b"[1]\n", b'{"type": "mechanism"}\n'],
)
def test_damaged_middle_line_is_refused_with_its_number(path: Path, damage: bytes) -> None:
    with plan_of().start(path) as run:
        release(run, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    with pytest.raises(ValueError, match="damaged at line 3"):
        read_ledger(path)
    with pytest.raises(ValueError, match="damaged at line 3"):
        plan_of().start(path)


def test_a_line_of_unknown_type_is_refused(path: Path) -> None:
    # It may stand for a release that this version does not know how to count.
    with plan_of().start(path) as run:
        release(run, 2)

    class Unknown:
        def to_json(self) -> dict[str, object]:
            return {"type": "release-v2", "step": 2}

    lines = path.read_bytes().splitlines()
    before = json.loads(lines[-1])["chain"]
    line, _ = encoded(len(lines) + 1, Unknown(), before)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match="damaged at line 5: type 'release-v2' is unknown"):
        read_ledger(path)


def test_release_before_any_mechanism_is_refused(path: Path) -> None:
    create_count(count_path(path))
    path.write_bytes(encoded(1, Release(0), START)[0])
    with pytest.raises(ValueError, match="damaged at line 1: it comes before the mechanism line"):
        read_ledger(path)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize(
    "of",
    [
        Release,
        lambda step: NoiseBlock(step, "0" * 64),
        lambda step: SessionStart(step, "a name", "0" * 32),
        lambda step: ClippingNorm(step, 2.0),
        lambda step: Extension(step, Course(((3, StepSettings(1.1, 0.1, 1.0)),))),
        lambda step: EarlierRun(step, {"private": True}),
    ],
    ids=["release", "block", "session", "norm", "extension", "earlier run"],
)
def test_a_line_of_another_step_than_comes_next_is_refused(
    of: Callable[[int], Any], step: int, path: Path
) -> None:
    record = of(step)
    create_count(count_path(path))
    with LedgerWriter(path) as writer:
        writer.mechanism(EVENT, planned_steps=4, max_grad_norm=1.0)
        writer.release(0)
    lines = path.read_bytes().splitlines()
    chain = json.loads(lines[-1])["chain"]
    path.write_bytes(path.read_bytes() + encoded(len(lines) + 1, record, chain)[0])
    with pytest.raises(ValueError, match=rf"it is of step {record.step}, and 1 releases come"):
        read_ledger(path)


def test_a_ledger_of_another_version_is_refused(path: Path) -> None:
    path.write_text('{"type": "mechanism", "format": 1}\n{"type": "release", "step": 0}\n')
    with pytest.raises(ValueError, match="lacks its count file"):
        read_ledger(path)
    create_count(count_path(path))
    with pytest.raises(ValueError, match="not a line of a ledger of this version"):
        read_ledger(path)


def test_two_writers_are_refused(path: Path) -> None:
    with plan_of().start(path) as run:
        release(run, 1)
        with pytest.raises(ValueError, match="another process"):
            plan_of().start(path)
        release(run, 1)
    assert read_ledger(path).releases == 2
    plan_of().start(path).close()  # free again


def test_writer_that_waited_for_another_sees_its_releases(path: Path, monkeypatch) -> None:
    # Another run makes releases and ends between this one's look at the file and its lock on it.
    # With the same seed, a repeated step number would mean the same noise on two sums.
    right = LedgerWriter.__init__

    def late(self: LedgerWriter, where: Path, resume: bool | None = None) -> None:
        monkeypatch.setattr(LedgerWriter, "__init__", right)
        with plan_of().start(where) as other:
            release(other, 2)
        right(self, where, resume)

    monkeypatch.setattr(LedgerWriter, "__init__", late)
    with plan_of().start(path) as run:
        assert run.released == 2


def test_resume_counts_on_and_ends_at_the_plan(path: Path) -> None:
    uninterrupted = release(plan_of().start(), 12)
    with plan_of().start(path) as run:
        first = release(run, 5)
    with plan_of().start(path) as run:
        assert run.released == 5
        rest = [release(run, 1)[0] for _ in run.batches()]
        assert len(rest) == 7
        with pytest.raises(RuntimeError, match="all 12 releases"):
            run.release(run.contribution({"w": torch.zeros(3)}))
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, first + rest, strict=True))
    with plan_of().start(path) as run:
        with pytest.warns(SettingsWarning, match="all 12 releases of the plan, made before"):
            assert list(run.batches()) == []
        for loop in (run.epochs, run.phases):
            with pytest.warns(SettingsWarning, match="Load the weights that it trained"):
                assert list(loop()) == []
    with plan_of().start(path.with_name("other.jsonl")) as run:
        release(run, 12)
        assert list(run.batches()) == list(run.epochs()) == []  # made here, so without a word
    assert read_ledger(path).releases == 12


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"noise_multiplier": 1.0}, "noise_multiplier"),
        ({"expected_batch_size": 9}, "sample_rate"),
        ({"steps": 20}, "planned_steps"),
        ({"target_delta": 1e-3}, "delta"),
        ({"max_grad_norm": 2.0}, "max_grad_norm"),
        ({"estimator": "hutch"}, "randomized_clipping"),
    ],
    ids=str,
)
def test_resume_with_a_changed_setting_is_refused_by_name(
    path: Path, change: dict, named: str
) -> None:
    with plan_of().start(path) as run:
        release(run, 2)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"resume with a changed privacy setting.*{named}"):
        plan_of(**change).start(path)
    assert path.read_bytes() == before


def test_resume_with_another_sketch_dimension_is_refused(path: Path) -> None:
    with plan_of(estimator="hutch", sketch_dim=32).start(path) as run:
        release(run, 2)
    with pytest.raises(ValueError, match="sketch_dim"):
        plan_of(estimator="hutch", sketch_dim=16).start(path)


def test_resume_on_other_data_is_refused(path: Path) -> None:
    with plan_of().start(path) as run:
        release(run, 2)
    same_rate = changed(CONFIG, expected_batch_size=None, sample_rate=0.1)
    with pytest.raises(ValueError, match="dataset_size"):
        same_rate.build(RECORDS + 1).start(path)


def test_settings_without_privacy_may_change_on_resume(path: Path) -> None:
    with plan_of().start(path) as run:
        release(run, 2)
    with plan_of(max_physical_batch_size=3).start(path) as run:
        assert run.released == 2


def test_nothing_private_is_written(path: Path) -> None:
    def keys_of(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {k for v in value.values() for k in keys_of(v)}
        return set()

    with plan_of(estimator="hutch").start(path) as run:
        assert len(released_batches(run)) == 12
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {k for line in lines for k in keys_of(line)} <= PUBLIC_KEYS
    assert [line["type"] for line in lines] == ["mechanism", "session"] + ["release"] * 12
    assert [line["line"] for line in lines] == list(range(1, 15))
    # The number of the release, and nothing about its batch.
    assert [set(line) for line in lines[2:]] == [{"line", "type", "step", "chain"}] * 12
    counts = [json.loads(slot.strip().rsplit(b" ", 1)[0]) for slot in slots_of(path)]
    assert [set(count) for count in counts] == [{"lines", "releases", "chain"}] * 2


@pytest.mark.parametrize("estimator", ["exact", "hutch"])
def test_ledger_of_a_whole_run_replays_to_the_plans_epsilon(path: Path, estimator: str) -> None:
    plan = plan_of(estimator=estimator)
    with plan.start(path) as run:
        release(run, plan.steps)
        assert run.epsilon() == plan.epsilon
    contents = read_ledger(path)
    assert contents.event == plan.event
    assert epsilon(contents.event, contents.header["delta"]) == plan.epsilon
    assert read_ledger(path.parent) == contents  # a run directory stands for its ledger


def test_a_second_mechanism_is_refused(path: Path) -> None:
    other = PoissonGaussian(2.0, 0.2, 1, RandomizedClipping(16))
    with LedgerWriter(path) as writer:
        writer.mechanism(EVENT)
        writer.release(0)
        with pytest.raises(ValueError, match="states its mechanism already"):
            writer.mechanism(other)
    lines = path.read_bytes().splitlines()
    line, _ = encoded(3, Mechanism(other), json.loads(lines[-1])["chain"])
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ValueError, match="damaged at line 3: a second mechanism"):
        read_ledger(path)


def test_releases_are_numbered_by_what_is_in_the_ledger(path: Path) -> None:
    with LedgerWriter(path) as writer:
        writer.mechanism(EVENT)
        writer.release(0)
        for wrong in (0, 2, -1):
            with pytest.raises(ValueError, match="release 1 comes next"):
                writer.release(wrong)
        writer.release(1)
    assert read_ledger(path).releases == 2


def test_records_read_back() -> None:
    every = [
        Mechanism(EVENT, {"delta": 1e-5}),
        SessionStart(3, "name", "seal", "seed"),
        NoiseBlock(4, "digest"),
        NoiseDrawn("float32 by numpy"),
        Release(5),
        Release(5, torn=True),
        PrivacyGivenUp("synthetic"),
    ]
    for record in every:
        assert record_from_json(json.loads(json.dumps(record.to_json()))) == record


def test_sessions_say_who_made_which_releases_and_whether_a_seed_did() -> None:
    starts = [(0, "a", "entropy"), (3, "b", "seed"), (3, "c", "entropy"), (7, "d", "entropy")]
    sessions = tuple(SessionStart(step, name, "", source) for step, name, source in starts)
    some = LedgerContents(sessions=sessions)
    assert [some.makers(n) for n in (0, 3, 4, 7, 8)] == [
        (), ("a",), ("a", "c"), ("a", "c"), ("a", "c", "d")
    ]  # fmt: skip
    assert some.seeded  # one of them is enough
    assert not LedgerContents(sessions=(sessions[0], *sessions[2:])).seeded


def test_nothing_released_is_no_event(path: Path) -> None:
    plan_of().start(path).close()
    assert read_ledger(path).event is None
    with plan_of().start(path) as run:
        assert run.epsilon() == 0
        release(run, 1)
    assert read_ledger(path).releases == 1


def test_missing_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no ledger there"):
        read_ledger(tmp_path)


def test_run_without_a_ledger_writes_no_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    release(plan_of().start(), 2)
    assert list(tmp_path.iterdir()) == []


def test_seeded_resume_draws_the_batches_that_remain(path: Path) -> None:
    expected = released_batches(plan_of().start())
    with plan_of().start(path) as run:
        release(run, 4)
    with plan_of().start(path) as run:
        rest = released_batches(run)
    assert all(np.array_equal(a, b) for a, b in zip(expected[4:], rest, strict=True))


def test_another_file_is_said_to_be_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_text("text,label\na,b\n")
    with pytest.raises(ValueError, match="is no ledger of quietgrad; name a run's directory"):
        read_ledger(tmp_path / "people.csv")
