"""SGD with momentum, Adam and AdamW whose direction a denoising rule decides.

The updates are those of ``torch.optim`` with one change: the direction is what the rule makes of
the first moment (``MomentumRule``).

Memory: the moments, as in torch, and one group's directions (with weight decay in SGD, one group's
gradients too). Time: the rule's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from quietgrad.checks import require_positive
from quietgrad.denoising.moment_optimizer import Group, MomentOptimizer, Named
from quietgrad.denoising.rules.protocols import MomentumRule
from quietgrad.noise.noisy_sum import NoisySum


class SpectralSGD(MomentOptimizer):
    """Stochastic gradient descent along what the rule makes of the momentum.

    p <- p - lr D(m), m <- momentum m + g + weight_decay p.

    Args:
        model: holds the parameters; those that require a gradient are optimised.
        rule: what is made of the first moment, such as ``PersistentAmplification()``.
        lr, momentum: as in ``torch.optim.SGD`` (dampening 0, no Nesterov).
        weight_decay: as in ``torch.optim.SGD``: a part of the gradient. It is a function of earlier
            releases, so the noise level is the same with it.
        groups: parameter groups with settings of their own, as for any torch optimiser; None takes
            all trainable parameters.

    Raises:
        TypeError: for a rule of the gradient.
        ValueError: settings out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: MomentumRule,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        groups: Iterable[Group] | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(model, rule, groups, defaults)

    @staticmethod
    def _check(group: Group) -> None:
        MomentOptimizer._check(group)
        _require_decay("momentum", group["momentum"])

    def _recursion(self, group: Group) -> tuple[float, float]:
        return group["momentum"], 1.0

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg"].mul_(group["momentum"]).add_(gradient)
        if group["weight_decay"]:
            state["exp_avg"].add_(parameter, alpha=group["weight_decay"])

    def _received(self, named: Named, group: Group, noisy: NoisySum, divisor: float) -> NoisySum:
        decay = float(group["weight_decay"])
        if not decay:
            return noisy
        gradients = {
            name: torch.add(noisy.gradients[name], p, alpha=decay * divisor)
            for name, p in named.items()
        }
        return replace(noisy, gradients=gradients)

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        parameter.add_(direction, alpha=-float(group["lr"]))


class SpectralAdamW(MomentOptimizer):
    """AdamW along what the rule makes of the first moment.

    p <- p - lr D(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). The second moment v is of the
    gradients as released. ``weight_decay=0`` is Adam.

    Args:
        model: holds the parameters; those that require a gradient are optimised.
        rule: what is made of the first moment, such as ``PersistentAmplification()``.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        groups: parameter groups with settings of their own, as for any torch optimiser; None takes
            all trainable parameters.

    Raises:
        TypeError: for a rule of the gradient.
        ValueError: settings out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: MomentumRule,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Iterable[Group] | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model, rule, groups, defaults)

    @staticmethod
    def _check(group: Group) -> None:
        MomentOptimizer._check(group)
        for i, beta in enumerate(group["betas"]):
            _require_decay(f"betas[{i}]", beta)
        require_positive("eps", group["eps"])

    def _recursion(self, group: Group) -> tuple[float, float]:
        return group["betas"][0], 1 - group["betas"][0]

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state |= {
                "step": 0,
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        b1, b2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient.to(parameter.dtype), 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        state = self.state[parameter]
        b1, b2 = group["betas"]
        if group["weight_decay"]:
            parameter.mul_(1 - float(group["lr"]) * group["weight_decay"])
        first, second = 1 - b1 ** state["step"], 1 - b2 ** state["step"]
        denominator = (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        parameter.addcdiv_(direction, denominator, value=-float(group["lr"]) / first)


def _require_decay(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(
            f"{name}={value!r} must be in [0, 1): it is the share of the moment that is kept at a "
            "step"
        )
