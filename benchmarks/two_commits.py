"""Clipping of this checkout against another checkout of the project, a step each in turn: did a
change cost time?

    git worktree add ../before COMMIT
    python benchmarks/two_commits.py ../before [--rounds 25] [--launches 3] [--regimes bert-32 ...]
                                     [--methods quietgrad quietgrad-hutch]
                                     [--output benchmarks/results/two_commits.json]

Both sides run ``benchmarks/clipping_peers.py`` of their own checkout with their own sources, each
in a process that lives through all rounds. A round takes one step of each, and of the non-private
step, in an order drawn anew. Reported are ratios to the non-private step of the same round, and the
paired ratio of the two sides: medians and quartiles over rounds. Two processes of the same code
differ by several per cent for as long as they live, by where their memory happens to lie: so all
three are launched anew several times, and the difference is the median over launches. Regimes and
methods are those of ``clipping_peers.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from clipping_peers import REGIMES
from turns import Worker

HERE = Path(__file__).resolve().parent.parent


def side(checkout: Path, regime: str, method: str) -> Worker:
    """A process that takes steps with the sources of one checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    return Worker(
        regime,
        method,
        script=checkout / "benchmarks" / "clipping_peers.py",
        environment=environment,
    )


def commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def measure(before: Path, regime: str, method: str, rounds: int, launches: int) -> dict[str, Any]:
    """Of several launches: quartiles over all their rounds, and the median difference."""
    each = [launched(before, regime, method, rounds) for _ in range(launches)]
    differences = [difference_of_medians(one) for one in each]
    base, old, new = (
        [taken for one in each for taken in one[name]] for name in ("non-private", "before", "now")
    )
    return {
        "rounds": rounds,
        "launches": launches,
        "seconds_non_private": statistics.median(base),
        "before": quartiles([b / a for a, b in zip(base, old)]),
        "now": quartiles([b / a for a, b in zip(base, new)]),
        "now_over_before": quartiles([b / a for a, b in zip(old, new)]),
        "difference_of_medians": statistics.median(differences),
        "differences_of_launches": [round(one, 4) for one in differences],
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def difference_of_medians(seconds: dict[str, list[float]]) -> float:
    """In steps without privacy."""
    base, old, new = (statistics.median(seconds[name]) for name in ("non-private", "before", "now"))
    return (new - old) / base


def launched(before: Path, regime: str, method: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step each, round by round, of three new processes."""
    workers = {
        "non-private": side(HERE, regime, "non-private"),
        "before": side(before, regime, method),
        "now": side(HERE, regime, method),
    }
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    order = list(workers)
    shuffled = random.Random(0)
    try:
        for round_ in range(-3, rounds):  # the first steps trace, check and fill caches
            shuffled.shuffle(order)
            for name in order:
                taken = workers[name].step()
                if taken is None:
                    raise SystemExit(f"{regime}, {method}, {name}: {workers[name].error}")
                if round_ >= 0:
                    seconds[name].append(taken)
    finally:
        for worker in workers.values():
            worker.end()
    return seconds


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower": low, "upper": high}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=25, help="of a launch")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--methods", nargs="+", default=["quietgrad", "quietgrad-hutch"])
    parser.add_argument("--output", type=Path, default=HERE / "benchmarks/results/two_commits.json")
    arguments = parser.parse_args()
    before = arguments.before.resolve()
    report: dict[str, Any] = {
        "before": commit_of(before),
        "now": commit_of(HERE),
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "regimes": {},
    }
    for regime in arguments.regimes:
        for method in arguments.methods:
            entry = measure(before, regime, method, arguments.rounds, arguments.launches)
            report["regimes"].setdefault(regime, {})[method] = entry
            arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            old, new = entry["before"], entry["now"]
            print(
                f"{regime:12s} {method:16s} before {old['median']:.3f} "
                f"[{old['lower']:.3f}-{old['upper']:.3f}]  "
                f"now {new['median']:.3f} [{new['lower']:.3f}-{new['upper']:.3f}]  "
                f"now/before {entry['now_over_before']['median']:.3f}  "
                f"difference {entry['difference_of_medians']:+.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
