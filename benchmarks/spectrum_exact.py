"""The top of the Hessian of the whole small CNN (29 938 parameters), by Lanczos on products and
from the matrix itself.

    python benchmarks/spectrum_exact.py [--output benchmarks/results/spectrum_exact.json]

The matrix is built column by column (7 GiB in float64; about 20 minutes of two processors in all).
Its top 200 eigenvalues come from ARPACK on the matrix in float64 at machine precision; that none is
missing is proven by Sylvester's law of inertia: an LDL^T factorisation of H - s I, with s between
the 200th and the 201st, has as many positive pivots as H has eigenvalues above s. Compared with
them: ``quietgrad.curvature.top_eigenvalues`` on Hessian-vector products.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.sparse.linalg import eigsh
from spectrum_tail import textures

from quietgrad.curvature import CurvatureOperator, top_eigenvalues
from quietgrad.curvature.pretraining import fit_to_labels
from quietgrad.training.tasks.images.models import SmallCnn
from quietgrad.training.tasks.records import classification_loss

TOP = 200


def dense_hessian(operator: CurvatureOperator) -> NDArray[np.float64]:
    """[n, n], symmetrised in blocks."""
    n = int(operator.shape[0])
    found = np.empty((n, n), dtype=np.float64)
    unit = np.zeros(n)
    for i in range(n):
        unit[i] = 1.0
        found[i] = operator.matvec(unit)
        unit[i] = 0.0
        if i % 3000 == 0:
            print(f"{i} of {n} rows", flush=True)
    step = 2000
    for i in range(0, n, step):
        for j in range(i, n, step):
            block = (found[i : i + step, j : j + step] + found[j : j + step, i : i + step].T) / 2
            found[i : i + step, j : j + step] = block
            found[j : j + step, i : i + step] = block.T
    return found


def eigenvalues_above(matrix: NDArray[np.float64], shift: float) -> int:
    """How many, by the signs of the pivots of H - shift I; destroys the matrix."""
    matrix[np.diag_indices_from(matrix)] -= shift
    work, _ = lapack.dsytrf_lwork(len(matrix), lower=1)
    factors, pivots, info = lapack.dsytrf(matrix.T, lower=1, lwork=int(work), overwrite_a=1)
    if info < 0:
        raise RuntimeError(f"dsytrf: argument {-info}")
    positive, i = 0, 0
    while i < len(pivots):
        if pivots[i] > 0:
            positive += int(factors[i, i] > 0)
            i += 1
        else:  # a block of two rows: one pivot of each sign, as Bunch and Kaufman choose them
            positive += 1
            i += 2
    return positive


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="benchmarks/results/spectrum_exact.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = SmallCnn(1, 10)
    pixels, labels = textures(100)
    fit_to_labels(model, list(model.parameters()), pixels, labels, 30)
    batch = {"pixels": pixels, "labels": torch.from_numpy(labels)}
    operator = CurvatureOperator(model, classification_loss, [batch], keep_graphs=True)
    started = time.perf_counter()
    top = top_eigenvalues(operator, TOP)
    seconds = {"lanczos_on_products": time.perf_counter() - started}
    print(
        f"{operator.shape[0]} parameters; Lanczos on products {seconds['lanczos_on_products']:.0f} "
        "s",
        flush=True,
    )

    started = time.perf_counter()
    matrix = dense_hessian(operator)
    seconds["matrix"] = time.perf_counter() - started
    started = time.perf_counter()
    exact = np.sort(eigsh(matrix, TOP + 1, which="LA", tol=0, return_eigenvectors=False))[::-1]
    seconds["arpack_on_matrix"] = time.perf_counter() - started
    error = float((np.abs(top.values - exact[:TOP]) / exact[:TOP]).max())
    print(
        f"matrix {seconds['matrix']:.0f} s, ARPACK on it {seconds['arpack_on_matrix']:.0f} s; "
        f"largest relative difference {error:.1e}",
        flush=True,
    )

    started = time.perf_counter()
    above = eigenvalues_above(matrix, float(exact[TOP - 1] + exact[TOP]) / 2)
    seconds["inertia"] = time.perf_counter() - started
    print(
        f"{above} eigenvalues above the middle of the {TOP}th and the next, by inertia "
        f"({seconds['inertia']:.0f} s)"
    )
    record = {
        "parameters": int(operator.shape[0]),
        "images": len(labels),
        "top": TOP,
        "largest": float(exact[0]),
        "smallest_of_the_top": float(exact[TOP - 1]),
        "largest_relative_difference": error,
        "largest_residual": float(top.residuals.max()),
        "eigenvalues_above_by_inertia": above,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "environment": {
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "packages": {name: version(name) for name in ("torch", "numpy", "scipy")},
        },
    }
    Path(options.output).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
