"""Real processes for tests: a function on every rank of a gloo group, and a small task to train."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plans import changed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world
from torch.multiprocessing.spawn import ProcessExitedException

from quietgrad.clipping.soundness.guard import Guard
from quietgrad.plan import PrivacyConfig, PrivacyPlan

RECORDS = 40
SECONDS = 60
CRASHES = 199  # the descriptor of a rank's file for what it did when its process broke down
DEEP = 60  # lines of it that are shown
CONFIG = PrivacyConfig(
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    expected_batch_size=10,
    steps=4,
    seed=7,
    data_are_public=True,
)


def plan_of(records: int = RECORDS, owner: list[int] | None = None, **changes: Any) -> PrivacyPlan:
    config = changed(CONFIG, **changes)
    return config.build(records) if owner is None else config.build(records, record_owner=owner)


def model_of(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def records_of(count: int = RECORDS, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(6, generator=source, dtype=torch.float64).to(dtype),
            "y": torch.randn(3, generator=source, dtype=torch.float64).to(dtype),
        }
        for _ in range(count)
    ]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum(dim=1)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors.values()])


def _enter(rank: int, size: int, folder: str, work: Callable[..., Any], extra: Any) -> None:
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    os.dup2(os.open(Path(folder, f"crash{rank}.txt"), os.O_CREAT | os.O_WRONLY), CRASHES)
    faulthandler.disable()  # Lightning puts signals back to what Python knew of: enabled, not there
    faulthandler.enable(CRASHES)
    try:
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/meeting",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=SECONDS),
            )
        found = work(rank, *extra)
        if size > 1:  # what is on its way to others arrives before this process ends
            with contextlib.suppress(RuntimeError, ValueError):  # no group any more
                dist.barrier()
    except Exception as error:
        Path(folder, f"traceback{rank}.txt").write_text(traceback.format_exc())
        found = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder, f"found{rank}.pt"))
    # No farewell: a rank that failed has left its place, and others do not wait for it.
    os._exit(0)


@contextlib.contextmanager
def without_looks() -> Iterator[None]:
    """Guards find nothing, and take no time: where what they look at is trained in other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "begin", lambda *given: None)
        patch.setattr(Guard, "examine", lambda *given: True)
        patch.setattr(Guard, "has_begun", lambda *given: True)
        for asked in ("is_due", "is_early"):
            patch.setattr(Guard, asked, lambda *given, **named: False)
        yield


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """One for all trainings of a process: its groups would stay."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextlib.contextmanager
def groups_of_its_own() -> Iterator[None]:
    """Groups that are made inside are gone afterwards, on all ranks.

    Each keeps threads that wake a hundred times a second: after twenty trainings four processes
    did little else.
    """
    if not dist.is_initialized():
        yield
        return
    before = set(_world.pg_map)
    yield
    dist.barrier()  # what is on its way to others arrives
    for group in [g for g in _world.pg_map if g not in before]:
        dist.destroy_process_group(group)


def on_ranks(size: int, folder: Path, work: Callable[..., Any], *extra: Any) -> list[Any]:
    """What ``work(rank, *extra)`` returns on each rank; the text of its exception where it failed.

    Forked, because a process that is spawned imports torch again. Where a rank's process
    breaks down (seen once, in the allocator, beside two hundred threads of gloo), a warning shows
    where it was, and all ranks start once more; the second time it is an error.
    """
    try:
        return _on_ranks(size, folder, work, extra)
    except ProcessExitedException as error:
        if error.signal_name not in ("SIGABRT", "SIGSEGV", "SIGBUS"):
            raise
        of = error.error_index
        stack = Path(folder, f"crash{of}.txt").read_text().splitlines()[:DEEP]
        warnings.warn("\n".join([f"rank {of} died of {error.signal_name}", *stack]), stacklevel=2)
    return _on_ranks(size, folder / "again", work, extra)


def _on_ranks(size: int, folder: Path, work: Callable[..., Any], extra: Any) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.start_processes(
        _enter, (size, str(folder), work, extra), nprocs=size, start_method="fork"
    )
    return [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(size)]
