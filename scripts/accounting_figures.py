"""Draws the figures of docs/accounting: python scripts/accounting_figures.py (a few seconds)."""

from __future__ import annotations

import json
from pathlib import Path

from quietgrad.report.accounting_figures import plot_envelopes, plot_sigma_against_sketch_dim
from quietgrad.training.settings.config import load_config

DOCS = Path("docs")
DEMO_RECORDS = 30276  # training records of the embedded default


def main() -> None:
    config = load_config(None)
    batch, steps = config.training.expected_batch_size, config.training.steps
    epsilon, delta = config.privacy.target_epsilon, config.privacy.target_delta
    assert batch is not None and steps is not None and epsilon is not None and delta is not None
    dims = [4, 8, 16, 32, 64, 128, 256, 1024]
    values = plot_sigma_against_sketch_dim(
        epsilon, delta, batch / DEMO_RECORDS, steps, dims, DOCS / "sigma_against_k.png"
    )
    print(json.dumps({("exact" if k == 0 else str(k)): round(v, 4) for k, v in values.items()}))
    plot_envelopes(32, 2048, DOCS / "envelopes.png")


if __name__ == "__main__":
    main()
