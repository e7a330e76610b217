"""Two processes with a thread each against one, in turns: private steps of a BERT-shaped encoder by
the same plan. Prints one JSON object: seconds a step, and the ratio of each pair.

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
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from meeting import meet
from torch import Tensor, nn

from quietgrad import PrivacyConfig

VOCABULARY, LENGTH, RECORDS = 4096, 64, 4096
BEFORE = 8  # releases that are not timed: the guard looks at the 1st, 2nd, 4th, 8th, 16th, ...


class Encoder(nn.Module):
    """Layers of a BERT's shape, and a head for two classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.layers(self.words(words)).mean(dim=1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def work(rank: int, size: int, folder: str, settings: argparse.Namespace) -> None:
    """Times a few steps on one of ``size`` ranks."""
    torch.set_num_threads(1)
    if size > 1:
        meet(rank, size, folder)
    torch.manual_seed(0)
    model = Encoder(settings.width, settings.layers)
    source = torch.Generator().manual_seed(1)
    words = torch.randint(0, VOCABULARY, (RECORDS, LENGTH), generator=source)
    data = [{"x": words[i], "y": words[i, 0] % 2} for i in range(RECORDS)]
    plan = PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=settings.batch,
        steps=settings.steps + BEFORE,
        seed=3,
        data_are_public=True,
    ).build(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with plan.start() as run:
        started = 0.0
        for batch in run.loader(data, steps=settings.steps + BEFORE, physical_batch_size=16):
            if run.released == BEFORE:  # every rank looks: no share of a look is another's
                started = time.perf_counter()
            run.backward(model, loss, batch)
            optimizer.step()
        seconds = (time.perf_counter() - started) / settings.steps
    if rank == 0:
        Path(folder, "seconds.txt").write_text(repr(seconds))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def seconds_of(size: int, settings: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            work, (size, folder, settings), nprocs=size, start_method="fork"
        )
        return float(Path(folder, "seconds.txt").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    settings = parser.parse_args()
    pairs = [(seconds_of(1, settings), seconds_of(2, settings)) for _ in range(settings.rounds)]
    ratios = sorted(one / two for one, two in pairs)
    print(
        json.dumps(
            {
                "settings": vars(settings),
                "torch": torch.__version__,
                "processors": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "seconds_of_one": [round(one, 4) for one, _ in pairs],
                "seconds_of_two": [round(two, 4) for _, two in pairs],
                "times_as_fast": {
                    "median": round(statistics.median(ratios), 3),
                    "least": round(ratios[0], 3),
                    "most": round(ratios[-1], 3),
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
