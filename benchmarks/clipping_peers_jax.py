"""JAX-Privacy's clipping against the non-private step of the same JAX program, in turns.

    pip install --no-deps --target FOLDER jax==0.10.2 jaxlib==0.10.2 jax-privacy==2.0.0 \
        optax==0.2.8 chex==0.1.92 toolz==1.2.0
    PYTHONPATH=FOLDER python benchmarks/clipping_peers_jax.py [--repeats 5] [--regimes bert-32 ...]
                              [--ways jax-privacy-by-1 ...] [--again]
                              [--output benchmarks/results/clipping_peers_jax.json]

Models, batches, rounds and limits are those of ``clipping_peers.py``; ratios are to JAX's own
non-private step of the same round. The models are written in plain JAX (``jax_models.py``) and take
their weights from the torch models. Before anything is timed, losses, gradients and clipped sums
are compared with torch's and Quietgrad's, and a program that differs is not measured.

``jax-privacy`` clips the whole batch at once, ``jax-privacy-by-N`` in micro-batches of N. All are
compiled (``jit``) for their shapes before they are timed, in ``compile_seconds``. torch's
non-private step takes its turns too, so that absolute seconds stand side by side. Memory is
measured as there, after compiling; ``xla_memory_mib`` is what XLA itself plans, gradient and all
between, without what the kernels allocate by themselves.

On an idle machine of two processors it takes about half an hour, by the processor time of its
steps; the largest process takes 9 GiB. ``scripts/peers_figure.py --write`` then puts the tables
into the pages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clipping_peers import (
    REGIMES,
    build,
    has,
    installed,
    measure_time,
    per_example_loss,
    planners_choice,
    show,
    trainable,
    worker_of,
)
from jax_models import short_name
from jax_steps import PARTS, PROGRAM, WHOLE
from turns import Worker

STEPS = Path(__file__).with_name("jax_steps.py")
SHOWN = ("bert-32", "llama-512", "llama-4096", "llama-lora", "resnet18-gn")
TORCH = "torch-non-private"
PACKAGES = ("torch", "transformers", "peft", "jax", "jaxlib", "jax-privacy", "optax")
TOLERANCE = 2e-3  # relative, of the whole gradient's norm: float32 in two orders of addition


def methods_of(regime: str, ways: list[str] | None = None) -> list[str]:
    """Whole, by 8 where there are more, and one by one, or those of ``ways`` alone."""
    sizes = [size for size in (8, 1) if size < REGIMES[regime].batch]
    private = [WHOLE, *(f"{PARTS}{size}" for size in sizes)]
    return ["non-private", TORCH, *(way for way in private if ways is None or way in ways)]


def write_program(regime: str, path: Path) -> dict[str, int]:
    """Weights and a batch of the torch model; returns how many parameters there are."""
    model, batch = build(regime)
    chosen = trainable(model)
    arrays = {
        f"{'trained' if name in chosen else 'frozen'}/{short_name(name)}": p.detach().numpy()
        for name, p in model.named_parameters()
    }
    arrays |= {f"batch/{name}": x.numpy() for name, x in batch.items()}
    spec = REGIMES[regime]
    np.savez(path, model=np.array(spec.model), limit_gib=np.array(spec.limit_gib), **arrays)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in chosen.values()),
    }


def in_jax(program: Path, task: str, regime: str, method: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(STEPS), task, regime, method],
        env={**os.environ, PROGRAM: str(program)},
        capture_output=True,
        text=True,
        check=False,
    )


def torch_results(regime: str, method: str) -> dict[str, np.ndarray]:
    """Losses and gradients as torch and Quietgrad have them."""
    model, batch = build(regime)
    if method == "non-private":
        losses = per_example_loss(model, batch)
        losses.mean().backward()
        found = {name: p.grad for name, p in trainable(model).items()}
    else:
        losses = per_example_loss(model, batch)
        bound = planners_choice().bind(model, per_example_loss)
        found = dict(bound.clip(batch, step=2).gradients)
    results = {short_name(name): g.numpy() for name, g in found.items() if g is not None}
    return {"..losses": losses.detach().numpy(), **results}


def off_by(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Relative difference of two gradients, in the norm of the whole.

    Raises:
        ValueError: if they are not of the same parameters in the same shapes.
    """
    shapes = [{name: x.shape for name, x in one.items()} for one in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"other parameters in JAX than in torch: {shapes[0]} and {shapes[1]}")

    def norm(parts: list[np.ndarray]) -> float:
        return float(sum(np.square(x, dtype=np.float64).sum() for x in parts)) ** 0.5

    return norm([found[n] - wanted[n] for n in wanted]) / norm(list(wanted.values()))


def check(regime: str, program: Path) -> dict[str, float]:
    """How far losses, gradient and clipped sum are from torch's and Quietgrad's.

    Raises:
        SystemExit: if it is more than rounding.
    """
    differences = {}
    for method in ("non-private", methods_of(regime)[-1]):
        path = program.with_name(f"{method}.npz")
        done = in_jax(program, "--results-to", str(path), method)
        if done.returncode:
            raise SystemExit(f"{regime}, {method}: {done.stderr[-600:]}")
        with np.load(path) as file:
            found = dict(file)
        wanted = torch_results(regime, method)
        losses = [{"": one.pop("..losses")} for one in (found, wanted)]
        what = "gradient" if method == "non-private" else "clipped_sum"
        differences |= {"losses": off_by(*losses), what: off_by(found, wanted)}
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"{regime}: not the program of torch, relative {differences}")
    return differences


def measure(
    regime: str,
    methods: list[str],
    repeats: int,
    environment: dict[str, Any],
    folder: Path,
    differences: dict[str, float] | None,
) -> dict[str, Any]:
    """``differences``: from an earlier check of the same program, which takes minutes."""
    program = folder / f"{regime}.npz"
    spec, counts = REGIMES[regime], write_program(regime, program)
    entry: dict[str, Any] = {
        "batch": spec.batch,
        "length": spec.length,
        **counts,
        "memory_limit_gib": spec.limit_gib,
        "difference_from_torch": differences or check(regime, program),
        "repeats": repeats,
        "load_at_start": round(os.getloadavg()[0], 2),
        "environment": environment,
    }

    def start(regime: str, method: str) -> Worker:
        if method == TORCH:
            return worker_of(regime, "non-private")
        return Worker(regime, method, STEPS, {**os.environ, PROGRAM: str(program)})

    entry |= measure_time(regime, methods, repeats, start)
    rows = entry["methods"]
    entry["seconds_non_private_torch"] = rows.pop(TORCH)["seconds"]
    for method, row in rows.items():
        done = in_jax(program, "--figures-of", regime, method)
        if done.returncode == 0:
            row |= json.loads(done.stdout.strip().splitlines()[-1])
    base = rows["non-private"]
    for row in rows.values():
        if "added_memory_mib" in row:
            row["memory_ratio"] = row["added_memory_mib"] / base["added_memory_mib"]
            row["xla_memory_ratio"] = row["xla_memory_mib"] / base["xla_memory_mib"]
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--regimes", nargs="+", default=list(SHOWN), choices=list(SHOWN))
    parser.add_argument(
        "--ways", nargs="+", help="jax-privacy, jax-privacy-by-8, ...; all if left out"
    )
    parser.add_argument("--again", action="store_true", help="also what the output file holds")
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="with --again: take the comparison with torch from the output file, too",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/clipping_peers_jax.json")
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    environment = {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **{name: installed(name) for name in PACKAGES},
    }
    report: dict[str, Any] = {"regimes": {}}
    with contextlib.suppress(FileNotFoundError):
        report["regimes"] = json.loads(arguments.output.read_text(encoding="utf-8"))["regimes"]
    known = {
        regime: entry["difference_from_torch"]
        for regime, entry in report["regimes"].items()
        if arguments.unchecked
    }
    for regime in arguments.regimes:
        methods = methods_of(regime, arguments.ways)
        wanted = [method for method in methods if method != TORCH]
        if arguments.again or not has(report, regime, wanted, arguments.repeats, environment):
            with tempfile.TemporaryDirectory() as folder:
                entry = measure(
                    regime, methods, arguments.repeats, environment, Path(folder), known.get(regime)
                )
            report["regimes"][regime] = entry
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        entry = report["regimes"][regime]
        show(regime, entry)
        print(
            f"{regime:12s} non-private step: JAX {entry['seconds_non_private']:.3f} s, "
            f"torch {entry['seconds_non_private_torch']:.3f} s; off from torch "
            f"by {max(entry['difference_from_torch'].values()):.1e}"
        )


if __name__ == "__main__":
    main()
