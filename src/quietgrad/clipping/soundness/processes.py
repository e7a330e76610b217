"""Several processes that do not know of each other have no epsilon.

A run that was started under a process group is one run on all its ranks
(``quietgrad.distributed``). Everything else under such a group is refused: every
rank would clip its own batch, draw its own noise and count its own releases.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import torch.distributed as dist
from torch import nn

from quietgrad.clipping.capture.layout.modules import named_modules_of, named_parameters_of

REMEDY = (
    "start one run on all ranks (init_process_group first, then plan.start and run.backward, "
    "docs/many_processes.md), or run it in one process, started with python rather than torchrun"
)
# What launchers tell each process of a group of several: torchrun and accelerate, Open MPI, MPICH,
# MVAPICH, Horovod, jsrun, srun.
SIZES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "HOROVOD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
# Around a model or a part of it: torch's own that no clipper follows.
OTHERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
WRAPPERS = {*OTHERS, "FSDPModule"}
WHOLE = (
    "keep the whole model on every rank, plain or in DistributedDataParallel; models that are "
    "sharded by fully_shard are clipped by a run on all ranks alone (docs/many_processes.md)"
)


_PUBLIC: ContextVar[bool] = ContextVar("records that need no protection", default=False)


@contextlib.contextmanager
def on_public_records() -> Iterator[None]:
    """Inside, every rank may clip by itself: for checks and measurements on records that need no
    protection, before a run starts.
    """
    token = _PUBLIC.set(True)
    try:
        yield
    finally:
        _PUBLIC.reset(token)


def refuse_process_group() -> None:
    """Raises under an initialised process group of more than one rank.

    Raises:
        RuntimeError: with the remedy.
    """
    if _PUBLIC.get():
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"a torch.distributed process group of {dist.get_world_size()} ranks is initialised, "
            "and here every rank would clip, draw noise and count by itself: no epsilon covers "
            "that; "
            f"{REMEDY}"
        )


def refuse_launcher(environment: Mapping[str, str] | None = None, group_size: int = 1) -> None:
    """Raises in a process that a launcher started as one of more than the group has: each would
    run alone, on the same data, or each group by itself.

    Args:
        environment: of the process; None takes ``os.environ``.
        group_size: ranks of the initialised process group; 1 without one.

    Raises:
        RuntimeError: naming the variable, with the remedy.
    """
    known = os.environ if environment is None else environment
    for name in SIZES:
        if known.get(name, "").isdigit() and int(known[name]) > group_size:
            raise RuntimeError(
                f"{name}={known[name]} says that this is one of several processes, and the process "
                f"group has {group_size}; each would make its own run on the same data, and their "
                f"epsilons add: {REMEDY} (where it is alone, remove {name} from the environment)"
            )


def refuse_wrapped_model(model: nn.Module) -> None:
    """Raises for models that spread a batch or their parameters over devices or ranks.

    Raises:
        ValueError: naming the wrapper, with the remedy.
    """
    refuse_models_of(model, WRAPPERS)
    shared = next(
        (name for name, p in named_parameters_of(model) if type(p).__name__ == "DTensor"), None
    )
    if shared is not None:
        raise ValueError(
            f"parameter {shared!r} is spread over several ranks (a DTensor, of fully_shard or "
            f"tensor parallelism); {WHOLE}"
        )


def refuse_models_of(model: nn.Module, wrappers: set[str]) -> None:
    """Raises ValueError for models that are wrapped in one of these classes of torch's."""
    for name, module in named_modules_of(model):
        found = next(
            (
                kind.__name__
                for kind in type(module).__mro__
                if kind.__name__ in wrappers and _is_torchs(kind)
            ),
            None,
        )
        where = "the model" if not name else f"layer {name!r}"
        if found == "FullyShardedDataParallel":
            raise ValueError(
                f"{where} is wrapped in {found} (FSDP1), which makes one flat tensor of many "
                "parameters, without gradients of single records; shard the model by fully_shard "
                "(FSDP2, docs/fully_sharded.md), or keep it whole on every rank"
            )
        if found is not None:
            raise ValueError(
                f"{where} is wrapped in {found}, which "
                "spreads examples or parameters over devices and reduces gradients behind the "
                "clipping; "
                f"pass the model itself (its .module), and {WHOLE}"
            )


def _is_torchs(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "fairscale", "apex")
