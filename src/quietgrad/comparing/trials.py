"""What an accounted choice has to remember between its runs: one secret file, replaced whole after
each of them, so that a kill neither loses a run nor draws a number anew.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quietgrad.accounting import RunCount
from quietgrad.durable import is_intact_archive, replacing
from quietgrad.noise.correlation.banded import BandedLower
from quietgrad.noise.correlation.mixing import MixingMatrix


@dataclass
class Trials:
    """Private: neither the number of runs nor anything of those that lost is covered by epsilon.

    Attributes:
        start: seed of the parameters that every run starts from, also after a kill.
        key: of what the runs are; "" before anything was drawn.
        drawn: the candidate of each run.
        done: runs that are finished.
        best: of them the number of the candidate, its score, and trainable parameters; the first of
            equals.
        mixings: the matrices of correlated noise, by settings: found again, within a limit of time,
            they could come out differently, and runs of both be no draws of one law.
    """

    start: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    key: str = ""
    drawn: list[int] = field(default_factory=list, repr=False)
    done: int = 0
    best: dict[str, Any] | None = field(default=None, repr=False)
    mixings: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def keep(self, mixings: Mapping[str, MixingMatrix]) -> None:
        """The matrices that all runs are drawn with."""
        for settings, mixing in mixings.items():
            known = {f.name: getattr(mixing, f.name) for f in fields(mixing) if f.name != "banded"}
            columns = torch.from_numpy(mixing.banded.columns)
            self.mixings[settings] = {"columns": columns, "known": json.dumps(known)}

    def kept(self) -> dict[str, MixingMatrix]:
        """The same, bit by bit."""
        return {
            settings: MixingMatrix(
                BandedLower(saved["columns"].numpy()), **json.loads(saved["known"])
            )
            for settings, saved in self.mixings.items()
        }

    def draw(self, key: str, count: RunCount, candidates: int) -> None:
        """The number of runs and the candidate of each, independent of all else."""
        entropy = random.SystemRandom()
        self.key = key
        self.drawn = [entropy.randrange(candidates) for _ in range(count.draw())]

    def finished(self, score: float, weights: Mapping[str, Tensor]) -> None:
        """Counts the run that was open. A score that is not a number is the lowest."""
        value = score if score == score else float("-inf")
        if self.best is None or value > self.best["score"]:
            kept = {name: p.detach().cpu().clone() for name, p in weights.items()}
            self.best = {"candidate": self.drawn[self.done], "score": value, "weights": kept}
        self.done += 1

    def save(self, path: Path) -> None:
        """Readable by its owner alone; on disk when the call returns."""
        with replacing(path, secret=True) as file:
            torch.save(asdict(self), file)

    @classmethod
    def load(cls, path: Path) -> Trials:
        """What was saved; nothing drawn yet where there is no file.

        Raises:
            ValueError: for a file that is damaged.
        """
        if not path.exists():
            return cls()
        if not is_intact_archive(path):
            raise ValueError(
                f"{str(path)!r} is damaged: it holds the runs of a choice that is not finished; "
                "restore it, or remove it to draw anew (nothing of those runs was released)"
            )
        return cls(**torch.load(path, weights_only=True))
