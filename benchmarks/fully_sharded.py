"""Private steps on a model sharded by ``fully_shard`` against the same steps without privacy, and
Opacus' ghost clipping on the same model in shards of its own kind, on two processes with a thread
each, in turns. Prints one JSON object: seconds and processor time a step, what a rank's memory is
at most above what it has at rest, and the ratios of each round to the steps without privacy. All
take as many records a step, as Poisson's batches have; ranks share them evenly, as a
loader's do that is not told its micro-batches' size. Guards do not look: of a longer run's steps
hardly any has a look.

At rest means after a first step, without gradients: what either way imports and keeps is there.
``first`` is the same for all steps, above what there was before the first one. Memory is taken once
of each, as it hardly moves, in runs of its own, in which the C library gives every freed tensor
back: else its peak is that of the allocator's holes.

Run it on a machine with two free cores (seconds mean little on a busy one; processor time, taken
from each pair, moves by some percent):

    python benchmarks/fully_sharded.py --rounds 5
    python benchmarks/fully_sharded.py --rounds 5 --width 512 --layers 2 --physical 40
    python benchmarks/fully_sharded.py --rounds 3 --batch 256 --width 1024 --layers 2 --physical 40
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from meeting import meet
from opacus_ranks import OpacusSteps, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from quietgrad import PrivacyConfig
from quietgrad.clipping import Performance, bound
from quietgrad.clipping.sharded import bound as sharded_bound
from quietgrad.clipping.soundness import guard
from quietgrad.plan import run as private_run

VOCABULARY, RECORDS, RANKS = 4096, 4096, 2
WITH_LOOKS: tuple[Any, ...] = (guard, bound, sharded_bound, private_run)
LIBC = ctypes.CDLL(None)
TRIM_THRESHOLD, MMAP_THRESHOLD, LARGE = -1, -3, 200_000  # of mallopt; bytes
WAYS = ("private", "plain", "opacus")
TIMES, MEMORY = ("seconds", "processor"), ("added", "first")
RATIOS = {
    "time": "seconds",
    "processor time": "processor",
    "added memory": "added",
    "added memory with the first step": "first",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.mix(self.first(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    logits = model(ids[:, :-1].contiguous())  # Opacus views it
    return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(dim=1)


def memory(field: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM at most so far."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


class Meter:
    """Of one rank: its memory from when it is made, and its time from ``start`` on."""

    def __init__(self) -> None:
        self._before = self._rest = _at_rest()
        self._first = 0.0
        self._started = (0.0, 0.0)

    def rest(self, optimizer: torch.optim.Optimizer) -> None:
        """After a first step."""
        self._first = memory("VmHWM") - self._before
        optimizer.zero_grad()
        self._rest = _at_rest()

    def start(self) -> None:
        dist.barrier()
        self._started = time.perf_counter(), time.process_time()

    def told(self, steps: int) -> dict[str, float]:
        seconds = (time.perf_counter() - self._started[0]) / steps
        processor = (time.process_time() - self._started[1]) / steps
        most = memory("VmHWM")
        return {
            "seconds": seconds,
            "processor": processor,
            "added": most - self._rest,
            "first": max(self._first, most - self._before),
        }


def _at_rest() -> float:
    """Resident memory, with what was freed given back; the peak begins anew."""
    gc.collect()
    LIBC.malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return memory("VmRSS")


def work(rank: int, way: str, exactly: bool, folder: str, settings: argparse.Namespace) -> None:
    """Times a few steps on one rank; or, ``exactly``, takes the peak of its memory."""
    torch.set_num_threads(1)
    if exactly:
        LIBC.mallopt(MMAP_THRESHOLD, LARGE)
        LIBC.mallopt(TRIM_THRESHOLD, LARGE)
    meet(rank, RANKS, folder)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = Decoder(settings.width, settings.layers)
    if way == "opacus":
        sharded(model)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (RECORDS, settings.length + 1), generator=source)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    told = STEPS[way](model, optimizer, ids, settings, rank)
    Path(folder, f"told{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def leave_out_looks() -> None:
    """In this process: of a longer run's steps hardly any has one."""
    for module in WITH_LOOKS:
        module.is_guarded = lambda step: False
    kind: Any = guard.Guard
    kind.begin, kind.has_begun = (lambda *given: None), (lambda *given: True)
    kind.is_due = kind.is_early = lambda *given, **named: False


def _private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    settings: argparse.Namespace,
    rank: int,
) -> dict[str, float]:
    plan = PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=settings.batch,
        steps=settings.steps + 1,
        clipping=replace(PrivacyConfig().clipping, estimator=settings.estimator),
        performance=Performance(max_physical_batch_size=settings.physical),
        seed=3,
        data_are_public=True,
    ).build(RECORDS)
    data = [{"ids": row} for row in ids]
    leave_out_looks()
    steps, meter = settings.steps + 1, Meter()
    rows: list[list[int]] = []

    def collate(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        rows[-1].append(len(records))
        return default_collate(records)

    with plan.start() as run:
        loader = run.loader(data, steps=steps, collate_fn=collate)
        for batch in loader:
            rows.append([])
            if run.released == 1:
                meter.rest(optimizer)
                meter.start()
            optimizer.zero_grad()
            run.backward(model, loss, batch)
            optimizer.step()
        told = meter.told(settings.steps)
    Path(settings.rows, f"{rank}.json").write_text(json.dumps(rows))
    return told


def _plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    settings: argparse.Namespace,
    rank: int,
) -> dict[str, float]:
    meter, share = Meter(), settings.batch // RANKS
    for step in range(settings.steps + 1):
        if step == 1:
            meter.rest(optimizer)
            meter.start()
        optimizer.zero_grad()
        for part in _parts(ids, step, settings, rank):
            (loss(model, part).sum() / share).backward()
        optimizer.step()
    return meter.told(settings.steps)


def _opacus(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    settings: argparse.Namespace,
    rank: int,
) -> dict[str, float]:
    meter = Meter()
    steps = OpacusSteps(model, optimizer, settings.batch // RANKS, in_shards=True)
    for step in range(settings.steps + 1):
        if step == 1:
            meter.rest(steps.optimizer)
            meter.start()
        steps.step(_parts(ids, step, settings, rank), loss)
    return meter.told(settings.steps)


STEPS = {"private": _private, "plain": _plain, "opacus": _opacus}


def _parts(
    ids: Tensor, step: int, settings: argparse.Namespace, rank: int
) -> list[dict[str, Tensor]]:
    """Half as many records as the private steps took on all ranks: here nobody waits for more."""
    found = [json.loads(Path(settings.rows, f"{r}.json").read_text()) for r in range(RANKS)]
    share = sum(sum(rows[step]) for rows in found) // RANKS
    return [{"ids": part} for part in ids[rank * share :][:share].split(settings.physical)]


def told_of(way: str, settings: argparse.Namespace, memory_too: bool) -> dict[str, float]:
    """Of the slower rank, and of the one that took more; processor time is the ranks' mean, since
    Poisson's batches give one of them more records."""
    found: dict[str, float] = {}
    for exactly, names in ((False, TIMES), (True, MEMORY))[: 1 + memory_too]:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(
                work, (way, exactly, folder, settings), nprocs=RANKS, start_method="fork"
            )
            told = [json.loads(Path(folder, f"told{r}.json").read_text()) for r in range(RANKS)]
        found |= {name: max(one[name] for one in told) for name in names}
        if not exactly:
            found["processor"] = statistics.mean(one["processor"] for one in told)
    return found


def ratios(rounds: list[dict[str, dict[str, float]]], way: str, name: str) -> dict[str, float]:
    known = [told for told in rounds if name in told[way]]
    found = sorted(told[way][name] / told["plain"][name] for told in known)
    return {
        "median": round(statistics.median(found), 3),
        "least": round(found[0], 3),
        "most": round(found[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--physical", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--estimator", default="exact")
    parser.add_argument("--without-opacus", action="store_true")
    parser.add_argument("--without-memory", action="store_true")
    settings = parser.parse_args()
    ways = WAYS[:-1] if settings.without_opacus else WAYS
    with tempfile.TemporaryDirectory() as settings.rows:
        rounds = [
            {
                way: told_of(way, settings, memory_too=n == 0 and not settings.without_memory)
                for way in ways
            }
            for n in range(settings.rounds)
        ]
    del settings.rows
    print(
        json.dumps(
            {
                "settings": vars(settings),
                "torch": torch.__version__,
                "opacus": version("opacus"),
                "processors": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "rounds": rounds,
                **{
                    f"{way}: {title}": ratios(rounds, way, name)
                    for way in ways
                    for title, name in RATIOS.items()
                    if way != "plain" and name in rounds[0][way]
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
