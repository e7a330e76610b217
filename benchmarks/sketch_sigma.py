"""Noise multipliers of sketched norms in the reference setting (N = 1225, B = 64, T = 200, epsilon
0.7, delta 1e-5), against exact clipping: python benchmarks/sketch_sigma.py (minutes).

Writes benchmarks/results/sketch_sigma.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from quietgrad.accounting import noise_multiplier
from quietgrad.accounting.rounding import round_up
from quietgrad.events import ClippingClaim, Envelope, ExactClipping, RandomizedClipping

RESULTS = Path(__file__).parent / "results" / "sketch_sigma.json"
SKETCH_DIMS = (4, 8, 16, 32, 64)
CHARGED: tuple[Envelope, ...] = ("mixed", "convex", "hutch++")


def sigma(clipping: ClippingClaim) -> float:
    return noise_multiplier(0.7, 1e-5, sample_rate=64 / 1225, steps=200, clipping=clipping)


def main() -> None:
    exact = sigma(ExactClipping())
    rows = []
    for k in SKETCH_DIMS:
        found = {name: sigma(RandomizedClipping(k, name)) for name in CHARGED}
        rows.append({"sketch_dim": k, **{name: float(round_up(s, 4)) for name, s in found.items()}})
        shares = {name: f"{100 * (s / exact - 1):+.2f} %" for name, s in found.items()}
        print(k, found, shares, flush=True)
    RESULTS.write_text(
        json.dumps({"exact": float(round_up(exact, 4)), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
