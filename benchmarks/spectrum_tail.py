"""How well a few computed eigenvalues and a fitted tail stand for the whole spectrum (NoiseCurve,
table 3), and whether the automatic end of the tail is a good one.

    python benchmarks/spectrum_tail.py                                    # part of the network,
    minutes
    python benchmarks/spectrum_tail.py --problem whole --keep whole.npy   # all of it: an hour of
    two processors, 15 GiB; --keep goes on from the eigenvalues

The Hessian of the small CNN is computed column by column and decomposed: of its first convolution,
hidden layer and head (6460 parameters; loss over 200 synthetic images of four textures after 30
epochs on their labels), or of all 29 938 parameters (100 such images with ten random labels, as
NoiseCurve takes them where there are none). A mixing matrix (T = 500, b = 8, learning rate 1.5 over
the largest eigenvalue) is then found for three spectra: the top k alone, the top k with the tail of
the automatic index, and with that of the best of 9 indices; each is scored by what it adds to the
true objective, relative to the best matrix's: (tr(W X_approx^-1) - tr(W X_*^-1)) / tr(W X_*^-1).
Results of both problems go to benchmarks/results/spectrum_tail.json.
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
from numpy.typing import NDArray

from quietgrad.curvature import (
    CurvatureOperator,
    automatic_tail_index,
    extend_spectrum,
    positive_part,
    top_eigenvalues,
)
from quietgrad.curvature.pretraining import fit_to_labels
from quietgrad.noise import Curvature, mixing_matrix
from quietgrad.noise.correlation.solver import objective
from quietgrad.training.tasks.images.models import SmallCnn
from quietgrad.training.tasks.records import classification_loss

STEPS, BANDS = 500, 8
TOPS = {"part": (20, 50, 100, 200, 500, 1000), "whole": (20, 50, 100, 200, 500, 1000, 2000, 3000)}


def textures(count: int) -> tuple[torch.Tensor, np.ndarray[Any, np.dtype[np.int64]]]:
    generator = torch.Generator().manual_seed(0)
    labels = np.arange(count) % 4
    i, j = torch.meshgrid(torch.arange(14), torch.arange(14), indexing="ij")
    kinds = torch.stack([i % 4 < 2, j % 4 < 2, (i + j) % 6 < 3, (i * j) % 5 < 2]).float() * 2 - 1
    return kinds[labels][:, None] + torch.randn(
        count, 1, 14, 14, generator=generator
    ), labels.astype(np.int64)


def operator_of(problem: str) -> CurvatureOperator:
    torch.manual_seed(0)
    if problem == "part":
        model = SmallCnn(1, 4)
        pixels, labels = textures(200)
        fit_to_labels(model, list(model.parameters()), pixels, labels, 30)
        names = [
            n
            for n, _ in model.named_parameters()
            if n.startswith(("features.0", "features.1", "hidden", "head"))
        ]
    else:
        model = SmallCnn(1, 10)
        pixels, _ = textures(100)
        labels = np.random.default_rng(0).integers(0, 10, len(pixels))
        fit_to_labels(model, list(model.parameters()), pixels, labels, 30)
        names = [n for n, _ in model.named_parameters()]
    batch = {"pixels": pixels, "labels": torch.from_numpy(labels)}
    return CurvatureOperator(
        model, classification_loss, [batch], parameters=names, keep_graphs=True
    )


def all_eigenvalues(operator: CurvatureOperator) -> NDArray[np.float64]:
    """Descending. Memory: two matrices."""
    size = int(operator.shape[0])
    columns = np.empty((size, size), dtype=np.float64)
    unit = np.zeros(size)
    for i in range(size):
        unit[i] = 1.0
        columns[i] = operator.matvec(unit)
        unit[i] = 0.0
        if i % 5000 == 0:
            print(f"{i} of {size} columns", flush=True)
    # torch's library is twice as fast here as scipy's. It reads one triangle: the products agree
    # with their transpose to rounding.
    return np.sort(torch.linalg.eigvalsh(torch.from_numpy(columns)).numpy())[::-1]


def table(problem: str, keep: Path | None) -> dict[str, Any]:
    operator = operator_of(problem)
    size = int(operator.shape[0])
    started = time.perf_counter()
    if keep is not None and keep.is_file():
        exact = np.load(keep)
    else:
        exact = all_eigenvalues(operator)
        if keep is not None:
            np.save(keep, exact)
    dense_seconds = time.perf_counter() - started
    started = time.perf_counter()
    top = top_eigenvalues(operator, 200)
    error = float((np.abs(top.values - exact[:200]) / exact[:200]).max())
    print(
        f"{size} parameters; dense {dense_seconds:.0f} s, Lanczos "
        f"{time.perf_counter() - started:.0f} s, {error:.1e}"
    )
    positive = positive_part(operator, probes=8, steps=80)
    rate = 1.5 / exact[0]
    true = Curvature(tuple(exact), rate, STEPS)
    factor = true.factor()
    best = mixing_matrix(true, BANDS, max_seconds=10)

    def loss_of(spectrum: NDArray[np.float64]) -> float:
        columns = mixing_matrix(
            Curvature(tuple(spectrum), rate, STEPS), BANDS, max_seconds=10
        ).banded.columns
        return objective(columns, factor) / best.objective - 1

    rows = []
    for k in TOPS[problem]:
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
    return {
        "environment": {
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
            **{name: version(name) for name in ("quietgrad", "torch", "numpy", "scipy")},
        },
        "parameters": size,
        "positive_eigenvalues": int((exact > 1e-6).sum()),
        "positive_mass": float(exact[exact > 0].sum()),
        "estimated_mass": positive.mass,
        "estimated_mass_error": positive.mass_error,
        "mass_of_the_top": {k: float(exact[:k].sum()) for k in TOPS[problem]},
        "lanczos_top_200_relative_error": error,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", choices=tuple(TOPS), default="part")
    parser.add_argument("--keep", type=Path, help="file for the eigenvalues, to go on from")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/spectrum_tail.json")
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    record = json.loads(options.output.read_text()) if options.output.is_file() else {}
    record[options.problem] = table(options.problem, options.keep)
    options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
