"""What a run with correlated noise keeps between sessions: its mixing matrix, and while it lasts the secret root of its streams."""

from __future__ import annotations

import os
from pathlib import Path

from quietgrad.noise.correlated import BandedNoise
from quietgrad.noise.mixing import save_mixing
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.randomness import RandomKey
from quietgrad.training.run_dir import RunDir


def start_private(plan: PrivacyPlan, run_dir: RunDir) -> PrivateRun:
    """Starts the plan, or goes on with it: correlated noise exactly where it was, as long as the key file is there (or a seed is given)."""
    if not isinstance(plan.noise, BandedNoise):
        return plan.start(run_dir.ledger)
    assert plan.mixing is not None
    if not run_dir.mixing.exists():
        save_mixing(plan.mixing, run_dir.mixing)
    if plan.config.seed is not None:
        return plan.start(run_dir.ledger)
    if run_dir.noise_key.exists():
        key = RandomKey(run_dir.noise_key.read_bytes(), reproducible=False)
        return plan.start(run_dir.ledger, key)
    if run_dir.ledger.exists():
        return plan.start(run_dir.ledger)  # the key is gone: a new block of noise
    key = RandomKey.from_entropy()
    _write_secret(run_dir.noise_key, key.root)
    return plan.start(run_dir.ledger, key)


def forget_key(run_dir: RunDir) -> None:
    """Removes the secret once no release is left that needs it."""
    run_dir.noise_key.unlink(missing_ok=True)


def _write_secret(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
