"""What ``metrics.jsonl`` says, as TensorBoard reads it: a file of length-prefixed, checksummed
records (TensorFlow's ``record_writer.h``), each an ``Event`` message (``event.proto``). TensorBoard
is not needed to write them.

All events have the time at which the file was begun: how long steps take follows from the sizes of
their batches, which are private.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

NAME = "events.out.tfevents.{:010d}.quietgrad"  # TensorBoard reads a run's files by their names
NOT_SHOWN = {"step", "validation_records"}
_POLYNOMIAL = 0x82F63B78  # CRC-32C, bits reversed


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

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the numbers of a line of metrics, at its step."""
        if self._path is None:
            taken = len(list(self._folder.glob(NAME.replace("{:010d}", "*"))))
            self._path, self._began = self._folder / NAME.format(taken), time.time()
            self._write(_text(3, b"brain.Event:2"))
        summary = b"".join(
            _text(1, _text(1, tag.encode()) + _key(2, 5) + struct.pack("<f", _narrow(tag, value)))
            for tag, value in _shown(record).items()
        )
        self._write(_key(2, 0) + _varint(int(record["step"])) + _text(5, summary))

    def _write(self, fields: bytes) -> None:
        assert self._path is not None
        event = _key(1, 1) + struct.pack("<d", self._began) + fields
        length = struct.pack("<Q", len(event))
        with open(self._path, "ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def _shown(record: Mapping[str, Any]) -> dict[str, float]:
    """Name -> number; epsilon's name says whom it protects, and of what data it is."""
    of = f"_per_{record['unit']}" if "unit" in record else ""
    of += "_of_data_declared_public" if record.get("data_declared_public") else ""
    return {
        f"epsilon{of}" if tag == "epsilon" else tag: value
        for tag, value in record.items()
        if tag not in NOT_SHOWN and type(value) in (int, float)
    }


def _narrow(tag: str, value: float) -> float:
    """As float32, which events hold; an epsilon rounded up."""
    narrow = np.float32(value)
    if tag.startswith("epsilon") and float(narrow) < value:
        narrow = np.nextafter(narrow, np.float32(math.inf))
    return float(narrow)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _key(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _text(field: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return _key(field, 2) + _varint(len(content)) + content


def _checksum(content: bytes) -> bytes:
    """CRC-32C (Castagnoli), masked as record files want it."""
    remainder = 0xFFFFFFFF
    for byte in content:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (_POLYNOMIAL if remainder & 1 else 0)
    code = remainder ^ 0xFFFFFFFF
    return struct.pack("<I", ((code >> 15 | code << 17) + 0xA282EAD8) & 0xFFFFFFFF)
