"""Draws the figures of docs/accounting, what randomized clipping costs and the envelopes behind it:
python scripts/accounting_figures.py (a few seconds).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.accounting.calibrate import noise_multiplier
from quietgrad.accounting.envelope import envelope_cdf
from quietgrad.accounting.hutch_envelope import hutch_envelope
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.accounting.scale_mixture import scale_mixture
from quietgrad.events import RandomizedClipping
from quietgrad.training.settings.config import load_config

DOCS = Path("docs")
DEMO_RECORDS = 30276  # training records of the embedded default


def plot_sigma_against_sketch_dim(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    sketch_dims: Sequence[int],
    path: Path,
) -> dict[int, float]:
    """Draws the noise multiplier against k, with exact clipping as the floor, and returns the
    values (key 0: exact).
    """
    plt = _pyplot()
    exact = noise_multiplier(target_epsilon, target_delta, sample_rate=sample_rate, steps=steps)
    values = {0: exact}
    for k in sketch_dims:
        values[k] = noise_multiplier(
            target_epsilon,
            target_delta,
            sample_rate=sample_rate,
            steps=steps,
            clipping=RandomizedClipping(k),
        )
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    axis.plot(
        list(sketch_dims),
        [values[k] for k in sketch_dims],
        "o-",
        color="#1f5fa8",
        label="randomized, mixed envelope",
    )
    proved = [
        noise_multiplier(
            target_epsilon,
            target_delta,
            sample_rate=sample_rate,
            steps=steps,
            clipping=RandomizedClipping(k, "hutch++"),
        )
        for k in sketch_dims
    ]
    axis.plot(
        list(sketch_dims), proved, "s-", color="#c0504d", label="randomized, hutch++ envelope"
    )
    axis.axhline(
        exact, color="#3a7d44", linestyle="--", label=f"exact clipping, {round_up(exact, 3)}"
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(list(sketch_dims), [str(k) for k in sketch_dims])
    ticks = [
        t
        for t in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)
        if exact * 0.9 < t < max(values.values()) * 1.1
    ]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("sketch dimension k")
    axis.set_ylabel("noise multiplier")
    axis.set_title(
        f"epsilon = {target_epsilon:g}, delta = {round_up_to(target_delta, 2)}, q = "
        f"{sample_rate:.4f}, T = {steps}",
        fontsize=10,
    )
    axis.grid(alpha=0.25)
    axis.legend()
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return values


def plot_envelopes(sketch_dim: int, total_rank: int, path: Path) -> None:
    """Draws both envelopes with some true laws of R below them, and the
    discretised mixed envelope.
    """
    plt = _pyplot()
    x = np.linspace(0.3, 1.7, 1401)
    rng = np.random.default_rng(0)
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for terms in (1, 2, 4, 8):
        weights = rng.dirichlet(np.ones(terms), size=1)[0]
        r = (rng.chisquare(sketch_dim, (40_000, terms)) / sketch_dim) @ weights
        axis.plot(x, np.searchsorted(np.sort(r), x) / len(r), color="#999999", linewidth=0.8)
    axis.plot([], [], color="#999999", linewidth=0.8, label="laws of R, 1 to 8 random terms")
    hutch = hutch_envelope(sketch_dim, total_rank)
    axis.plot(x, hutch.cdf(x), color="#c0504d", label=f"Hutch envelope, D = {total_rank}")
    mixed = RandomizedClipping(sketch_dim)
    axis.plot(x, envelope_cdf(mixed, x), color="#1f5fa8", label="mixed envelope")
    coarse = scale_mixture(mixed, 1e-12, 24)
    axis.step(
        coarse.scales**-2,
        np.cumsum(coarse.weights),
        where="post",
        color="#0b2e59",
        linewidth=0.7,
        label="discretised, 24 bins",
    )
    axis.set_xlim(x[0], x[-1])
    axis.set_xlabel("R, sketched over true squared norm")
    axis.set_ylabel("distribution function")
    axis.set_title(f"Envelopes of randomized clipping, k = {sketch_dim}", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def main() -> None:
    config = load_config(None)
    batch, steps = config.training.expected_batch_size, config.training.steps
    epsilon, delta = config.privacy.target_epsilon, config.privacy.target_delta
    assert batch is not None and steps is not None and epsilon is not None and delta is not None
    dims = [4, 8, 16, 32, 64, 128, 256]
    values = plot_sigma_against_sketch_dim(
        epsilon, delta, batch / DEMO_RECORDS, steps, dims, DOCS / "sigma_against_k.png"
    )
    print(json.dumps({("exact" if k == 0 else str(k)): round(v, 4) for k, v in values.items()}))
    plot_envelopes(32, 2048, DOCS / "envelopes.png")


if __name__ == "__main__":
    main()
