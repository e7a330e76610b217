"""What ``metrics.jsonl`` says, as TensorBoard reads it. In its own types, but not by its usual
writer, which puts the machine's name into the file's and the time of each event beside it.

All events have the time at which the file was begun: how long steps take follows from the sizes of
their batches, which are private.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAME = "events.out.tfevents.{:010d}.quietgrad"  # TensorBoard reads a run's files by their names
NOT_SHOWN = {"step", "validation_records"}


class EventFile:
    """The file of one start of a run; made with its first event. A start never writes to another
    one's: behind a record that a kill cut off TensorBoard would read nothing.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._began = 0.0

    @classmethod
    def where_installed(cls, folder: Path, wanted: bool) -> EventFile | None:
        """None where nobody wants it, or TensorBoard is not installed."""
        installed = wanted and importlib.util.find_spec("tensorboard") is not None
        return cls(folder) if installed else None

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the numbers of a line of metrics, at its step."""
        # Not at the top: they take as long to load as the rest of a command.
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._path is None:
            taken = len(list(self._folder.glob(NAME.replace("{:010d}", "*"))))
            self._path, self._began = self._folder / NAME.format(taken), time.time()
            self._write(file_version="brain.Event:2")
        values = [Summary.Value(tag=t, simple_value=v) for t, v in _shown(record).items()]
        self._write(step=record["step"], summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._path is not None
        event = Event(wall_time=self._began, **fields)
        with open(self._path, "ab") as file:
            RecordWriter(file).write(event.SerializeToString())


def _shown(record: Mapping[str, Any]) -> dict[str, float]:
    """Name -> number; epsilon's name says whom it protects, and of what data it is."""
    of = f"_per_{record['unit']}" if "unit" in record else ""
    of += "_of_data_declared_public" if record.get("data_declared_public") else ""
    return {
        f"epsilon{of}" if tag == "epsilon" else tag: _narrow(tag, value)
        for tag, value in record.items()
        if tag not in NOT_SHOWN and type(value) in (int, float)
    }


def _narrow(tag: str, value: float) -> float:
    """As float32, which events hold; an epsilon rounded up."""
    narrow = np.float32(value)
    if tag.startswith("epsilon") and float(narrow) < value:
        narrow = np.nextafter(narrow, np.float32(math.inf))
    return float(narrow)
