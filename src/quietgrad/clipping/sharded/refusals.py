"""Which models with parameters spread over ranks can be clipped: those of ``fully_shard`` on one
mesh over all ranks of the run. All others are refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from quietgrad.clipping.capture.spread import TOO_OLD, sharding_modules
from quietgrad.clipping.soundness.processes import OTHERS, refuse_models_of
from quietgrad.tensors import is_spread

REMEDY = (
    "shard the model by fully_shard alone, on one mesh over all ranks, or keep it whole on every "
    "rank (docs/many_processes.md)"
)


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether a parameter of the model is spread over ranks."""
    return any(is_spread(p) for p in model.parameters())


def refuse_what_is_not_fully_sharded(model: nn.Module, ranks: int) -> None:
    """Raises for parameters that are spread in another way, and for what cannot be followed.

    Args:
        model: at rest.
        ranks: of the run.

    Raises:
        ValueError: naming the parameter or layer, with the remedy.
    """
    refuse_models_of(model, OTHERS)
    gathering = sharding_modules(model)
    if any(not hasattr(module, "reset_iter_state") for module in gathering):
        raise ValueError(TOO_OLD)
    gathered = {id(p) for module in gathering for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not is_spread(parameter):
            continue
        p: Any = parameter
        mesh, placements = p.device_mesh, tuple(p.placements)
        how = f"parameter {name!r} is spread over ranks as {placements} on a mesh {mesh.shape}"
        if id(parameter) not in gathered:
            raise ValueError(
                f"{how}, but not by fully_shard, as others are; where layers are cut over other "
                "ranks, give the whole model to fully_shard, and tensor_parallel to plan.start "
                f"(docs/tensor_parallel.md); otherwise {REMEDY}"
            )
        if mesh.ndim != 1 or len(placements) != 1:
            raise ValueError(f"{how}: hybrid sharding is not supported; {REMEDY}")
        placement = placements[0]
        if not placement.is_shard() or placement.dim != 0:
            raise ValueError(
                f"{how}: another dimension than the first (shard_placement_fn) is not supported; "
                f"{REMEDY}"
            )
        if mesh.size() != ranks:
            raise ValueError(f"{how}, and the run has {ranks} ranks; {REMEDY}")
        if p.to_local().device.type != mesh.device_type:
            raise ValueError(
                f"parameter {name!r} waits on another device than the model's (CPUOffloadPolicy), "
                "which is not supported; use fully_shard without offload_policy"
            )
