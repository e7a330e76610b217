"""Which models with parameters spread over ranks can be clipped as cut ones: those of
``parallelize_module`` on one mesh over all ranks of the run. All others are refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from quietgrad.clipping.capture.cut import piece_of
from quietgrad.clipping.capture.spread import sharding_modules
from quietgrad.clipping.soundness.processes import refuse_models_of
from quietgrad.tensors import is_spread

REMEDY = (
    "cut the layers by parallelize_module alone, on a mesh of one dimension over all ranks of the "
    "run (docs/tensor_parallel.md)"
)
WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def is_cut(model: nn.Module) -> bool:
    """Whether parameters are spread over ranks, and not by ``fully_shard``."""
    return any(is_spread(p) for p in model.parameters()) and not sharding_modules(model)


def refuse_what_is_not_cut(model: nn.Module, ranks: int) -> None:
    """Raises for parameters that are spread in another way, and for what cannot be followed.

    Args:
        model: at rest.
        ranks: of the run.

    Raises:
        ValueError: naming the parameter or layer, with the remedy.
    """
    refuse_models_of(model, WRAPPERS)
    for name, parameter in model.named_parameters():
        if not is_spread(parameter):
            continue
        p: Any = parameter
        mesh = p.device_mesh
        how = f"parameter {name!r} is spread over ranks on a mesh of shape {tuple(mesh.shape)}"
        if mesh.ndim != 1:
            raise ValueError(
                f"{how}: tensor parallel together with fully_shard or with data parallel is not "
                f"supported; {REMEDY}"
            )
        if mesh.size() != ranks:
            raise ValueError(f"{how}, and the run has {ranks} ranks; {REMEDY}")
        if parameter.requires_grad:
            piece_of(parameter, name)
