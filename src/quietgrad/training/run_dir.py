"""The run directory: configuration, environment, ledger, metrics, checkpoint, weights, figure. Nothing private is written to it, but for
the secret keys of an unfinished run with correlated noise (noise.keys): do not pass the directory on before the run has ended.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quietgrad.ledger import LEDGER_NAME

PACKAGES = ("quietgrad", "torch", "transformers", "peft", "numpy", "scipy", "dp-accounting")


@dataclass(frozen=True)
class RunDir:
    """Paths inside a run directory."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER_NAME

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def figure(self) -> Path:
        return self.path / "accuracy.png"

    @property
    def mixing(self) -> Path:
        """The mixing matrix of correlated noise; public."""
        return self.path / "mixing.npz"

    @property
    def bands_figure(self) -> Path:
        return self.path / "bands.png"

    @property
    def noise_keys(self) -> Path:
        """Secret while it exists: the roots of a run's random streams, from which correlated noise goes on after a stop. Removed when the run ends."""
        return self.path / "noise.keys"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    def write_json(self, path: Path, record: dict[str, Any]) -> None:
        """Writes a file whole or not at all."""
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    def append_metrics(self, record: dict[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        if not self.metrics.is_file():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines() if line.strip()]


def open_run_dir(wanted: str, resume: bool) -> RunDir:
    """Makes (or, to resume, finds) the run directory and proves that it can be written to.

    Raises:
        ValueError: unwritable, already holding a run that is not being resumed, or nothing to resume.
    """
    if resume and not wanted:
        raise ValueError("--resume needs the run directory to go on with: --set training.run_dir=PATH")
    path = Path(wanted or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")
    run = RunDir(path)
    if resume and (not run.config.is_file() or not (run.ledger.is_file() or run.checkpoint.is_file())):
        raise ValueError(f"training.run_dir={str(path)!r} holds no run to resume; start it without --resume")
    if not resume and (run.ledger.exists() or run.checkpoint.exists() or run.result.exists()):
        raise ValueError(
            f"training.run_dir={str(path)!r} already holds a run; add --resume to go on with it, or choose another directory"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".write-probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"training.run_dir={str(path)!r} cannot be written: {error.strerror or error}; choose another directory"
        ) from error
    return run


def environment() -> dict[str, Any]:
    """Versions and machine, for reproduction."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "device": device,
        "packages": versions,
    }
