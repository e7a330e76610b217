"""What correlated noise costs: finding the mixing matrix, and drawing from it beside independent
noise.

    python benchmarks/correlated_noise.py [--parts solver stream] [--output
    benchmarks/results/correlated_noise.json]

Solver: seconds, peak memory of the process, tr(W X^-1) over independent noise's, and the proven
distance to the best matrix. The paper's run (T = 2222, b = 20: 20 epochs of 50 000 images in
batches of
450) for prefix sums and for a synthetic spectrum of 12 000 eigenvalues (mu_i = exp(-0.3 log(i)^1.2)
   / 2 and four outliers, learning rate 0.2) with and without a floor; T = 20 000, b = 16 with the
   Toeplitz
family. Each in a process of its own.

Stream: time of one release with b = 8, rows kept or regenerated at step 63 of 64, over that of
independent noise, in turn, medians and ranges over rounds; 22.7 M parameters (MiniLM's shape).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.events import SensitivityClaim
from quietgrad.noise import Curvature, GaussianNoise, PrefixSums, mixing_matrix
from quietgrad.randomness import RandomKey

KEY = RandomKey.from_seed(0)
ROUNDS = 7


def spectrum() -> tuple[float, ...]:
    tail = 0.5 * np.exp(-0.3 * np.log(np.arange(1, 12_001)) ** 1.2)
    return (8.0, 5.0, 3.0, 2.0, *map(float, tail))


PROBLEMS = {
    "prefix sums, T = 2222, b = 20": lambda: (PrefixSums(2222), 20),
    "curvature, T = 2222, b = 20": lambda: (Curvature(spectrum(), 0.2, 2222), 20),
    "curvature with floor 0.01, T = 2222, b = 20": lambda: (
        Curvature(spectrum(), 0.2, 2222, 0.01),
        20,
    ),
    "prefix sums, T = 20 000, b = 16, Toeplitz": lambda: (PrefixSums(20_000), 16),
    "curvature, T = 20 000, b = 16, Toeplitz": lambda: (Curvature(spectrum(), 0.2, 20_000), 16),
}


def solve(name: str) -> dict[str, Any]:
    started = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    workload, bands = PROBLEMS[name]()
    found = mixing_matrix(workload, bands)
    return {
        "problem": name,
        "seconds": round(time.perf_counter() - started, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "mib_before": before // 1024,
        "over_independent": found.objective / found.independent,
        "relative_gap": found.relative_gap,
        "kkt_residual": found.kkt_residual,
        "largest_step_noise": found.banded.largest_inverse_row(),
        "unit_columns_error": float(np.abs(found.banded.gram_band()[:, 0] - 1).max()),
    }


def stream() -> list[dict[str, Any]]:
    shapes = {f"matrix{i}": (384, 384) for i in range(24)} | {
        f"wide{i}": (1536, 384) for i in range(12)
    }
    shapes |= {"embedding": (30_522, 384)}
    gradients = {name: torch.zeros(shape) for name, shape in shapes.items()}
    clipped = ClippedSum(gradients, SensitivityClaim(1.0))
    mixing = mixing_matrix(PrefixSums(64), 8).banded
    plain, rows, again = (
        GaussianNoise(1.0),
        GaussianNoise(1.0, mixing),
        GaussianNoise(1.0, mixing, "regenerate"),
    )
    kept = rows.replay(gradients, lambda step: KEY, 0, 8)
    bare = again.replay(gradients, lambda step: KEY, 0, 63)
    work = {
        "independent": lambda: plain.update(clipped, lambda _: KEY, plain.init(8)),
        "rows kept, b = 8": lambda: rows.update(clipped, lambda _: KEY, kept),
        "regenerated, b = 8, step 63": lambda: again.update(clipped, lambda _: KEY, bare),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(ROUNDS):
        for name, release in work.items():
            if name.startswith("regenerated") and round_ >= 2:
                continue
            started = time.perf_counter()
            release()
            seconds[name].append(time.perf_counter() - started)
    base = seconds["independent"]
    result = []
    for name, taken in seconds.items():
        ratios = [t / b for t, b in zip(taken, base)]
        result.append(
            {
                "noise": name,
                "seconds": statistics.median(taken),
                "over_independent": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
                "parameters": sum(g.numel() for g in gradients.values()),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", default=["solver", "stream"], choices=["solver", "stream"]
    )
    parser.add_argument("--output", default="benchmarks/results/correlated_noise.json")
    parser.add_argument("--solve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    if options.solve:
        print(json.dumps(solve(options.solve)))
        return
    path = Path(options.output)
    record: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    record["environment"] = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in ("quietgrad", "torch", "numpy", "scipy")},
    }
    if "solver" in options.parts:
        record["solver"] = []
        for name in PROBLEMS:
            made = subprocess.run(
                [sys.executable, __file__, "--solve", name],
                capture_output=True,
                text=True,
                check=True,
            )
            record["solver"].append(json.loads(made.stdout))
            print(record["solver"][-1], flush=True)
    if "stream" in options.parts:
        record["stream"] = stream()
        for line in record["stream"]:
            print(line, flush=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
