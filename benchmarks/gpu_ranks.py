"""A private decoder on several GPUs, one process each, unattended: whether its releases are those
of one process, and what a step costs beside the same step without privacy.

    python benchmarks/gpu_ranks.py [--processes N] [--output benchmarks/results/gpu_ranks.json]
    python benchmarks/gpu_ranks.py --device cpu --processes 2 --tiny      (the same code, over gloo)

It takes all GPUs there are, over NCCL, and needs two. First a small decoder makes two releases in
float64, its whole copies on every process and sharded by ``fully_shard``; one process makes them by
itself. Reported are the largest differences, which are zero where all is well: kernels that add in
one order each time are asked for, and where torch has none, a difference of some 1e-12 is that
order's. Then a decoder of ``--width`` and ``--layers``, sharded, is timed in rounds of steps with
and without privacy, with bfloat16 in its passes: medians and ranges of the ratio of their times,
and the largest memory that torch had allocated on any device. Rounds in which the guard looks are
left out. Private batches are Poisson's, and have the others' size on average; they are read and
moved within the time that is taken, and the others' lie on the device.

Targets: no difference; at most 1.15 times the time and 1.15 times the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Products of cuBLAS that add in one order; read where the device is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from fully_sharded import Decoder, loss
from meeting import meet
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from quietgrad import PrivacyConfig
from quietgrad.clipping.soundness.guard import is_guarded

WAYS = ("copied", "sharded")
RECORDS, RELEASES = 4096, 2
BEFORE = 4  # private steps before time is taken: guards look at the 1st, 2nd, 4th, 8th, 16th
TARGETS = {"difference": 0.0, "time_ratio": 1.15, "memory_ratio": 1.15}


def plan_for(batch: int, steps: int) -> Any:
    return PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=batch,
        steps=steps,
        seed=3,
        data_are_public=True,
    ).build(RECORDS)


def records_of(length: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 4096, (RECORDS, length + 1), generator=source)
    return [{"ids": row} for row in ids]


def spread(model: nn.Module, device: str, **options: Any) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def loss_on(device: str) -> Any:
    """A loss of records that are read on the processor: one object for a whole run, since the guard
    looks at each new one.
    """

    def found(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss(model, {name: t.to(device) for name, t in batch.items()})

    return found


def releases(way: str, device: str) -> Tensor:
    """What is released in float64: [RELEASES, parameters] on the processor."""
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    torch.manual_seed(0)
    model = Decoder(32, 1).double().to(device)
    if way == "sharded":
        spread(model, device)
    found, per_example_loss = [], loss_on(device)
    with plan_for(16, RELEASES).start() as run:
        for batch in run.loader(records_of(16), steps=RELEASES, physical_batch_size=4):
            released = run.backward(model, per_example_loss, batch).gradients.values()
            whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in released]
            found.append(torch.cat([t.reshape(-1).cpu() for t in whole]))
            model.zero_grad()
    torch.use_deterministic_algorithms(False)
    return torch.stack(found)


def timed(device: str, settings: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step, and bytes, of rounds: ``steps`` private ones, then as many without."""
    torch.manual_seed(0)
    half = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    model = spread(Decoder(settings.width, settings.layers).to(device), device, **half)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    share, steps = settings.batch // dist.get_world_size(), settings.steps
    records, per_example_loss = records_of(settings.length), loss_on(device)
    own = torch.stack([record["ids"] for record in records[:share]]).to(device)
    told: dict[str, list[float]] = {"private": [], "plain": [], "private bytes": [], "bytes": []}
    total = BEFORE + settings.rounds * steps
    with plan_for(settings.batch, total).start() as run:
        loader = run.loader(records, steps=total, physical_batch_size=settings.physical)
        clock = Clock(device)
        for batch in loader:
            if run.released >= BEFORE and (run.released - BEFORE) % steps == 0:
                clock.start()
            run.backward(model, per_example_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
            if run.released > BEFORE and (run.released - BEFORE) % steps == 0:
                if any(is_guarded(run.released - 1 - step) for step in range(steps)):
                    continue
                _keep(told, "private", "private bytes", clock.told(steps))
                clock.start()
                for _ in range(steps):
                    for part in own.split(settings.physical):
                        (loss(model, {"ids": part}).sum() / share).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                _keep(told, "plain", "bytes", clock.told(steps))
    return told


def _keep(told: dict[str, list[float]], seconds: str, memory: str, new: tuple[float, int]) -> None:
    told[seconds].append(new[0])
    told[memory].append(new[1])


class Clock:
    """Time and the largest memory since ``start``, when all that was begun is done."""

    def __init__(self, device: str) -> None:
        self._gpu = device == "cuda"
        self._started = 0.0

    def start(self) -> None:
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        self._started = time.perf_counter()

    def told(self, steps: int) -> tuple[float, int]:
        if self._gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - self._started) / steps
        return seconds, torch.cuda.max_memory_allocated() if self._gpu else 0


def work(rank: int, folder: str, settings: argparse.Namespace) -> None:
    device = settings.device
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    meet(rank, settings.processes, folder, backend)
    found: dict[str, Any] = {way: releases(way, device) for way in WAYS}
    found["timed"] = timed(device, settings)
    torch.save(found, Path(folder, f"found{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def alone(rank: int, folder: str, device: str) -> None:
    torch.save(releases("copied", device), Path(folder, "alone.pt"))


def summary(folder: str, settings: argparse.Namespace) -> dict[str, Any]:
    one = torch.load(Path(folder, "alone.pt"))
    ranks = [torch.load(Path(folder, f"found{r}.pt")) for r in range(settings.processes)]
    told = [rank["timed"] for rank in ranks]
    slowest = {
        name: [max(v) for v in zip(*(t[name] for t in told), strict=True)] for name in told[0]
    }
    ratios = sorted(a / b for a, b in zip(slowest["private"], slowest["plain"], strict=True))
    most = max(slowest["private bytes"]), max(slowest["bytes"])
    return {
        "difference": {
            way: max(float((rank[way] - one).abs().max()) for rank in ranks) for way in WAYS
        },
        "seconds": {name: slowest[name] for name in ("private", "plain")},
        "time_ratio": {
            "median": round(statistics.median(ratios), 3),
            "least": round(ratios[0], 3),
            "most": round(ratios[-1], 3),
        },
        "memory": dict(zip(("private", "plain"), most, strict=True)),
        "memory_ratio": round(most[0] / most[1], 3) if most[1] else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--processes", type=int, default=0, help="all GPUs, where left out")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--physical", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="a small model, two rounds")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    settings.processes = settings.processes or torch.cuda.device_count()
    if settings.processes < 2:
        sys.exit("two GPUs are needed; or give --device cpu --processes 2")
    if settings.tiny:
        small = {"width": 64, "layers": 2, "length": 16, "physical": 8, "batch": 32}
        vars(settings).update(small, rounds=2, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(alone, (folder, settings.device), nprocs=1)
        multiprocessing.spawn(work, (folder, settings), nprocs=settings.processes)
        found = summary(folder, settings)
    told = {
        "settings": {k: v for k, v in vars(settings).items() if k != "output"},
        "targets": TARGETS,
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "device": torch.cuda.get_device_name() if settings.device == "cuda" else "processor",
        },
    } | found
    tell(json.dumps(told, indent=1), settings.output)


def tell(text: str, output: Path | None) -> None:
    """Printed first: a file that cannot be written loses nothing."""
    print(text, flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
