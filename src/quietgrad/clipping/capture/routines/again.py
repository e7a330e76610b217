"""The maps of a call that was captured as a whole, found by running its module once more.

One example's gradient is plain autograd's, whatever runs: its module runs as it is. Its spread must
be that of several examples all the same, where such modules are captured map by map.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from quietgrad.clipping.capture.capture import Recording, Use
from quietgrad.clipping.capture.fallback import refuse_randomness
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.capture.routines.opening import opens, routines_opened


def maps_of(use: Use, rows: int) -> list[Use]:
    """The uses that the call is made of; none where its routine is not known, or was not opened.
    No gradient of a parameter is formed. Cost: a forward and a backward pass of the module.

    Args:
        use: the call; the hooks of its pass rest.
        rows: of the batch.

    Raises:
        ValueError: if the module draws random numbers.
    """
    module, site = use.site.module, use.site
    packed = any(isinstance(x, PackedSequence) for x in use.args)
    if site.rule is not None or not opens(module) or packed:
        return []
    refuse_randomness(use)
    found: list[Use] = []
    like = next(iter(use.output_gradients.values()))
    root = torch.zeros((), device=like.device, requires_grad=True)
    recording = Recording(root, found.append)
    args, kwargs = _ones_of_one_memory((use.args, use.kwargs))
    again = contextlib.nullcontext() if use.autocast is None else use.autocast.again()
    with torch.enable_grad(), again, routines_opened(Layout((site,), {}), rows, recording):
        outputs = pytree.tree_leaves(module(*args, **kwargs))
    if site.name not in recording.opened:
        return []
    recording.in_forward = False
    places = sorted(use.output_gradients)
    seeds = [use.output_gradients[place] for place in places]
    torch.autograd.grad([outputs[place] for place in places], [root], seeds, allow_unused=True)
    return found


def _ones_of_one_memory(given: Any) -> Any:
    """With one tensor where several are the same memory: attention to itself is told by that."""
    known: dict[object, Tensor] = {}

    def one(x: Tensor) -> Tensor:
        return known.setdefault((x.data_ptr(), x.shape, x.stride(), x.dtype), x)

    return pytree.tree_map_only(Tensor, one, given)
