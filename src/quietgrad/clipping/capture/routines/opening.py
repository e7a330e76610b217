"""Which routines are opened, and how: inside a module's own forward pass, a function mode answers
the one call of the fused routine.

The module's forward pass runs as it is, with its checks and layouts. What is not known here runs
as it is too, and goes through the fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from quietgrad.clipping.capture.capture import Recording, is_off
from quietgrad.clipping.capture.layout import Layout, Site
from quietgrad.clipping.capture.routines.attention import attention
from quietgrad.clipping.capture.routines.bags import embedding_bag
from quietgrad.clipping.capture.routines.maps import Maps
from quietgrad.clipping.capture.routines.recurrent import recurrent
from quietgrad.tensors import plain_type

Answer = Callable[[Maps, PackedSequence | None, tuple[Any, ...], dict[str, Any]], Any]


def _recurrent(name: str) -> Answer:
    return lambda maps, packed, args, kwargs: (
        None if kwargs else recurrent(name, maps, packed, args)
    )


# Module -> the routines that its forward pass calls -> what answers them, or None where that is not
# known.
ROUTINES: dict[type[nn.Module], dict[Any, Answer]] = {
    nn.LSTM: {torch.lstm: _recurrent("lstm")},
    nn.GRU: {torch.gru: _recurrent("gru")},
    nn.RNN: {torch.rnn_tanh: _recurrent("rnn_tanh"), torch.rnn_relu: _recurrent("rnn_relu")},
    nn.MultiheadAttention: {
        F.multi_head_attention_forward: lambda maps, packed, args, kwargs: attention(
            maps, *args, **kwargs
        )
    },
    nn.EmbeddingBag: {
        F.embedding_bag: lambda maps, packed, args, kwargs: embedding_bag(maps, *args, **kwargs)
    },
}


def opens(module: nn.Module) -> bool:
    """Whether a module calls a routine that is opened, and has torch's own forward pass."""
    return plain_type(module) in ROUTINES and "forward" not in vars(module)


@contextmanager
def routines_opened(layout: Layout, examples: int, recording: Recording) -> Iterator[None]:
    """Calls of such modules inside the block are captured map by map. On exit nothing is left."""
    sites = [site for site in layout.sites if site.rule is None and opens(site.module)]
    try:
        for site in sites:
            own = site.module.forward
            site.module.forward = functools.partial(_forward, own, site, examples, recording)
        yield
    finally:
        for site in sites:
            vars(site.module).pop("forward", None)


def _forward(
    own: Callable[..., Any],
    site: Site,
    examples: int,
    recording: Recording,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    recording.opened.discard(site.name)
    device = next(site.module.parameters()).device.type
    if is_off(recording) or torch.is_autocast_enabled(device):
        return own(*args, **kwargs)
    with _Opened(site, examples, recording, args[0] if args else kwargs.get("input")):
        return own(*args, **kwargs)


class _Opened(TorchFunctionMode):
    def __init__(self, site: Site, examples: int, recording: Recording, first: Any) -> None:
        super().__init__()
        names = {id(p): name for name, p in site.module.named_parameters(remove_duplicate=False)}
        self.maps = Maps(site, recording, examples, names)
        self.packed = first if isinstance(first, PackedSequence) else None
        self.routines = ROUTINES[plain_type(site.module)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = self.routines.get(func)
        if answer is None:
            return func(*args, **kwargs)
        found = answer(self.maps, self.packed, args, kwargs)
        if found is None:
            return func(*args, **kwargs)
        self.maps.recording.opened.add(self.maps.site.name)
        return found
