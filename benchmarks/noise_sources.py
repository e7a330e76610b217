"""What a source of noise costs: one draw, and one release, of the secure source beside the ordinary
one, torch's own generator and a sum of four draws.

    python benchmarks/noise_sources.py [--parameters 8000000] [--rounds 9] [--output
    benchmarks/results/noise_sources.json]

Ways of drawing: "keyed" (the default), "secure" (AES-256, correctly rounded on a grid), "torch"
(torch.randn, a Mersenne Twister), and "torch, sum of four": what Opacus' secure_mode does with any
generator (four draws, added and halved; one more is drawn and thrown away first), here without a
cryptographic one, which cannot be installed for it any more.

All in one process and one thread, in turn, nanoseconds an entry: median, quartiles and the ratio to
"keyed" in the same round. The shares of doubtful and of slow entries are counted beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.events import SensitivityClaim
from quietgrad.noise import GaussianNoise, KeyedSource, PrefixSums, SecureSource, mixing_matrix
from quietgrad.noise import rounded_normal as exact
from quietgrad.noise.sources.grid import rounding_cost
from quietgrad.randomness import RandomKey

KEY = RandomKey.from_seed(0)
TENSORS = 8  # the parameters are cut into so many


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def work(parameters: int) -> dict[str, Callable[[], Any]]:
    like = {f"w{i}": torch.zeros(parameters // TENSORS) for i in range(TENSORS)}
    clipped = ClippedSum(like, SensitivityClaim(1.0))
    generator = torch.Generator().manual_seed(0)
    mixing = mixing_matrix(PrefixSums(16), 4).banded
    sources = {"keyed": KeyedSource(), "secure": SecureSource()}

    def four() -> None:
        for w in like.values():
            torch.randn(1, generator=generator)
            total = torch.zeros_like(w)
            for _ in range(4):
                total += torch.randn(w.shape, generator=generator)
            total /= 2

    ways: dict[str, Callable[[], Any]] = {
        f"draw: {name}": lambda source=source: [
            source.normal(w, KEY, 0, n) for n, w in like.items()
        ]  # type: ignore[misc]
        for name, source in sources.items()
    }
    ways["draw: torch"] = lambda: [torch.randn(w.shape, generator=generator) for w in like.values()]
    ways["draw: torch, sum of four"] = four
    for name, source in sources.items():
        independent = GaussianNoise(1.0, source=source)
        ways[f"release: {name}"] = lambda n=independent: n.update(clipped, lambda _: KEY, n.init())  # type: ignore[misc]
    for name, source in sources.items():
        banded = GaussianNoise(1.0, mixing, source=source)
        history = banded.replay(like, lambda step: KEY, 0, 6)
        ways[f"release, b = 4: {name}"] = lambda b=banded, h=history: b.update(
            clipped, lambda _: KEY, h
        )  # type: ignore[misc]
    return ways


def slow_share(entries: int) -> float:
    """Share of entries that need more bits than two words."""
    calls, right = 0, exact._certain

    def counted(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        return right(*arguments)

    exact._certain = counted
    try:
        SecureSource().entries(KEY, 1, "count", 0, entries)
    finally:
        exact._certain = right
    return calls / entries


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", default="benchmarks/results/noise_sources.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = work(options.parameters)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, run in ways.items():
            begun = time.process_time()  # not the time that other processes take
            run()
            taken[name].append((time.process_time() - begun) / options.parameters * 1e9)
    rows = []
    for name, nanoseconds in taken.items():
        base = taken[name.split(": ")[0] + ": keyed"]
        ratios = [a / b for a, b in zip(nanoseconds, base)]
        rows.append(
            {
                "way": name,
                "nanoseconds_an_entry": round(statistics.median(nanoseconds), 2),
                "quartiles": [round(q, 2) for q in statistics.quantiles(nanoseconds, n=4)[::2]],
                "over_keyed": round(statistics.median(ratios), 2),
                "over_keyed_quartiles": [
                    round(q, 2) for q in statistics.quantiles(ratios, n=4)[::2]
                ],
            }
        )
        print(
            f"{name:28} {rows[-1]['nanoseconds_an_entry']:7.1f} ns  {rows[-1]['over_keyed']:5.2f}"
        )
    found = {
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": version("numpy"),
            "cryptography": version("cryptography"),
            "processor": processor(),
            "vector": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        },
        "parameters": options.parameters,
        "rounds": options.rounds,
        "clock": "processor time of the process",
        "slow_share_of_entries": slow_share(4_000_000),
        "rounding_cost": {
            f"sigma 1, {entries:,} entries, b = {bands}": rounding_cost(
                1.0, entries, bands, SecureSource.grid
            )
            for entries in (22_700_000, 1_000_000_000)
            for bands in (1, 16)
        },
        "results": rows,
    }
    Path(options.output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
