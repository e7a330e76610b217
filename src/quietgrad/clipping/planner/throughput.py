"""How fast a device multiplies and moves data: measured once per device and process, in a few
milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import torch

from quietgrad.clipping.norms.cost import Throughput


@lru_cache(maxsize=8)
def measured_throughput(device: str) -> Throughput:
    """Speeds of ``device`` ("cpu", "cuda:0"), measured on random data; the same object for the rest
    of the process.
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    side = 4096 if on_gpu else 768
    square = torch.randn(side, side, device=where)
    small = torch.randn(64, 128, 256, device=where)
    vector = torch.randn(64 * 1024 * 1024 if on_gpu else 4 * 1024 * 1024, device=where)
    few = torch.randn(64, side, device=where)
    with torch.no_grad():
        large = side**3 / _seconds(lambda: square @ square, where)
        batched = small.numel() * 128 / _seconds(lambda: small @ small.transpose(1, 2), where)
        moved = 3 * vector.numel() / _seconds(lambda: vector.add(vector), where)
        slow = few.numel() * side / _seconds(lambda: few @ square, where)
    # speed(r) = full r / (r + half) at r = 64 rows
    half = min(max(64 * (large / slow - 1.0), 1.0), 65536.0)
    return Throughput(large, min(batched, large), moved, 1e-5 if on_gpu else 2e-5, half)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Best of a few runs, after one that does not count."""
    best = float("inf")
    for i in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if i:
            best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)
