"""What the guard's looks at model and loss cost, in steps of clipping: the first one, and a later
one.

    python benchmarks/guard_cost.py [--regimes bert-32 ...] [--repeats 5] [--output
    benchmarks/results/guard_cost.json]

Regimes are those of ``clipping_peers.py``. Guarded releases are the 1st, 2nd, 4th, 8th, ... and
every 512th, so the share of a run's time follows from one look's; it is printed for runs of 1000
and 10 000 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from clipping_peers import REGIMES, build, per_example_loss

from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.guard import is_guarded

STEP, NOT_GUARDED = 1, 2


def measure(regime: str, repeats: int) -> dict[str, float]:
    """Medians over repeats."""
    model, batch = build(regime)
    plain, firsts, laters = [], [], []
    for _ in range(repeats):
        bound = Clipper(1.0).bind(model, per_example_loss)
        firsts.append(seconds(lambda bound=bound: bound.clip(batch, step=0)))
        bound.clip(batch, step=NOT_GUARDED)
        plain.append(seconds(lambda bound=bound: bound.clip(batch, step=NOT_GUARDED)))
        laters.append(seconds(lambda bound=bound: bound.clip(batch, step=STEP)))
    step = statistics.median(plain)
    first, later = (statistics.median(some) / step - 1.0 for some in (firsts, laters))
    shares = {}
    for steps in (1000, 10_000):
        looks = sum(is_guarded(t) for t in range(steps))
        shares[f"share_of_{steps}_steps"] = (first + (looks - 1) * later) / steps
    return {
        "step_seconds": step,
        "first_look_in_steps": first,
        "later_look_in_steps": later,
        **shares,
    }


def seconds(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--regimes",
        nargs="+",
        default=["bert-32", "llama-512", "resnet18-gn", "llama-lora"],
        choices=list(REGIMES),
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/guard_cost.json"))
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "regimes": {},
    }
    for regime in arguments.regimes:
        entry = report["regimes"][regime] = measure(regime, arguments.repeats)
        print(
            f"{regime:12s} " + "  ".join(f"{key} {value:.3g}" for key, value in entry.items()),
            flush=True,
        )
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
