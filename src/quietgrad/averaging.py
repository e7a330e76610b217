"""The exponential average of the weights while a run trains them: noise that changes from step to
step averages out, most of all correlated noise, whose spectrum is high. Post-processing of released
weights, so it costs no privacy.

The average has a warm-up: w_t enters with 1 - min(decay, (1 + t) / (10 + t)), so that the initial
weights are forgotten as fast as there is something better (Polyak and Juditsky 1992 for averages;
De et al. 2022 for exponential ones with this warm-up under DP-SGD).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quietgrad.tensors import is_spread, local_of, spread_like, trainable_parameters

__all__ = ["ExponentialAverage"]

_ALIVE: weakref.WeakSet[ExponentialAverage] = weakref.WeakSet()


def averages_in_memory() -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters, and the averages of what they held: what a private run trained is in both. None
    of shards.
    """
    for one in list(_ALIVE):
        for name, parameter in one._parameters.items():
            if not is_spread(parameter):
                yield parameter, one._averages[name]


class ExponentialAverage:
    """Averages of a model's trainable parameters: ``update()`` after every step of the optimiser,
    ``applied()`` around an evaluation or a save.

    Memory: one copy of the trainable parameters, in float32 at least; of sharded ones, of this
    rank's shards, which ``state_dict`` gives as DTensors. Buffers are not averaged:
    what a private run trains has none that learn. (``torch.optim.swa_utils.AveragedModel`` copies
    the whole model, frozen weights included.)

    Raises:
        ValueError: for a decay outside [0, 1), or a model without trainable parameters.
    """

    def __init__(self, model: nn.Module, decay: float = 0.97) -> None:
        if isinstance(decay, str) or not 0.0 <= decay < 1.0:
            raise ValueError(
                f"decay={decay!r}: use a number from 0 (the last weights) to below 1, such as 0.97"
            )
        self.decay = decay
        self.steps = 0
        self._parameters = trainable_parameters(model)
        if not self._parameters:
            raise ValueError("model has no trainable parameters, so there is nothing to average")
        with torch.no_grad():
            self._averages = {n: _wide(local_of(p)).clone() for n, p in self._parameters.items()}
        _ALIVE.add(self)

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights as they are."""
        weight = 1.0 - min(self.decay, (1.0 + self.steps) / (10.0 + self.steps))
        averages = list(self._averages.values())
        # Where a model was moved to another device or precision since, so are its averages.
        values = [_wide(local_of(p)) for p in self._parameters.values()]
        pairs = list(zip(averages, values, strict=True))
        if any((a.device, a.dtype) != (v.device, v.dtype) for a, v in pairs):
            averages = [a.to(v) for a, v in pairs]
            self._averages = dict(zip(self._averages, averages, strict=True))
        torch._foreach_lerp_(averages, values, weight)
        self.steps += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again."""
        own = {name: local_of(p).detach().clone() for name, p in self._parameters.items()}
        self.write()
        try:
            yield
        finally:
            self._copy(own)

    def write(self) -> None:
        """The averages become the model's weights, for good."""
        self._copy(self._averages)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: functions of released weights."""
        averages = {
            name: spread_like(value.clone(), p) if is_spread(p) else value.detach().cpu()
            for (name, value), p in zip(
                self._averages.items(), self._parameters.values(), strict=True
            )
        }
        return {"steps": self.steps, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state_dict``.

        Raises:
            ValueError: if it is of other parameters.
        """
        shapes = {name: p.shape for name, p in self._parameters.items()}
        if shapes != {name: value.shape for name, value in state["averages"].items()}:
            raise ValueError(
                "the averages are of other parameters than the model's; use the settings they were "
                "saved with"
            )
        self.steps = int(state["steps"])
        for name, value in state["averages"].items():
            self._averages[name].copy_(local_of(value))

    @torch.no_grad()
    def _copy(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_of(parameter).copy_(values[name])


def _wide(parameter: Tensor) -> Tensor:
    """In which small changes are not rounded away."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
