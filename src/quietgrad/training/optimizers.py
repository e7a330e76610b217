"""Unmodified torch optimisers, or those that denoise their first moment; a rate of its own for the
head and a schedule that depends on the step number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from quietgrad.denoising import MomentumRule, SpectralAdamW, SpectralSGD
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.records import Above0, Amount, Whole, judge

LAST_RATE = 0.05  # share of the learning rate that is left at the last step
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Rates:
    """What every optimiser has.

    Attributes:
        learning_rate: of the encoder or adapters; left out: with AdamW from public facts
            (docs/defaults.md).
        head_learning_rate: of the head; left out: as ``learning_rate`` where that is given.
        weight_decay: decoupled for AdamW.
        warmup_steps: over so many steps the rate rises linearly.
        schedule: "linear" (after the warm-up the rate falls linearly to a twentieth) or "constant".
    """

    learning_rate: Above0 | None = None
    head_learning_rate: Above0 | None = None
    weight_decay: Amount = 0.0
    warmup_steps: Whole = 5
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self) -> None:
        judge(self)

    @property
    def rate(self) -> float:
        """The learning rate.

        Raises:
            ValueError: where it was left out, before ``prepare`` has said it.
        """
        if self.learning_rate is None:
            raise ValueError("learning_rate is left out; set optimizer.learning_rate")
        return self.learning_rate

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at a step (0-based) of ``steps``."""
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        if self.schedule == "constant":
            return warm
        return warm * (LAST_RATE + (1 - LAST_RATE) * (1 - step / max(steps, 1)))


@dataclass(frozen=True)
class AdamW(Rates):
    """AdamW, or with a rule the one that acts by it."""

    def build(
        self, model: nn.Module, groups: Groups, rule: MomentumRule | None
    ) -> torch.optim.Optimizer:
        """Over the groups, each with its rate."""
        if rule is not None:
            return SpectralAdamW(model, rule, weight_decay=self.weight_decay, groups=groups)
        return torch.optim.AdamW(groups, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class SGD(Rates):
    """SGD, with ``momentum`` beside what every optimiser has.

    Attributes:
        momentum: share of the last step's velocity that is kept; 0 is plain SGD.
    """

    momentum: Amount = 0.0

    def build(
        self, model: nn.Module, groups: Groups, rule: MomentumRule | None
    ) -> torch.optim.Optimizer:
        """See ``AdamW.build``."""
        momentum, decay = self.momentum, self.weight_decay
        if rule is not None:
            return SpectralSGD(model, rule, self.rate, momentum, decay, groups=groups)
        return torch.optim.SGD(groups, momentum=momentum, weight_decay=decay)


Optimizer = AdamW | SGD


def head_parameter_names(model: nn.Module) -> set[str]:
    """Names of the head's parameters: ours, or what a Hugging Face classifier has on top of its
    base model.
    """
    if hasattr(model, "head"):
        return {name for name, _ in model.named_parameters() if name.startswith("head.")}
    inner: Any = getattr(model, "encoder", model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()  # peft
    base = getattr(inner, "base_model", inner)
    if base is inner:
        return set()
    below = {id(p) for p in base.parameters()}
    return {name for name, p in model.named_parameters() if id(p) not in below}


def step_on_release(optimizer: torch.optim.Optimizer, noisy: NoisySum | None) -> None:
    """One update from ``.grad``, or from the release where the optimiser denoises its moment.

    Args:
        optimizer: from ``build_optimizer``.
        noisy: what ``PrivateRun.backward`` returned; None without privacy.
    """
    if isinstance(optimizer, SpectralAdamW | SpectralSGD):
        optimizer.step(noisy)
    else:
        optimizer.step()
    optimizer.zero_grad()


def build_optimizer(
    model: nn.Module, table: Optimizer, steps: int, rule: MomentumRule | None = None
) -> tuple[torch.optim.Optimizer, Callable[[int], None]]:
    """The optimiser, and a function that sets its learning rates for a step (0-based).

    With a ``rule`` the optimiser is one that acts by it.

    Linear warm-up over ``warmup_steps``, then linear decay or none; a function of the step number,
    so a resumed run goes on where it was.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    head_names = head_parameter_names(model)
    head = [p for name, p in trainable if name in head_names]
    body = [p for name, p in trainable if name not in head_names]
    head_rate = table.rate if table.head_learning_rate is None else table.head_learning_rate
    groups = [{"params": p, "lr": rate} for p, rate in ((body, table.rate), (head, head_rate)) if p]
    optimizer = table.build(model, groups, rule)
    base = [float(g["lr"]) for g in optimizer.param_groups]

    def schedule(step: int) -> None:
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * table.factor(step, steps)

    return optimizer, schedule
