"""What a private step holds on to: generators that nobody knows, and gradients that were released
and nothing else.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def keyed_generators(model: nn.Module, seed: int) -> Iterator[None]:
    """Torch's, numpy's and Python's generators seeded for a step, and afterwards as they were: how
    far they went says how many records a batch held, and a seed that anybody may know would say
    which numbers each record met.

    Args:
        model: on the device whose generator is meant, beside the CPU's.
        seed: secret, below 2^63.
    """
    device = next(model.parameters()).device
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


class ReleasedGradients:
    """What the last release wrote to ``.grad``, until the optimiser steps on it.

    Args:
        remedy: for what was to be done with gradients besides.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._steps = 0  # of which release
        self._held: dict[int, tuple[Tensor, int]] = {}  # id of a parameter -> gradient, version

    def note(self, model: nn.Module, releases: int) -> None:
        """After a release."""
        self._steps = releases
        held = {id(p): p.grad for p in model.parameters()}
        self._held = {name: (g, g._version) for name, g in held.items() if g is not None}

    def require(self, optimizer: Any, steps: int) -> None:
        """Before the optimiser's step, so many of which are made then.

        Raises:
            RuntimeError: for gradients that were not released, or changed since.
        """
        ours = self._steps == steps
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, version = self._held.get(id(parameter), (None, 0))
                ours = ours and gradient is parameter.grad and gradient._version == version
        self._held = {}
        if not ours:
            raise RuntimeError(
                "the optimiser would step on gradients that were not released: after the private "
                "step something wrote to .grad (a step of one's own, a hook, a backward pass); "
                f"{self._remedy}"
            )
