"""SGD with momentum, Adam and AdamW that step along a denoised first moment.

The updates are those of ``torch.optim`` with one change: the direction is what the denoiser makes of the first moment. The moment itself goes on undenoised, so noise still
cancels across steps, and its noise level follows from that of the releases (``MomentNoise``). Parameter groups, learning rate schedules and ``state_dict`` are
torch's. Steps take a ``NoisySum``, never ``.grad``: what was not released cannot get in.

Memory: the moments, as in torch, and one group's denoised moment. Time: the denoiser's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_positive
from quietgrad.denoising.denoiser import SpectralDenoiser
from quietgrad.denoising.moment import MomentNoise
from quietgrad.noise.noisy_sum import NoisySum

Group = dict[str, Any]


class _MomentOptimizer(torch.optim.Optimizer):
    """Names, noise bookkeeping and the order of a step; what differs is how a release enters the state, and how the direction is scaled."""

    def __init__(
        self, model: nn.Module, denoiser: SpectralDenoiser, groups: Iterable[Group] | None, defaults: Group
    ) -> None:
        if denoiser.target != "momentum":
            raise ValueError(
                f"denoiser.target={denoiser.target!r}: this optimiser denoises its first moment; pass SpectralDenoiser(target='momentum'), or denoise the gradient "
                "and step with torch.optim"
            )
        require_positive("lr", defaults["lr"])
        require_at_least("weight_decay", defaults["weight_decay"], 0, "pass 0 for none")
        self._model = model
        self._denoiser = denoiser
        trainable = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trainable if groups is None else groups, {**defaults, "moment_noise": None})

    @torch.no_grad()
    def step(self, noisy: NoisySum | None = None, expected_batch_size: float | None = None) -> None:  # type: ignore[override]
        """One update from one released sum.

        Args:
            noisy: what ``PrivateRun.release`` or ``PrivateRun.step`` returned, not denoised yet.
            expected_batch_size: B, the divisor (``plan.expected_batch_size``).

        Raises:
            TypeError: without a ``NoisySum``.
            ValueError: if it was denoised before, or lacks a parameter of this optimiser.
        """
        if not isinstance(noisy, NoisySum) or expected_batch_size is None:
            raise TypeError(
                "call step(noisy, expected_batch_size) with the NoisySum that run.step() returned, not step(): gradients in .grad carry no noise level"
            )
        if noisy.denoised:
            raise ValueError(
                "this sum was denoised before: its noise level is not known any more; pass the released one"
            )
        names = {id(p): name for name, p in self._model.named_parameters()}
        named = [{names[id(p)]: p for p in group["params"] if p.requires_grad} for group in self.param_groups]
        missing = [name for group in named for name in group if name not in noisy.gradients]
        if missing:
            raise ValueError(
                f"the released sum has no gradient of {missing[0]!r}; clip and step with the same trainable parameters"
            )
        for group, parameters in zip(self.param_groups, named, strict=True):
            self._step_group(group, parameters, noisy, expected_batch_size)

    def _step_group(self, group: Group, named: dict[str, nn.Parameter], noisy: NoisySum, divisor: float) -> None:
        for name, parameter in named.items():
            self._receive(parameter, noisy.gradients[name] / divisor, group)
        decay, gain = self._recursion(group)
        noise = _noise_of(group).after(decay, gain, noisy.noise_std / divisor, noisy.mixing_row)
        group["moment_noise"] = {"variance": noise.variance, "row": None if noise.row is None else noise.row.tolist()}
        moments = {name: self.state[p]["exp_avg"] for name, p in named.items()}
        for name, direction in self._denoiser.denoise_all(moments, noise.std, self._model).items():
            parameter = named[name]
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            self._move(parameter, direction, group)

    def _recursion(self, group: Group) -> tuple[float, float]:
        """(decay, gain) of the first moment."""
        raise NotImplementedError

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        raise NotImplementedError

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        raise NotImplementedError


def _noise_of(group: Mapping[str, Any]) -> MomentNoise:
    saved = group["moment_noise"]
    if saved is None:
        return MomentNoise()
    return MomentNoise(saved["variance"], None if saved["row"] is None else np.array(saved["row"]))


class SpectralSGD(_MomentOptimizer):
    """Stochastic gradient descent with momentum, along the denoised momentum: p <- p - lr D(m), m <- momentum m + g.

    Args:
        model: holds the parameters; those that require a gradient are optimised.
        denoiser: with target="momentum".
        lr, momentum: as in ``torch.optim.SGD`` (dampening 0, no Nesterov).
        weight_decay: decoupled, so that it does not mix with the noise.
        groups: parameter groups with settings of their own, as for any torch optimiser; None takes all trainable parameters.

    Raises:
        ValueError: settings out of range, or a denoiser with another target.
    """

    def __init__(
        self,
        model: nn.Module,
        denoiser: SpectralDenoiser,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        groups: Iterable[Group] | None = None,
    ) -> None:
        _require_decay("momentum", momentum)
        super().__init__(model, denoiser, groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _recursion(self, group: Group) -> tuple[float, float]:
        return group["momentum"], 1.0

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg"].mul_(group["momentum"]).add_(gradient)

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        parameter.add_(direction, alpha=-group["lr"])


class SpectralAdamW(_MomentOptimizer):
    """AdamW along the denoised first moment: p <- p - lr D(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).

    The second moment v is of the gradients as released. ``weight_decay=0`` is Adam.

    Args:
        model: holds the parameters; those that require a gradient are optimised.
        denoiser: with target="momentum".
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        groups: parameter groups with settings of their own, as for any torch optimiser; None takes all trainable parameters.

    Raises:
        ValueError: settings out of range, or a denoiser with another target.
    """

    def __init__(
        self,
        model: nn.Module,
        denoiser: SpectralDenoiser,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Iterable[Group] | None = None,
    ) -> None:
        for i, beta in enumerate(betas):
            _require_decay(f"betas[{i}]", beta)
        require_positive("eps", eps)
        super().__init__(model, denoiser, groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _recursion(self, group: Group) -> tuple[float, float]:
        return group["betas"][0], 1 - group["betas"][0]

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        b1, b2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient.to(parameter.dtype), 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        state = self.state[parameter]
        b1, b2 = group["betas"]
        first, second = 1 - b1 ** state["step"], 1 - b2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        parameter.addcdiv_(direction, denominator, value=-group["lr"] / first)


def _require_decay(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be in [0, 1): it is the share of the moment that is kept at a step")
