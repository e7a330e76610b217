"""What a private step holds on to: gradients that were released and nothing else."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


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
