"""What sums to owners and released values to all cost two processes, beside one all-reduce of as
many parameters, and drawing all noise on every process beside drawing an owner's part. Prints one
JSON object: milliseconds, medians and quartiles over rounds, on the slower process.

Run it on a machine with two free cores:

    python benchmarks/exchanges.py --rounds 21
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from meeting import meet

from quietgrad.distributed.exchange import gathered, owners_of, sums_of_owner
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.randomness import RandomKey

SIZE, SIDE = 2, 1024


def work(rank: int, folder: str, settings: argparse.Namespace) -> None:
    """Times every way a few times on one of the processes, in turns."""
    torch.set_num_threads(1)
    meet(rank, SIZE, folder)
    group = dist.group.WORLD
    sums = {f"layer {i}": torch.ones(SIDE, SIDE) for i in range(settings.matrices)}
    owner = owners_of({name: t.numel() for name, t in sums.items()}, SIZE)
    own = {name: t for name, t in sums.items() if owner[name] == rank}
    flat = torch.ones(sum(t.numel() for t in sums.values()))
    source, key = KeyedSource(), RandomKey(b"\1" * 32, True)

    def exchange() -> None:
        whole = sums_of_owner(sums, owner, rank, SIZE, group)
        gathered(whole, sums, owner, rank, SIZE, group)

    def draw(some: dict[str, torch.Tensor]) -> None:
        for name, like in some.items():
            source.normal(like, key, 0, name)

    ways: dict[str, Callable[[], object]] = {
        "exchanges": exchange,
        "all_reduce": lambda: dist.all_reduce(flat),
        "draw_own": lambda: draw(own),
        "draw_all": lambda: draw(sums),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(-2, settings.rounds):  # the first ones make buffers
        for way, run in ways.items():
            dist.barrier()
            started = time.perf_counter()
            run()
            if round_ >= 0:
                taken[way].append(1000 * (time.perf_counter() - started))
    found = [None] * SIZE
    dist.all_gather_object(found, taken)
    if rank == 0:
        Path(folder, "taken.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def told_of(rounds: list[float]) -> dict[str, float]:
    quarters = statistics.quantiles(rounds, n=4)
    return {
        name: round(value, 1)
        for name, value in zip(
            ("first_quartile", "median", "third_quartile"), quarters, strict=True
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--matrices", type=int, default=8, help="of a million entries each")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(work, (folder, settings), nprocs=SIZE, start_method="fork")
        taken = json.loads(Path(folder, "taken.json").read_text())
    slower = {way: [max(both) for both in zip(*(t[way] for t in taken))] for way in taken[0]}
    print(
        json.dumps(
            {
                "settings": vars(settings),
                "torch": torch.__version__,
                "processors": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "parameters": settings.matrices * SIDE**2,
                "milliseconds": {way: told_of(rounds) for way, rounds in slower.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
