"""What a run directory has for TensorBoard."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import train

from quietgrad.training.files.events import EventFile

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

EPSILON = 1.9999  # the nearest float32 lies below


def told(path: Path) -> list[tuple[float, int, dict[str, float]]]:
    """Time, step and numbers of each event."""
    found = []
    for event in EventFileLoader(str(path)).Load():
        numbers = {v.tag: v.tensor.float_val[0] for v in event.summary.value}
        found.append((event.wall_time, event.step, numbers))
    return found


def of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*tfevents*"))


def test_numbers_of_metrics_at_their_steps_and_no_times(tmp_path: Path) -> None:
    assert float(np.float32(EPSILON)) < EPSILON
    file = EventFile(tmp_path)
    assert not of(tmp_path)
    file.add({"step": 300, "validation_accuracy": 0.5, "validation_records": 9, "epsilon": EPSILON})
    file.add({"step": 70000, "epsilon": 1.0, "unit": "user", "data_declared_public": True})
    EventFile(tmp_path).add({"step": 1, "epsilon": 1.0})  # another start
    first, second = of(tmp_path)
    (began, _, _), one, two = told(first)
    assert one[:2] == (began, 300) and two[:2] == (began, 70000)
    assert one[2].keys() == {"validation_accuracy", "epsilon"} and one[2]["epsilon"] >= EPSILON
    assert two[2] == {"epsilon_per_user_of_data_declared_public": 1.0}
    assert [step for _, step, _ in told(second)] == [0, 1]


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for step in (10, 20):
        file.add({"step": step, "validation_accuracy": step / 40, "epsilon": EPSILON})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tags()["scalars"] == ["validation_accuracy", "epsilon"]
    assert [(e.step, e.value) for e in read.Scalars("validation_accuracy")] == [
        (10, 0.25),
        (20, 0.5),
    ]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_writes_what_its_metrics_say(settings: dict[str, Any], wanted: bool) -> None:
    _, _, run_dir = train(settings | {"training.tensorboard": wanted})
    metrics = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    files = of(run_dir.path)
    assert len(files) == wanted and len(metrics) == 2
    for file in files:
        _, *events = told(file)
        assert [step for _, step, _ in events] == [line["step"] for line in metrics]
        for (_, _, numbers), line in zip(events, metrics, strict=True):
            accuracy = numbers["validation_accuracy"]
            assert accuracy == pytest.approx(line["validation_accuracy"])


def test_nothing_is_written_where_tensorboard_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EventFile.where_installed(tmp_path, True) is not None
    assert EventFile.where_installed(tmp_path, False) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert EventFile.where_installed(tmp_path, True) is None
