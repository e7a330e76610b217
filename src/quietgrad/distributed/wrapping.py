"""The model inside torch's DistributedDataParallel.

Its wrapper reduces ordinary gradients, and broadcasts buffers, from hooks of its own forward and
backward pass. Here neither happens: records are clipped on the model inside, whose parameters are
the wrapper's, and the mean of the release is written to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def model_inside(model: nn.Module) -> nn.Module:
    """What a DistributedDataParallel wraps; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def unused(model: nn.Module) -> Iterator[None]:
    """Inside, the wrapper itself is not to be called: a loss that holds on to it would start
    collective operations, which ranks with fewer records never reach.

    Raises:
        ValueError: at such a call, with the remedy.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return

    def refuse(module: nn.Module, arguments: Any) -> NoReturn:
        raise ValueError(
            "the loss calls the DistributedDataParallel wrapper, whose forward pass waits for "
            "other ranks; call the model that the loss is given: per_example_loss(model, batch)"
        )

    hook = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
