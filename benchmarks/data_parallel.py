"""Two processes with a thread each against one, in turns: private steps of a BERT-shaped encoder by
the same plan, and Opacus' ghost clipping on the same model, with batches of one size. Prints one
JSON object: seconds a step, and the ratio of each pair.

Run it on a machine with two free cores:

    python benchmarks/data_parallel.py --rounds 7
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from fully_sharded import Block
from meeting import meet
from opacus_ranks import OpacusSteps
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import Performance

VOCABULARY, LENGTH, RECORDS, PHYSICAL = 4096, 64, 4096, 16
BEFORE = 8  # releases that are not timed: the guard looks at the 1st, 2nd, 4th, 8th, 16th, ...


class Encoder(nn.Module):
    """Layers of a BERT's shape, out of parts that Opacus knows too, and a head for two classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words)).mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def private(model: nn.Module, settings: argparse.Namespace, rank: int, size: int) -> float:
    """Seconds a step."""
    plan = PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=settings.batch,
        steps=settings.steps + BEFORE,
        performance=Performance(max_physical_batch_size=PHYSICAL),
        seed=3,
        data_are_public=True,
    ).build(RECORDS)
    words = words_of()
    data = [{"x": words[i], "y": words[i, 0] % 2} for i in range(RECORDS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with plan.start() as run:
        started = 0.0
        for batch in run.loader(data, steps=settings.steps + BEFORE):
            if run.released == BEFORE:  # every rank looks: no share of a look is another's
                started = time.perf_counter()
            run.backward(model, loss, batch)
            optimizer.step()
    return (time.perf_counter() - started) / settings.steps


def opacus(model: nn.Module, settings: argparse.Namespace, rank: int, size: int) -> float:
    """Seconds a step, as many records a step on every process."""
    if size > 1:
        from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

        model = DifferentiallyPrivateDistributedDataParallel(model)
    share = settings.batch // size
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = OpacusSteps(model, optimizer, share, in_shards=False)
    words = words_of()[rank * share :]
    parts = [{"x": part, "y": part[:, 0] % 2} for part in words[:share].split(PHYSICAL)]
    started = 0.0
    for step in range(1 + settings.steps):
        if step == 1:
            started = time.perf_counter()
        steps.step(parts, loss)
    return (time.perf_counter() - started) / settings.steps


WAYS = {"quietgrad": private, "opacus": opacus}


def words_of() -> Tensor:
    source = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (RECORDS, LENGTH), generator=source)


def work(rank: int, size: int, way: str, folder: str, settings: argparse.Namespace) -> None:
    """Times a few steps on one of ``size`` ranks."""
    torch.set_num_threads(1)
    if size > 1:
        meet(rank, size, folder)
    torch.manual_seed(0)
    model = Encoder(settings.width, settings.layers)
    seconds = WAYS[way](model, settings, rank, size)
    if rank == 0:
        Path(folder, "seconds.txt").write_text(repr(seconds))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def seconds_of(way: str, size: int, settings: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            work, (size, way, folder, settings), nprocs=size, start_method="fork"
        )
        return float(Path(folder, "seconds.txt").read_text())


def told_of(pairs: list[tuple[float, float]]) -> dict[str, object]:
    ratios = sorted(one / two for one, two in pairs)
    return {
        "seconds_of_one": [round(one, 4) for one, _ in pairs],
        "seconds_of_two": [round(two, 4) for _, two in pairs],
        "times_as_fast": {
            "median": round(statistics.median(ratios), 3),
            "least": round(ratios[0], 3),
            "most": round(ratios[-1], 3),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    settings = parser.parse_args()
    pairs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(settings.rounds):
        for way, found in pairs.items():
            found.append((seconds_of(way, 1, settings), seconds_of(way, 2, settings)))
    print(
        json.dumps(
            {
                "settings": vars(settings),
                "torch": torch.__version__,
                "opacus": version("opacus"),
                "processors": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                **{way: told_of(found) for way, found in pairs.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
