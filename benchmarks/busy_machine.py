"""Steps beside another process that keeps one processor busy: what waits for what?

    python benchmarks/busy_machine.py [--rounds 7] [--regimes bert-32] [--methods quietgrad
    opacus-ghost] [--output benchmarks/results/busy_machine.json]

Torch's threads of one product wait for each other, and a thread that waits spins: it keeps the
processor that the other one needs, until the system takes it away, which takes milliseconds. Two
variables of the environment, read when torch is loaded, change that: with
``OMP_WAIT_POLICY=passive`` who waits sleeps at once, with ``GOMP_SPINCOUNT=10000`` after some
microseconds, in which small products of an undisturbed machine are done.

Every method of ``clipping_peers.py`` that is asked for, and the step without privacy, runs in a
process of its own in each of these ways, on a machine that is left alone and beside a process that
computes all the time. The processes take a step each in turn. Reported are seconds (median and
range over rounds) and ratios to the step without privacy of the same round, way and load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from clipping_peers import METHODS, PACKAGES, REGIMES, installed
from turns import Worker

HERE = Path(__file__).resolve().parent
WAYS: dict[str, dict[str, str]] = {
    "by itself": {},
    "short": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
OF_THREADS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
LOADS = {"alone": 0, "beside another process": 1}


@contextlib.contextmanager
def others(processes: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def workers_of(regime: str, methods: list[str]) -> dict[tuple[str, str], Worker]:
    """(way, method) -> a process that takes its steps."""
    found: dict[tuple[str, str], Worker] = {}
    for way, values in WAYS.items():
        environment = {k: v for k, v in os.environ.items() if k not in OF_THREADS} | values
        for method in methods:
            script = HERE / "clipping_peers.py"
            found[way, method] = Worker(regime, method, script, environment)
    return found


def step(worker: Worker) -> float:
    seconds = worker.step()
    if seconds is None:
        raise SystemExit(worker.error)
    return seconds


def measure(regime: str, methods: list[str], rounds: int) -> dict[str, Any]:
    workers = workers_of(regime, methods)
    report: dict[str, Any] = {"rounds": rounds}
    try:
        for worker in workers.values():
            for _ in range(3):  # the first steps trace, check and fill caches
                step(worker)
        for load, processes in LOADS.items():
            with others(processes):
                taken = [{key: step(one) for key, one in workers.items()} for _ in range(rounds)]
            report[load] = {
                way: {method: summary(taken, way, method) for method in methods} for way in WAYS
            }
    finally:
        for worker in workers.values():
            worker.end()
    return report


def summary(taken: list[dict[tuple[str, str], float]], way: str, method: str) -> dict[str, float]:
    seconds = [one[way, method] for one in taken]
    ratios = [one[way, method] / one[way, "non-private"] for one in taken]
    return {
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--regimes", nargs="+", default=["bert-32"], choices=list(REGIMES))
    parser.add_argument(
        "--methods", nargs="+", default=["quietgrad", "opacus-ghost"], choices=list(METHODS)
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "busy_machine.json")
    arguments = parser.parse_args()
    methods = ["non-private", *(m for m in arguments.methods if m != "non-private")]
    report: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            **{name: installed(name) for name in PACKAGES},
        },
        "load_at_start": round(os.getloadavg()[0], 2),
        "regimes": {},
    }
    for regime in arguments.regimes:
        report["regimes"][regime] = measure(regime, methods, arguments.rounds)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for load in LOADS:
            for way, rows in report["regimes"][regime][load].items():
                for method, row in rows.items():
                    print(
                        f"{regime:10s} {load:23s} {way:9s} {method:16s} "
                        f"{row['seconds']:6.2f} s [{row['seconds_min']:.2f}-"
                        f"{row['seconds_max']:.2f}]  ratio {row['ratio']:.2f} "
                        f"[{row['ratio_min']:.2f}-{row['ratio_max']:.2f}]"
                    )


if __name__ == "__main__":
    main()
