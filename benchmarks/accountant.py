"""Time of the accountant: calibration against dp-accounting's own, one epsilon by kind of clipping,
many steps against few.

    OMP_NUM_THREADS=1 python benchmarks/accountant.py [--repeats 5] [--output
    benchmarks/results/accountant.json]

All candidates of a comparison run in turn, in one process, and ratios are taken within a round;
median, smallest and largest over the rounds are reported. dp-accounting knows exact clipping only,
so the sketched calibration here does more work for the same target. Both sides search the noise
multiplier to about the same precision (dp-accounting: tolerance 5e-4 of the result; Quietgrad: 4e-4
of epsilon, started at 1). dp-accounting runs twice: searching for a bracket from 1, as it does by
default, and with a bracket around the known answer, which spares it most of its work. Caches of
mixtures are emptied before every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant

from quietgrad.accounting import epsilon, noise_multiplier, scale_mixture
from quietgrad.events import ClippingClaim, ExactClipping, PoissonGaussian, RandomizedClipping

DELTA = 1e-5
# name: sampling rate, steps, target epsilon
CALIBRATIONS = {
    "reference": (64 / 1225, 200, 0.7),
    "one-percent": (0.01, 2000, 2.0),
    "large-batch": (0.2, 500, 3.0),
    "many-steps": (0.001, 20_000, 1.0),
}
CLIPPINGS: dict[str, ClippingClaim] = {
    "exact": ExactClipping(),
    "k=32": RandomizedClipping(32),
    "k=8": RandomizedClipping(8),
    "k=4": RandomizedClipping(4),
}
EPSILON_AT = (4.0, 64 / 1225, 200)  # noise multiplier, rate, steps


def fresh(function: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        scale_mixture._randomized_scale_mixture.cache_clear()
        return function()

    return run


def ours(q: float, steps: int, target: float, clipping: ClippingClaim) -> Callable[[], float]:
    return fresh(
        lambda: noise_multiplier(target, DELTA, sample_rate=q, steps=steps, clipping=clipping)
    )


def theirs(q: float, steps: int, target: float, about: float, bracket: Any) -> Callable[[], float]:
    def event(sigma: float) -> dp_accounting.DpEvent:
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(step, steps)

    return lambda: float(
        dp_accounting.calibrate_dp_mechanism(
            PLDAccountant, event, target, DELTA, bracket, tol=5e-4 * about
        )
    )


def one_epsilon(sigma: float, q: float, steps: int, clipping: ClippingClaim) -> Callable[[], float]:
    return fresh(lambda: epsilon(PoissonGaussian(sigma, q, steps, clipping), DELTA))


def paired(candidates: dict[str, Callable[[], float]], base: str, repeats: int) -> dict[str, Any]:
    """Seconds and ratios to ``base`` of the same round. The first round warms up and is not
    counted.
    """
    values = {name: run() for name, run in candidates.items()}
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {
        name: {
            "value": values[name],
            "seconds": spread(taken),
            f"ratio_to_{base}": spread([t / b for t, b in zip(taken, seconds[base], strict=True)]),
        }
        for name, taken in seconds.items()
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/accountant.json"))
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            **{name: version(name) for name in ("numpy", "scipy", "dp-accounting")},
        },
        "repeats": arguments.repeats,
        "delta": DELTA,
        "calibration": {},
    }
    for name, (q, steps, target) in CALIBRATIONS.items():
        about = noise_multiplier(target, DELTA, sample_rate=q, steps=steps)
        candidates = {
            "dp-accounting-exact": theirs(
                q, steps, target, about, dp_accounting.LowerEndpointAndGuess(0.5, 1.0)
            ),
            "dp-accounting-exact-bracket-known": theirs(
                q,
                steps,
                target,
                about,
                dp_accounting.ExplicitBracketInterval(0.8 * about, 1.25 * about),
            ),
            "quietgrad-exact": ours(q, steps, target, ExactClipping()),
            "quietgrad-k=32": ours(q, steps, target, RandomizedClipping(32)),
        }
        measured = paired(candidates, "dp-accounting-exact", arguments.repeats)
        report["calibration"][name] = {
            "sample_rate": q,
            "steps": steps,
            "target_epsilon": target,
        } | measured
        show(f"calibration {name}", measured, "dp-accounting-exact")
    sigma, q, steps = EPSILON_AT
    report["epsilon_by_clipping"] = paired(
        {name: one_epsilon(sigma, q, steps, clipping) for name, clipping in CLIPPINGS.items()},
        "exact",
        arguments.repeats,
    )
    show("epsilon", report["epsilon_by_clipping"], "exact")
    report["epsilon_by_steps"] = {}
    for name in ("exact", "k=32"):
        runs = {f"T={t}": one_epsilon(sigma, q, t, CLIPPINGS[name]) for t in (200, 20_000)}
        report["epsilon_by_steps"][name] = paired(runs, "T=200", arguments.repeats)
        show(f"epsilon {name}", report["epsilon_by_steps"][name], "T=200")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def show(title: str, measured: dict[str, Any], base: str) -> None:
    for name, entry in measured.items():
        s, r = entry["seconds"], entry[f"ratio_to_{base}"]
        sys.stdout.write(
            f"{title:23s} {name:34s} {entry['value']:10.4f}  {s['median']:8.4f} s "
            f"[{s['min']:.4f}-{s['max']:.4f}]"
            f"  ratio {r['median']:7.3f} [{r['min']:.3f}-{r['max']:.3f}]\n"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
