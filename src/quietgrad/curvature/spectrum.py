"""A spectrum with its provenance: which parameters, which data, which loss, and how it was
computed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from quietgrad.curvature.tail import TAIL_VALUE, extend_spectrum

Floats = NDArray[np.float64]
FORMAT = 1


@dataclass(frozen=True)
class Spectrum:
    """Top eigenvalues of a public Hessian and where its positive tail ends.

    Attributes:
        top: [k] descending.
        residuals: [k], see ``TopEigenvalues``.
        tail_index: p_plus.
        tail_value: mu at p_plus.
        parameters: name -> shape of the parameters differentiated by.
        record_hashes: of the public records, sorted; public themselves.
        facts: loss, kind of matrix, data source, counts: for people.
    """

    top: Floats
    residuals: Floats
    tail_index: int
    parameters: dict[str, tuple[int, ...]]
    record_hashes: tuple[str, ...]
    tail_value: float = TAIL_VALUE
    facts: dict[str, Any] = field(default_factory=dict)

    def eigenvalues(self) -> Floats:
        """[p_plus] all positive eigenvalues, the tail from the fitted curve."""
        kept = int((self.top > self.tail_value).sum())
        if self.tail_index <= kept:
            return self.top[self.top > self.tail_value]
        return extend_spectrum(self.top, self.tail_index, self.tail_value)

    def require_same_parameters(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError unless the spectrum is of exactly these trainable parameters."""
        if dict(parameters) == self.parameters:
            return
        other = sorted(
            name
            for name in {*parameters, *self.parameters}
            if parameters.get(name) != self.parameters.get(name)
        )
        raise ValueError(
            f"the spectrum is of another parameter set: {other[0]!r} is "
            f"{self.parameters.get(other[0], 'not in it')} there and "
            f"{parameters.get(other[0], 'not trained')} here; compute it for the parameters that "
            "train (quietgrad spectrum)"
        )

    def require_disjoint(self, private_hashes: Iterable[str]) -> None:
        """Raises ValueError if a private record is among the public ones, or none is named: the
        noise is shaped by them without protection.
        """
        if not self.record_hashes:
            raise ValueError(
                "the spectrum does not name its public records, so private ones among them could "
                "not be told; save it with their record_hashes "
                "(quietgrad.curvature.spectrum.record_hash)"
            )
        shared = set(self.record_hashes) & set(private_hashes)
        if shared:
            raise ValueError(
                "some of the spectrum's public records are among the private training records; a "
                "spectrum of private data is not accounted for: "
                "compute it on other records, or remove these from the training data"
            )

    def save(self, path: str | Path) -> None:
        """Writes one .npz file, whole or not at all."""
        described = {
            "format": FORMAT,
            "tail_index": self.tail_index,
            "tail_value": self.tail_value,
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "record_hashes": list(self.record_hashes),
            "facts": self.facts,
        }
        temporary = Path(path).with_suffix(".tmp.npz")
        np.savez_compressed(
            temporary, top=self.top, residuals=self.residuals, described=json.dumps(described)
        )
        os.replace(temporary, path)


def load_spectrum(path: str | Path) -> Spectrum:
    """Reads what ``Spectrum.save`` wrote.

    Raises:
        ValueError: if there is no such file, or it is not one.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"spectrum={str(path)!r}: no such file; make one with quietgrad spectrum")
    try:
        with (
            file.open("rb") as opened,
            np.load(opened) as held,
        ):  # numpy leaves its own open where the archive is damaged
            described = json.loads(str(held["described"]))
            if described["format"] != FORMAT:
                raise ValueError(f"format {described['format']!r}; this version reads {FORMAT}")
            return Spectrum(
                top=held["top"],
                residuals=held["residuals"],
                tail_index=int(described["tail_index"]),
                tail_value=float(described["tail_value"]),
                parameters={name: tuple(shape) for name, shape in described["parameters"].items()},
                record_hashes=tuple(described["record_hashes"]),
                facts=described["facts"],
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadZipFile) as error:
        raise ValueError(
            f"spectrum={str(path)!r} is not a whole spectrum file: {error!r}; make it again with "
            "quietgrad spectrum"
        ) from error


def record_hash(content: bytes) -> str:
    """Names one record by its content."""
    return hashlib.sha256(content).hexdigest()[:32]
