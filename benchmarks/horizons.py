"""What a mixing matrix made for one horizon costs at another: excess loss after several steps, by
the curvature of Fashion-MNIST's public images.

    python benchmarks/horizons.py [--output benchmarks/results/horizons.json]

The spectrum, rate, steps and bands of recipes/noisecurve.toml, sharp directions forgetting at once
(clamp 1). Excess in units of (rate sigma C / B)^2 / 2. About three minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.curvature import load_spectrum
from quietgrad.noise import Curvature, PrefixSums, mixing_matrix
from quietgrad.noise.correlation.mixing import MixingMatrix
from quietgrad.noise.correlation.solver import objective
from quietgrad.training.settings.noise import clipping_factor

ROOT = Path(__file__).parent.parent
SPECTRUM = ROOT / "recipes" / "noisecurve" / "held-out.npz"
STEPS, BANDS, RATE, CLAMP = 2000, 16, 1.0, 1.0
AFTER = (250, 500, 1000, 1500, 2000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/horizons.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # clamped eigenvalues: on purpose
    spectrum = load_spectrum(SPECTRUM)
    factor = clipping_factor(spectrum, 1.0)
    eigenvalues = tuple(float(mu) * factor for mu in spectrum.eigenvalues())

    def curvature(horizon: str, floor: float = 0.0, steps: int = STEPS) -> Curvature:
        return Curvature(eigenvalues, RATE, steps, floor, horizon, CLAMP)

    judges = []
    for after in AFTER:
        judge = curvature("final", steps=after).factor()
        judges.append(np.concatenate([judge, np.zeros((STEPS - after, judge.shape[1]))]))
    workloads = {
        "independent noise": (PrefixSums(STEPS), 1),
        "prefix sums": (PrefixSums(STEPS), BANDS),
        "the last step, no floor": (curvature("final"), BANDS),
        "the last step, floor 0.003": (curvature("final", 0.003), BANDS),
        "every step": (curvature("all"), BANDS),
        "both": (curvature("both"), BANDS),
    }
    rows: dict[str, Any] = {}
    for name, (workload, bands) in workloads.items():
        found: MixingMatrix = mixing_matrix(workload, bands)
        rows[name] = {
            "excess": {
                after: objective(found.banded.columns, j)
                for after, j in zip(AFTER, judges, strict=True)
            },
            "largest_step_noise": found.banded.largest_inverse_row(),
            "relative_gap": found.relative_gap,
            "kkt_residual": found.kkt_residual,
        }
        excess = " ".join(f"{value:10.1f}" for value in rows[name]["excess"].values())
        print(f"{name:28} {excess}   largest {rows[name]['largest_step_noise']:.1f}", flush=True)
    here = {
        "processor": platform.machine(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }
    arguments.output.write_text(json.dumps({"environment": here, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
