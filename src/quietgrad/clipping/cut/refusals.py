"""Which models with parameters spread over ranks can be clipped as cut ones: those of
``parallelize_module`` over the ranks of the run that share records, alone or with ``fully_shard``
over the others. All others are refused by name.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from quietgrad.clipping.capture.cut import piece_of
from quietgrad.clipping.capture.spread import TOO_OLD, sharding_modules
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.soundness.processes import OTHERS, refuse_models_of
from quietgrad.tensors import axis_of, block_of, is_spread

REMEDY = (
    "cut the layers by parallelize_module over the ranks that share records: with W ranks and "
    "tensor_parallel=T, mesh = init_device_mesh(device, (W // T, T), mesh_dim_names=('dp', 'tp')) "
    "and parallelize_module(model, mesh['tp'], plan), then, where rows are to be sharded too, "
    "fully_shard(..., mesh=mesh['dp']) (docs/tensor_parallel.md)"
)


def is_cut(model: nn.Module) -> bool:
    """Whether parameters are spread over ranks, and not by ``fully_shard``."""
    return any(is_spread(p) for p in model.parameters()) and not sharding_modules(model)


def is_cut_and_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` shards parameters that are cut over other ranks. (Where it copies
    them over other ranks, hybrid sharding, the first dimension of the mesh has copies.)
    """
    spread: list[Any] = [p for p in model.parameters() if is_spread(p)]
    return bool(sharding_modules(model)) and any(
        p.device_mesh.ndim > 1 and not p.placements[0].is_replicate() for p in spread
    )


def refuse_what_is_not_cut(model: nn.Module, ranks: tuple[int, ...]) -> None:
    """Raises for parameters that are spread in another way, and for what cannot be followed.

    Args:
        model: at rest.
        ranks: of the process group, those that share records.

    Raises:
        ValueError: naming the parameter or layer, with the remedy.
    """
    refuse_models_of(model, {*OTHERS, "FSDPModule"})
    for name, parameter in model.named_parameters():
        if not is_spread(parameter):
            continue
        p: Any = parameter
        _require_axes(p, name, (ranks,))
        if p.device_mesh.ndim != 1:
            raise ValueError(f"{_how(p, name)}, and is not sharded by fully_shard; {REMEDY}")
        if parameter.requires_grad:
            piece_of(parameter, name, ranks)


def refuse_what_is_not_cut_and_sharded(model: nn.Module, company: CutCompany) -> None:
    """The same for a model that ``fully_shard`` shards beside the cut."""
    refuse_models_of(model, OTHERS)
    gathering = sharding_modules(model)
    if any(not hasattr(module, "reset_iter_state") for module in gathering):
        raise ValueError(TOO_OLD)
    gathered = {id(p) for module in gathering for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not is_spread(parameter):
            continue
        p: Any = parameter
        how = _how(p, name)
        _require_axes(p, name, (company.across, company.ranks))
        axis = axis_of(p, company.across)
        if id(parameter) not in gathered or axis is None:
            raise ValueError(
                f"{how}, and not sharded by fully_shard, as others are; give fully_shard the whole "
                f"model at last. {REMEDY}"
            )
        placement = p.placements[axis]
        if placement.is_replicate() or placement.dim != 0:
            raise ValueError(
                f"{how}: another dimension than the first (shard_placement_fn) is not supported; "
                f"{REMEDY}"
            )
        if p.to_local().device.type != p.device_mesh.device_type:
            raise ValueError(
                f"parameter {name!r} waits on another device than the model's (CPUOffloadPolicy), "
                "which is not supported; use fully_shard without offload_policy"
            )
        if parameter.requires_grad:
            piece_of(parameter, name, company.ranks)
            block_of(parameter)


def _how(p: Any, name: str) -> str:
    return (
        f"parameter {name!r} is spread over ranks as {tuple(p.placements)} on a mesh of shape "
        f"{tuple(p.device_mesh.shape)}"
    )


def _require_axes(p: Any, name: str, known: tuple[tuple[int, ...], ...]) -> None:
    """That each dimension of the mesh is over known ranks, in their order."""
    mesh = p.device_mesh
    for axis in range(mesh.ndim):
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
        if ranks not in known or ranks[mesh.get_local_rank(axis)] != dist.get_rank():
            raise ValueError(
                f"{_how(p, name)} over ranks {list(ranks)}, and the run has "
                f"{dist.get_world_size()} ranks, of which {list(known[-1])} share this one's "
                f"records; {REMEDY}"
            )
