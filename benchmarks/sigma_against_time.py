"""What a sketch costs in noise and in time: the noise multiplier of every estimator and k against
the time of a step that it clips.

    python benchmarks/sigma_against_time.py [--repeats 7] [--regimes bert-512 llama-1024]

Noise multipliers are those of sketch_sigma.py (its results are read, so run it before). Times are
taken as in clipping_peers.py, whose models these are: one process for each method, one step each in
turn, ratios to the step without privacy of the same round, median and range over rounds. Writes
benchmarks/results/sigma_against_time.json and docs/sigma_against_time.png. Ten minutes a regime.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from clipping_peers import build, measure_time, non_private, per_example_loss
from turns import Step, Worker, answer_steps

RESULTS = Path(__file__).parent / "results"
OUTPUT = RESULTS / "sigma_against_time.json"
FIGURE = Path(__file__).parents[1] / "docs" / "sigma_against_time.png"
SKETCHES = {"hutch": (8, 16, 32, 64), "hutch++": (4, 8, 16, 32, 64)}
METHODS = ["exact", *(f"{name}-{k}" for name, dims in SKETCHES.items() for k in dims)]
NAMES = {"bert-512": "BERT, 8 texts of 512 tokens", "llama-1024": "Llama, 2 texts of 1024 tokens"}


def step_of(regime: str, method: str) -> Step:
    from quietgrad.clipping import Clipper

    model, batch = build(regime)
    if method == "non-private":
        return non_private(model, batch)
    name, _, k = method.partition("-")
    clipper = Clipper(1.0, "auto") if method == "exact" else Clipper(1.0, name, sketch_dim=int(k))
    bound = clipper.bind(model, per_example_loss)
    return lambda: bound.clip(batch, step=2)  # the first call alone is examined by the guard


def noise_multipliers() -> dict[str, float]:
    """By method; Hutch is charged by the convex envelope, Hutch++ by its own, as a plan does."""
    known = json.loads((RESULTS / "sketch_sigma.json").read_text(encoding="utf-8"))
    found = {"exact": known["exact"]}
    for row in known["rows"]:
        found[f"hutch-{row['sketch_dim']}"] = row["convex"]
        found[f"hutch++-{row['sketch_dim']}"] = row["hutch++"]
    return {method: found[method] for method in METHODS}


def draw(record: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sigma, regimes = record["noise_multipliers"], record["regimes"]
    figure, axes = plt.subplots(
        1, len(regimes), figsize=(5.2 * len(regimes), 4), layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for axis, (regime, measured) in zip(axes[0], regimes.items(), strict=True):
        taken = {m: measured["methods"][m]["time_ratio"]["median"] for m in METHODS}
        for name, color, marker in (("hutch", "#1f5fa8", "o"), ("hutch++", "#c0504d", "s")):
            methods = [f"{name}-{k}" for k in SKETCHES[name]]
            x, y = [taken[m] for m in methods], [sigma[m] for m in methods]
            axis.plot(x, y, marker=marker, color=color, label=name.replace("h", "H", 1))
            for method, at in zip(methods, zip(x, y, strict=True), strict=True):
                axis.annotate(
                    method.rpartition("-")[2], at, xytext=(4, 5), textcoords="offset points",
                    fontsize=8, color=color,
                )  # fmt: skip
        axis.plot(taken["exact"], sigma["exact"], "D", color="#3a7d44", label="exact")
        axis.axhline(sigma["exact"], color="#3a7d44", linewidth=0.8, linestyle="--")
        axis.set_title(NAMES.get(regime, regime), fontsize=10)
        axis.set_xlabel("time over the step without privacy")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("noise multiplier, reference setting")
    axes[0][0].legend(fontsize=9)
    figure.savefig(FIGURE, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--regimes", nargs="+", default=list(NAMES), help="of clipping_peers.py")
    parser.add_argument("--worker", nargs=2, metavar=("REGIME", "METHOD"), help=argparse.SUPPRESS)
    parser.add_argument("--figure", action="store_true", help="draw what is there")
    arguments = parser.parse_args()
    if arguments.worker:
        answer_steps(lambda: step_of(*arguments.worker))
        return
    if arguments.figure:
        draw(json.loads(OUTPUT.read_text(encoding="utf-8")))
        return
    record: dict[str, Any] = {
        "started": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "load_at_start": os.getloadavg()[0],
        "environment": {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        "repeats": arguments.repeats,
        "noise_multipliers": noise_multipliers(),
        "regimes": {},
    }
    for regime in arguments.regimes:
        record["regimes"][regime] = measure_time(
            regime,
            ["non-private", *METHODS],
            arguments.repeats,
            lambda regime, method: Worker(regime, method, Path(__file__)),
        )
        for method, row in record["regimes"][regime]["methods"].items():
            ratio = row["time_ratio"]
            print(
                f"{regime:12} {method:12} {ratio['median']:.2f} [{ratio['min']:.2f}-"
                f"{ratio['max']:.2f}]  sigma {record['noise_multipliers'].get(method, 0.0):.3f}",
                flush=True,
            )
    OUTPUT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(record)


if __name__ == "__main__":
    main()
