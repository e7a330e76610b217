"""What a run directory has for TensorBoard."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import train

from quietgrad.training.files.events import EventFile, _checksum

EPSILON = 1.9999  # the nearest float32 lies below


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, content) of a message's fields."""
    at = 0

    def varint() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte, at = message[at], at + 1
            found, shift = found | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return found

    while at < len(message):
        key = varint()
        size = {1: 8, 5: 4, 2: None, 0: 0}[key & 7]
        if size == 0:
            yield key >> 3, varint()
            continue
        size = varint() if size is None else size
        yield key >> 3, message[at : at + size]
        at += size


def told(path: Path) -> list[tuple[float, int, dict[str, float]]]:
    """Time, step and numbers of each event, read from what the format says."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = content[12 : 12 + length]
        assert content[8:12] == _checksum(content[:8])
        assert content[12 + length : 16 + length] == _checksum(event)
        content = content[16 + length :]
        of = dict(fields(event))
        values = (dict(fields(value)) for _, value in fields(of.get(5, b"")))
        numbers = {v[1].decode(): struct.unpack("<f", v[2])[0] for v in values}
        found.append((struct.unpack("<d", of[1])[0], of.get(2, 0), numbers))
    return found


def of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*tfevents*"))


def test_the_checksum_is_the_published_one() -> None:
    (masked,) = struct.unpack("<I", _checksum(b"123456789"))
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated << 15 | rotated >> 17) & 0xFFFFFFFF == 0xE3069283  # RFC 3720's check value


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
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = EventFile(tmp_path)
    for step in (10, 20):
        file.add({"step": step, "validation_accuracy": step / 40, "epsilon": EPSILON})
    read = reader.EventAccumulator(str(tmp_path))
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
