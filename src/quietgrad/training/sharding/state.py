"""What a checkpoint holds is whole, whatever the number of processes that saved it; each of those
that go on from it takes its shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quietgrad.tensors import is_spread


def spread_as(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a tensor in a parameter's shape, where that is spread over ranks."""
    if not is_spread(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    # Every rank has the whole one, so nothing is sent.
    found: Tensor = distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    return found


def spread_optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """``Optimizer.state_dict()`` of whole parameters as that of this rank's shards."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def of(parameter: Tensor, value: Any) -> Any:
        alike = isinstance(value, Tensor) and value.shape == parameter.shape
        return spread_as(value, parameter) if alike else value

    spread = {
        index: {name: of(parameters[index], value) for name, value in held.items()}
        for index, held in state["state"].items()
        if index < len(parameters)
    }
    return {**state, "state": {**state["state"], **spread}}
