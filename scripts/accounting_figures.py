"""Draws the figures of docs/accounting, what randomized clipping costs and the envelopes behind it:
python scripts/accounting_figures.py (a few seconds).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.accounting.envelope import envelope_cdf
from quietgrad.accounting.hutch_envelope import hutch_envelope
from quietgrad.accounting.scale_mixture import convex_from, scale_mixture
from quietgrad.events import RandomizedClipping

DOCS = Path("docs")
RESULTS = Path("benchmarks/results")
SIGMA = 4.14


def plot_sigma_against_sketch_dim(results: Path, path: Path) -> None:
    """Draws the noise multiplier against k, with exact clipping as the floor, from what
    ``benchmarks/sketch_sigma.py`` wrote.
    """
    plt = _pyplot()
    found = json.loads(results.read_text(encoding="utf-8"))
    dims = [row["sketch_dim"] for row in found["rows"]]
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for envelope, style, color in (
        ("mixed", "o-", "#1f5fa8"),
        ("convex", "^-", "#d08a1d"),
        ("hutch++", "s-", "#c0504d"),
    ):
        values = [row[envelope] for row in found["rows"]]
        axis.plot(dims, values, style, color=color, label=f"sketched norms, {envelope} envelope")
    axis.axhline(
        found["exact"], color="#3a7d44", linestyle="--", label=f"exact clipping, {found['exact']}"
    )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(dims, [str(k) for k in dims])
    ticks = (4, 4.5, 5, 7, 10, 20)
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("sketch dimension k")
    axis.set_ylabel("noise multiplier")
    axis.set_title("epsilon = 0.7, delta = 1e-5, q = 64 / 1225, T = 200", fontsize=10)
    axis.grid(alpha=0.25)
    axis.legend()
    figure.savefig(path, dpi=140)
    plt.close(figure)


def plot_envelopes(sketch_dim: int, total_rank: int, path: Path) -> None:
    """Draws the envelopes with some true laws of R below them, the discretised mixed envelope, and
    the law that stands for R in the convex order.
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
    law = scale_mixture(RandomizedClipping(sketch_dim, "convex"), 1e-12, 1024, convex_from(SIGMA))
    axis.plot(
        np.append(law.scales**-2, x[-1]),
        np.append(np.cumsum(law.weights), 1.0),
        color="#d08a1d",
        linestyle="--",
        label="convex envelope, in the convex order",
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
    plot_sigma_against_sketch_dim(RESULTS / "sketch_sigma.json", DOCS / "sigma_against_k.png")
    plot_envelopes(32, 2048, DOCS / "envelopes.png")


if __name__ == "__main__":
    main()
