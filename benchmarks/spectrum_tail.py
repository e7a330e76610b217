"""How well a few computed eigenvalues and a fitted tail stand for the whole spectrum (NoiseCurve, table 3), and whether the automatic end of the tail is a good one.

    python benchmarks/spectrum_tail.py [--output benchmarks/results/spectrum_tail.json]

The whole Hessian of part of the small CNN (first convolution, hidden layer and head: 6610 parameters; loss over 200 synthetic images of four textures after 30 epochs on their labels) is computed column by column and
decomposed. A mixing matrix (T = 500, b = 8, learning rate 1.5 over the largest eigenvalue) is then found for three spectra: the top k alone, the top k with the tail of the automatic index, and with
that of the best of 9 indices; each is scored by what it adds to the true objective, relative to the best matrix's: (tr(W X_approx^-1) - tr(W X_*^-1)) / tr(W X_*^-1).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quietgrad.curvature import (
    CurvatureOperator,
    automatic_tail_index,
    extend_spectrum,
    positive_part,
    top_eigenvalues,
)
from quietgrad.curvature.pretraining import fit_to_labels
from quietgrad.noise import Curvature, mixing_matrix
from quietgrad.noise.solver import objective
from quietgrad.training.image_models import SmallCnn
from quietgrad.training.records import classification_loss

STEPS, BANDS = 500, 8


def textures(count: int) -> tuple[torch.Tensor, np.ndarray[Any, np.dtype[np.int64]]]:
    generator = torch.Generator().manual_seed(0)
    labels = np.arange(count) % 4
    i, j = torch.meshgrid(torch.arange(14), torch.arange(14), indexing="ij")
    kinds = torch.stack([i % 4 < 2, j % 4 < 2, (i + j) % 6 < 3, (i * j) % 5 < 2]).float() * 2 - 1
    return kinds[labels][:, None] + torch.randn(count, 1, 14, 14, generator=generator), labels.astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="benchmarks/results/spectrum_tail.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.manual_seed(0)
    model = SmallCnn(1, 4)
    pixels, labels = textures(200)
    fit_to_labels(model, list(model.parameters()), pixels, labels, 30)
    names = [n for n, _ in model.named_parameters() if n.startswith(("features.0", "features.1", "hidden", "head"))]
    batch = {"pixels": pixels, "labels": torch.from_numpy(labels)}
    operator = CurvatureOperator(model, classification_loss, [batch], parameters=names, keep_graphs=True)
    size = operator.shape[0]
    started = time.perf_counter()
    columns = np.empty((size, size), dtype=np.float64)
    unit = np.zeros(size)
    for i in range(size):
        unit[i] = 1.0
        columns[:, i] = operator.matvec(unit)
        unit[i] = 0.0
    exact = np.sort(np.linalg.eigvalsh((columns + columns.T) / 2))[::-1]
    dense_seconds = time.perf_counter() - started
    started = time.perf_counter()
    top = top_eigenvalues(operator, 200)
    error = float((np.abs(top.values - exact[:200]) / exact[:200]).max())
    print(f"{size} parameters; dense {dense_seconds:.0f} s, Lanczos {time.perf_counter() - started:.0f} s, {error:.1e}")
    positive = positive_part(operator, probes=8, steps=80)
    rate = 1.5 / exact[0]
    true = Curvature(tuple(exact), rate, STEPS)
    factor = true.factor()
    best = mixing_matrix(true, BANDS, max_seconds=10)

    def loss_of(spectrum: np.ndarray[Any, np.dtype[np.float64]]) -> float:
        columns = mixing_matrix(Curvature(tuple(spectrum), rate, STEPS), BANDS, max_seconds=10).banded.columns
        return objective(columns, factor) / best.objective - 1

    rows = []
    for k in (20, 50, 100, 200, 500, 1000):
        known = exact[:k]
        automatic = automatic_tail_index(known, positive.mass, size, 1e-6)
        tried = {
            int(index): loss_of(extend_spectrum(known, int(index), 1e-6))
            for index in np.unique(np.geomspace(k + 1, size, 9).astype(int))
        }
        hand = min(tried, key=tried.__getitem__)
        rows.append(
            {
                "k": k,
                "top_alone": loss_of(known),
                "automatic_index": automatic,
                "automatic": loss_of(extend_spectrum(known, automatic, 1e-6)),
                "best_index": hand,
                "best": tried[hand],
            }
        )
        print(rows[-1], flush=True)
    record = {
        "environment": {
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
            **{name: version(name) for name in ("quietgrad", "torch", "numpy", "scipy")},
        },
        "parameters": int(size),
        "positive_eigenvalues": int((exact > 1e-6).sum()),
        "positive_mass": float(exact[exact > 0].sum()),
        "estimated_mass": positive.mass,
        "estimated_mass_error": positive.mass_error,
        "lanczos_top_200_relative_error": error,
        "rows": rows,
    }
    Path(options.output).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
