"""The norm of one linear layer's per-example gradients, method by method: operations, extra memory,
time, growth with the context length.

    python benchmarks/sketch_linear.py [--parts layers growth] [--repeats 7] [--output
    benchmarks/results/sketch_linear.json] [--figure docs/sketch_linear.png]
    python benchmarks/sketch_linear.py --parts --figure docs/sketch_linear.png       (draws what the
    output file holds)

The setting of DP-SGD-RC, section 6.1: the three linear layers of Llama 3.2 1B, batch 2, 4096
positions, k = 32, float32. The baseline is the paper's: the whole [b, p, d] gradient formed at
once.

Operations: two per multiplication of a matrix product, counted by torch's FlopCounterMode while the
method runs; the QR factorisation of Hutch++, which it does not know, by formula (4 d k^2 - 4/3 k^3
for a d x k matrix, factors formed); sums of squares and random numbers are not counted.
Memory: (allocated) peak of torch's own allocations during the call, every tensor and temporary,
from the profiler; (resident) by how much one call raises the peak resident memory of a fresh
process that holds the factors, median of three processes (Linux; includes the workspace of the
matrix library).
Time: all methods in turn, ratios within a round, median and range over rounds; a sample is as many
calls as fill 50 ms; once more in processor time of a single thread, which other work on the machine
disturbs less. Growth: slope of a straight line through (log T, log value) over all T.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.estimators.hutch import hutch_norms
from quietgrad.clipping.norms.estimators.hutch_plus_plus import hutch_plus_plus_norms
from quietgrad.clipping.norms.estimators.materialized import materialized_norms
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors import DenseFactors

B, T, K = 2, 4096, 32
SHAPES = [(2048, 512), (2048, 2048), (8192, 2048)]  # rows p, columns d
GROWTH_SHAPE = (2048, 2048)
GROWTH_LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
BASELINE = "materialized-unblocked"
EXACT = [BASELINE, "materialized", "ghost-unblocked", "ghost"]
SKETCHES = ["hutch", "hutch++"]
GROWTH_METHODS = ["materialized", "ghost", "hutch"]
SAMPLE_SECONDS = 0.05
SLOW_SECONDS = 3.5  # methods slower than this get two rounds
PROCESSES = 3
WARM_UP_LENGTH = 512

TARGETS = {
    "hutch_operations_saved_percent": dict(zip(SHAPES, (92.1, 96.8, 98.0))),
    "sketch_memory_saved_percent_largest_layer": 97.0,
    "hutch_time_ratio": dict(zip(SHAPES, (0.13, 0.06, 0.031))),
    "hutch_growth_exponent": 1.05,
}


def unblocked_materialized(factors: DenseFactors) -> Tensor:
    gradient = torch.bmm(factors.left_bgtp[:, 0].transpose(1, 2), factors.right_bgtd[:, 0])
    return torch.linalg.vector_norm(gradient.flatten(1), dim=1).square()


def unblocked_ghost(factors: DenseFactors) -> Tensor:
    left, right = factors.left_bgtp[:, 0], factors.right_bgtd[:, 0]
    gram = torch.bmm(left, left.transpose(1, 2))
    return gram.mul_(torch.bmm(right, right.transpose(1, 2))).sum(dim=(1, 2))


METHODS: dict[str, Callable[[DenseFactors], Tensor]] = {
    BASELINE: unblocked_materialized,
    "materialized": lambda f: materialized_norms([f], torch.float32).squared,
    "ghost-unblocked": unblocked_ghost,
    "ghost": lambda f: ghost_norms([f], torch.float32).squared,
    "hutch": lambda f: hutch_norms([f], "weight", K, Projections.fresh(), torch.float32).squared,
    "hutch++": lambda f: (
        hutch_plus_plus_norms([f], "weight", K, Projections.fresh(), torch.float32).squared
    ),
}


def factors_of(p: int, d: int, t: int) -> DenseFactors:
    torch.manual_seed(0)
    return DenseFactors(torch.randn(B, 1, t, p), torch.randn(B, 1, t, d))


def product_operations(x: torch.Size, weight: torch.Size, *rest: Any, **more: Any) -> int:
    return 2 * math.prod(x) * weight[0]


# An operator for thin products that FlopCounterMode would pass over.
ONEDNN_PRODUCT = (
    {torch.ops.mkldnn._linear_pointwise: product_operations}
    if torch.backends.mkldnn.is_available()
    else {}
)


def qr_operations(p: int, d: int) -> float:
    """Householder factorisation and forming of the reduced factor, for B matrices of size min(p, d)
    x K.
    """
    return B * (4 * min(p, d) * K**2 - 4 / 3 * K**3)


def operations(method: str, factors: DenseFactors) -> float:
    with FlopCounterMode(display=False, custom_mapping=ONEDNN_PRODUCT) as counter:
        METHODS[method](factors)
    s = factors.sizes
    return counter.get_total_flops() + (qr_operations(s.p, s.d) if method == "hutch++" else 0.0)


def allocated_bytes(method: str, factors: DenseFactors) -> int:
    """Peak of torch's allocations during one call, over those held before it."""
    METHODS[method](factors)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        METHODS[method](factors)
    held = peak = 0
    for _, size in sorted(allocations(recorded)):
        held += size
        peak = max(peak, held)
    return peak


def allocations(recorded: profile) -> Iterator[tuple[int, int]]:
    """(time, bytes) of every allocation, negative for those given back."""
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    pending = list(recorded.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if hasattr(event.extra_fields, "alloc_size"):
            yield event.start_time_ns, event.extra_fields.alloc_size


def resident_mib(method: str, p: int, d: int, t: int) -> list[float]:
    command = [sys.executable, __file__, "--memory-of", method, str(p), str(d), str(t)]
    # Freed tensors go back to the system at once, so that the peak is of what is held, not of how
    # the heap is cut up.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for _ in range(PROCESSES)
    ]
    return sorted(float(d.stdout.strip().splitlines()[-1]) for d in done)


def memory_child(method: str, p: int, d: int, t: int) -> None:
    """Prints by how much one call raises the resident memory, after a short one that loads
    libraries and starts their threads.
    """
    METHODS[method](factors_of(p, d, min(t, WARM_UP_LENGTH)))
    factors = factors_of(p, d, t)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    METHODS[method](factors)
    print(max(_status("VmHWM") - before, 0.0))


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) / 1024 for line in file if line.startswith(key))


def timed(methods: list[str], factors: DenseFactors, repeats: int) -> dict[str, list[float]]:
    """Seconds of one call, by method and round. The first call warms up and says how many calls
    make a sample.
    """
    calls: dict[str, int] = {}
    first: dict[str, float] = {}
    for method in methods:
        METHODS[method](factors)
        started = time.perf_counter()
        METHODS[method](factors)
        first[method] = time.perf_counter() - started
        calls[method] = max(1, math.ceil(SAMPLE_SECONDS / first[method]))
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for round_ in range(repeats):
        for method in methods:
            if round_ >= 2 and first[method] > SLOW_SECONDS:
                continue
            started = time.perf_counter()
            for _ in range(calls[method]):
                METHODS[method](factors)
            seconds[method].append((time.perf_counter() - started) / calls[method])
    return seconds


def processor_time(
    methods: list[str], factors: DenseFactors, repeats: int
) -> dict[str, list[float]]:
    """The same in processor time of one thread, which other work on the
    machine disturbs far less.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(repeats):
        for method in methods:
            started = time.process_time()
            METHODS[method](factors)
            seconds[method].append(time.process_time() - started)
    torch.set_num_threads(threads)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_layer(p: int, d: int, repeats: int) -> dict[str, Any]:
    factors = factors_of(p, d, T)
    exact = METHODS[BASELINE](factors)
    counted = {m: operations(m, factors) for m in METHODS}
    allocated = {m: allocated_bytes(m, factors) / 2**20 for m in METHODS}
    seconds = timed(list(METHODS), factors, repeats)
    alone = processor_time([BASELINE, *SKETCHES], factors, max(2, repeats // 2))
    errors = {m: float((METHODS[m](factors) / exact - 1).abs().max()) for m in METHODS}
    del factors
    resident = {m: statistics.median(resident_mib(m, p, d, T)) for m in METHODS}
    rows: dict[str, Any] = {}
    for m in METHODS:
        rows[m] = {
            "operations": counted[m],
            "operations_saved_percent": saved(counted[m], counted[BASELINE]),
            "largest_relative_difference_of_squared_norm": errors[m],
            "seconds": spread(seconds[m]),
            "time_ratio": spread([x / y for x, y in zip(seconds[m], seconds[BASELINE])]),
        }
        if m in alone:
            rows[m]["processor_time_ratio"] = spread(
                [x / y for x, y in zip(alone[m], alone[BASELINE])]
            )
        for kind, values in (("allocated", allocated), ("resident", resident)):
            rows[m][f"extra_{kind}_mib"] = values[m]
            rows[m][f"{kind}_saved_percent"] = saved(values[m], values[BASELINE])
            if m in SKETCHES:
                best = min(EXACT, key=values.__getitem__)
                rows[m][f"{kind}_saved_percent_against_best_exact"] = saved(values[m], values[best])
                rows[m][f"best_exact_by_{kind}"] = best
    return {"rows": p, "columns": d, "methods": rows}


def saved(value: float, reference: float) -> float:
    return 100 * (1 - value / reference)


def measure_growth(repeats: int) -> dict[str, Any]:
    p, d = GROWTH_SHAPE
    points: dict[str, list[dict[str, Any]]] = {m: [] for m in GROWTH_METHODS}
    for t in GROWTH_LENGTHS:
        factors = factors_of(p, d, t)
        seconds = timed(GROWTH_METHODS, factors, repeats)
        allocated = {m: allocated_bytes(m, factors) / 2**20 for m in GROWTH_METHODS}
        del factors
        for m in GROWTH_METHODS:
            point = {
                "positions": t,
                "seconds": spread(seconds[m]),
                "extra_allocated_mib": allocated[m],
                "extra_resident_mib": statistics.median(resident_mib(m, p, d, t)),
            }
            points[m].append(point)
            show(
                f"growth T={t:6d} {m:24s} {point['seconds']['median']:9.4f} s  {allocated[m]:9.2f} "
                "MiB allocated"
            )
    report: dict[str, Any] = {"rows": p, "columns": d, "methods": {}}
    for m, taken in points.items():
        report["methods"][m] = {
            "points": taken,
            "time_exponent": slope(taken, lambda point: point["seconds"]["median"]),
            "allocated_exponent": slope(taken, lambda point: point["extra_allocated_mib"]),
            "resident_exponent": slope(taken, lambda point: point["extra_resident_mib"]),
        }
    return report


def slope(points: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
    x = [math.log(point["positions"]) for point in points]
    y = [math.log(max(value(point), 1e-3)) for point in points]
    return statistics.linear_regression(x, y).slope


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every target with the value it was missed or reached by."""
    found: list[dict[str, Any]] = []

    def judge(name: str, value: float, target: float, at_least: bool) -> None:
        passed = value >= target if at_least else value <= target
        found.append(
            {
                "target": name,
                "required": target,
                "at_least": at_least,
                "value": value,
                "passed": passed,
            }
        )

    for layer in report.get("layers", []):
        shape = (layer["rows"], layer["columns"])
        rows = layer["methods"]
        title = f"({shape[0]}, {shape[1]})"
        operations_target = TARGETS["hutch_operations_saved_percent"][shape]
        judge(
            f"{title} hutch operations saved, %",
            rows["hutch"]["operations_saved_percent"],
            operations_target,
            True,
        )
        for kind, words in (
            ("time_ratio", "time ratio"),
            ("processor_time_ratio", "time ratio, one thread"),
        ):
            judge(
                f"{title} hutch {words}",
                rows["hutch"][kind]["median"],
                TARGETS["hutch_time_ratio"][shape],
                False,
            )
        if shape == SHAPES[-1]:
            for m in SKETCHES:
                for kind in ("allocated", "resident"):
                    memory_target = TARGETS["sketch_memory_saved_percent_largest_layer"]
                    judge(
                        f"{title} {m} memory saved ({kind}), %",
                        rows[m][f"{kind}_saved_percent"],
                        memory_target,
                        True,
                    )
    if "growth" in report:
        hutch = report["growth"]["methods"]["hutch"]
        for kind in ("time", "allocated", "resident"):
            judge(
                f"hutch {kind} exponent in T",
                hutch[f"{kind}_exponent"],
                TARGETS["hutch_growth_exponent"],
                False,
            )
    return found


def draw(report: dict[str, Any], path: Path) -> None:
    """Time and extra memory against T, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    growth = report["growth"]
    colours = {"materialized": "#3a7d44", "ghost": "#b5651d", "hutch": "#1f5fa8"}
    labels = {
        "materialized": "materialized, row blocks",
        "ghost": "ghost, tiles",
        "hutch": f"Hutch, k = {K}",
    }
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4), layout="constrained")
    for m, entry in growth["methods"].items():
        lengths = [point["positions"] for point in entry["points"]]
        medians = [point["seconds"]["median"] for point in entry["points"]]
        memory = [point["extra_allocated_mib"] for point in entry["points"]]
        axes[0].plot(
            lengths,
            medians,
            "o-",
            color=colours[m],
            label=f"{labels[m]}: T^{entry['time_exponent']:.2f}",
        )
        axes[1].plot(
            lengths,
            memory,
            "o-",
            color=colours[m],
            label=f"{labels[m]}: T^{entry['allocated_exponent']:.2f}",
        )
    for axis, title in zip(axes, ("seconds for one norm", "extra memory (MiB, torch allocations)")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(GROWTH_LENGTHS, [str(t) for t in GROWTH_LENGTHS])
        axis.set_xlabel("context length T")
        axis.set_ylabel(title)
        axis.grid(alpha=0.25)
        axis.legend(fontsize=9)
    figure.suptitle(
        f"Squared norm of a {growth['rows']} x {growth['columns']} layer's gradients, batch {B}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def show(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="*", default=["layers", "growth"], choices=["layers", "growth"]
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/sketch_linear.json")
    )
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--memory-of", nargs=4, metavar=("METHOD", "P", "D", "T"))
    arguments = parser.parse_args()
    if arguments.memory_of:
        method, *sizes = arguments.memory_of
        memory_child(method, *map(int, sizes))
        return
    report: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        report = json.loads(arguments.output.read_text(encoding="utf-8"))
    if arguments.parts:
        report["environment"] = {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load_at_start": round(os.getloadavg()[0], 2),
            "torch": version("torch"),
        }
        report["setting"] = {
            "batch": B,
            "positions": T,
            "sketch_dim": K,
            "dtype": "float32",
            "repeats": arguments.repeats,
        }
    if "layers" in arguments.parts:
        report["layers"] = []
        for p, d in SHAPES:
            report["layers"].append(measure_layer(p, d, arguments.repeats))
            for m, row in report["layers"][-1]["methods"].items():
                r = row["time_ratio"]
                show(
                    f"({p}, {d}) {m:24s} operations saved {row['operations_saved_percent']:8.2f} % "
                    " "
                    f"allocated {row['extra_allocated_mib']:7.2f} MiB "
                    f"({row['allocated_saved_percent']:7.2f} %)  "
                    f"resident {row['extra_resident_mib']:7.2f} MiB "
                    f"({row['resident_saved_percent']:7.2f} %)  "
                    f"time {r['median']:.4f} [{r['min']:.4f}-{r['max']:.4f}]"
                )
    if "growth" in arguments.parts:
        report["growth"] = measure_growth(arguments.repeats)
    if arguments.parts:
        report["targets"] = verdicts(report)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for verdict in report["targets"]:
        sign = ">=" if verdict["at_least"] else "<="
        word = "pass" if verdict["passed"] else "MISS"
        show(
            f"{word}  {verdict['target']:48s} {verdict['value']:8.3f} {sign} {verdict['required']}"
        )
    if arguments.figure:
        draw(report, arguments.figure)


if __name__ == "__main__":
    main()
