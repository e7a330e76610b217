"""The second type a gradient has on its way out: released. Anything may be done to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quietgrad.checks import require_at_least, require_finite, require_positive
from quietgrad.tensors import is_spread, spread_like

WRITTEN = "_quietgrad_written"


@dataclass(frozen=True)
class NoisySum:
    """A clipped sum with its noise: public from here on.

    Attributes:
        gradients: parameter name -> noisy sum, in the parameter's shape.
        noise_std: standard deviation of the noise in every entry, sigma * C (a public fact), for
            correlated noise that of this step.
        mixing_row: for noise that is correlated across steps, this step's coefficients of the
            mechanism's independent draws, up to a positive factor; None where the noise is
            independent of all other steps'.
        denoised: whether a denoiser has been over it: ``noise_std`` then is what was added, no
            longer what is there.
        expected_batch_size: B, what the mean divides by, never the realised size, which is private
            (erratum E1); a run says it. None: nobody has, and there is no mean.
        beside: name -> noisy sum that was released with the gradients, in units of what one record
            can add to it.
    """

    gradients: dict[str, Tensor]
    noise_std: float
    mixing_row: NDArray[np.float64] | None = field(default=None, repr=False, compare=False)
    denoised: bool = False
    expected_batch_size: float | None = None
    beside: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        require_finite("noise_std", self.noise_std)
        require_at_least(
            "noise_std",
            self.noise_std,
            0,
            "pass the standard deviation of the noise that was added",
        )
        if self.expected_batch_size is not None:
            require_positive("expected_batch_size", self.expected_batch_size, "a plan has it")

    @property
    def divisor(self) -> float:
        """B.

        Raises:
            ValueError: where nothing said it.
        """
        if self.expected_batch_size is None:
            raise ValueError(
                "expected_batch_size=None: nothing says what the mean of this sum divides by; "
                "give NoisySum(expected_batch_size=plan.expected_batch_size), or take what a run "
                "released (1 for gradients that are no sum over a batch)"
            )
        return self.expected_batch_size

    def require_whole(self, who: str) -> None:
        """Raises ValueError where parameters are sharded, for what needs whole matrices."""
        name = next((name for name, g in self.gradients.items() if is_spread(g)), None)
        if name is not None:
            raise ValueError(
                f"{who} needs whole matrices, and parameter {name!r} is sharded by fully_shard; "
                "give PrivacyConfig(denoising=) a rule of quietgrad.denoising, for which matrices "
                "are gathered one at a time, and step by any torch.optim optimiser"
            )

    def mean(self) -> dict[str, Tensor]:
        """Parameter name -> gradient divided by the expected batch size.

        Raises:
            ValueError: as ``divisor``.
        """
        divisor = self.divisor
        return {name: g / divisor for name, g in self.gradients.items()}

    def write_gradients(self, model: nn.Module) -> None:
        """Sets ``.grad`` of every parameter named here to the mean, in the parameter's dtype, for
        any ``torch.optim`` optimiser.

        What was in ``.grad`` is replaced, so that no gradient that was not released gets into it.
        An earlier release whose step was not taken yet is added to instead: it was paid for.

        Raises:
            ValueError: if the model lacks one of the parameters.
        """
        parameters = dict(model.named_parameters())
        missing = [name for name in self.gradients if name not in parameters]
        if missing:
            raise ValueError(
                f"the model has no parameter named {missing[0]!r}; pass the model that was clipped"
            )
        for name, g in self.mean().items():
            with torch.no_grad():
                _write(parameters[name], g)


def as_released(gradient: Tensor) -> Tensor:
    """The same, known as released, and as none that a later release is added to."""
    setattr(gradient, WRITTEN, None)
    return gradient


def _write(parameter: nn.Parameter, mean: Tensor) -> None:
    """Beside a gradient lies which versions of it and of the weights were there when it was
    written: the same ones still, and no optimiser came by, so it was not stepped on.
    """
    _watch_optimizers()
    written = mean.to(parameter.dtype)
    if is_spread(parameter) and not is_spread(written):  # copies that all ranks hold
        written = spread_like(written, parameter)
    before = parameter.grad
    if before is not None and getattr(before, WRITTEN, None) == _versions(parameter):
        written = before.add_(written)
    parameter.grad = written
    setattr(written, WRITTEN, _versions(parameter))


def _versions(parameter: nn.Parameter) -> tuple[int, int]:
    assert parameter.grad is not None
    return parameter.grad._version, parameter._version


@functools.cache
def _watch_optimizers() -> None:
    """Fused kernels, and optimisers that write through ``.data``, do not count as changes of the
    weights: whatever a ``torch.optim`` optimiser steps on is marked as used.
    """

    def used(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if hasattr(parameter.grad, WRITTEN):
                    as_released(parameter.grad)

    register_optimizer_step_post_hook(used)
