"""SGD with momentum, Adam and AdamW that step along a denoised first moment.

The updates are those of ``torch.optim`` with one change: the direction D(m) is what the denoiser makes of the first moment m, or m and what persists of the one before it in the release that went into it last
(``persistent_part``). The moment itself goes on undenoised, so noise still
cancels across steps, and its noise level follows from that of the releases (``MomentNoise``): one level for all parameters that took part in the same steps, so layers may be
frozen and thawed. Parameter groups, learning rate schedules and ``state_dict`` are torch's. Steps take a ``NoisySum``, never ``.grad``: what was not released cannot get in.

Memory: the moments, as in torch, and one group's denoised moment (with weight decay in SGD, one group's gradients too). Time: the denoiser's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_finite, require_positive
from quietgrad.denoising.denoiser import SpectralDenoiser
from quietgrad.denoising.moment import MomentNoise
from quietgrad.denoising.persistence import persistent_part
from quietgrad.noise.noisy_sum import NoisySum

Group = dict[str, Any]
Named = dict[str, nn.Parameter]
ENOUGH = 1 << 30  # states of before did not count releases, and their rules had begun


class _Level(NamedTuple):
    """Parameters whose moments have received the same releases, and their noise before and after one more."""

    before: MomentNoise
    after: MomentNoise
    named: Named


class _MomentOptimizer(torch.optim.Optimizer):
    """Names, noise bookkeeping and the order of a step; what differs is how a release enters the state, and how the direction is scaled."""

    def __init__(
        self, model: nn.Module, denoiser: SpectralDenoiser, groups: Iterable[Group] | None, defaults: Group
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be the module that was clipped, not {type(model).__name__}: gradients are known by its parameters' names; pass a part of its parameters as groups"
            )
        if not isinstance(denoiser, SpectralDenoiser):
            raise TypeError(f"denoiser must be a SpectralDenoiser, not {denoiser!r}; without one step with torch.optim")
        if denoiser.target != "momentum":
            raise ValueError(
                f"denoiser.target={denoiser.target!r}: this optimiser denoises its first moment; pass SpectralDenoiser(target='momentum'), or denoise the gradient "
                "and step with torch.optim"
            )
        self._model = model
        self._denoiser = denoiser
        self._last: weakref.ref[NoisySum] | None = None
        trainable = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trainable if groups is None else groups, {**defaults, "moment_noise": None})

    def add_param_group(self, param_group: Group) -> None:
        """As in torch; the settings of the group are checked, and that its parameters are the model's."""
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        known = {id(p) for p in self._model.parameters()}
        if any(id(p) not in known for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError("groups has a parameter that is not model's; pass the model that was clipped, and its own")

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out all but its own attributes
        return super().__getstate__() | {"_model": self._model, "_denoiser": self._denoiser, "_last": None}

    @staticmethod
    def _check(group: Group) -> None:
        for name in ("lr", "weight_decay"):
            value = float(group[name])
            require_finite(name, value)
            require_at_least(name, value, 0, "pass 0 for none" if name == "weight_decay" else "0 stands still")

    @torch.no_grad()
    def step(self, noisy: NoisySum | None = None, expected_batch_size: float | None = None) -> None:  # type: ignore[override]
        """One update from one released sum.

        Args:
            noisy: what ``PrivateRun.release`` or ``PrivateRun.step`` returned, not denoised yet.
            expected_batch_size: B, the divisor (``plan.expected_batch_size``).

        Raises:
            TypeError: without a ``NoisySum``.
            ValueError: if it was denoised or stepped on before, or lacks a parameter of this optimiser. Nothing has changed then.
        """
        if not isinstance(noisy, NoisySum) or expected_batch_size is None:
            raise TypeError(
                "call step(noisy, expected_batch_size) with the NoisySum that run.step() returned, not step(): gradients in .grad carry no noise level"
            )
        if noisy.denoised:
            raise ValueError(
                "this sum was denoised before: its noise level is not known any more; pass the released one"
            )
        require_positive("expected_batch_size", expected_batch_size, "pass plan.expected_batch_size")
        if self._last is not None and self._last() is noisy:
            raise ValueError(
                "this sum was stepped on before: twice the same noise does not average out, and the moment's noise level would be wrong; step once on a release"
            )
        names = {id(p): name for name, p in self._model.named_parameters()}
        named = [{names[id(p)]: p for p in group["params"] if p.requires_grad} for group in self.param_groups]
        missing = [name for group in named for name in group if name not in noisy.gradients]
        if missing:
            raise ValueError(
                f"the released sum has no gradient of {missing[0]!r}; clip and step with the same trainable parameters"
            )
        for name, parameter in (item for group in named for item in group.items()):
            if noisy.gradients[name].shape != parameter.shape:
                raise ValueError(
                    f"the released sum has {tuple(noisy.gradients[name].shape)} for {name!r}, and the parameter is {tuple(parameter.shape)}; clip and step with the same model"
                )
        levels = [
            [
                _Level(
                    noise,
                    noise.after(*self._recursion(group), noisy.noise_std / expected_batch_size, noisy.mixing_row),
                    of_level,
                )
                for noise, of_level in self._histories(group, parameters)
            ]
            for group, parameters in zip(self.param_groups, named, strict=True)
        ]
        self._last = weakref.ref(noisy)
        for group, of_group in zip(self.param_groups, levels, strict=True):
            self._step_group(group, of_group, noisy, expected_batch_size)

    def _histories(self, group: Group, named: Named) -> list[tuple[MomentNoise, Named]]:
        """Parameters by what their moments have received so far."""
        levels = _levels_of(group)
        begun = [self.state[p] for p in group["params"] if self.state.get(p)]  # frozen ones too: they keep a level
        if any(state.get("history", 0) >= len(levels) for state in begun):
            raise ValueError(
                "a moment comes from a state without its noise level, as of another optimiser's; load what this optimiser's state_dict gave, or begin anew"
            )
        found: dict[int | None, Named] = {}
        for name, parameter in named.items():
            state = self.state.get(parameter, {})
            index = state.get("history", 0) if state else None
            found.setdefault(index, {})[name] = parameter
        recursion = self._recursion(group)
        return [
            (MomentNoise() if i is None else _noise_of(levels[i], *recursion), of_level)
            for i, of_level in found.items()
        ]

    def _step_group(self, group: Group, levels: list[_Level], noisy: NoisySum, divisor: float) -> None:
        for level in levels:
            for name, direction in self._directions(level, group, noisy, divisor).items():
                self._move(level.named[name], direction, group)
        self._keep_levels(group, levels)

    def _directions(self, level: _Level, group: Group, noisy: NoisySum, divisor: float) -> dict[str, Tensor]:
        """The release goes into the moments; returns what they are denoised to."""
        rule, named = self._denoiser, level.named
        begun = level.after.releases > rule.first_steps
        added: dict[str, Tensor] = {}
        if begun and rule.persistent and level.before.releases:
            moments = {name: self.state[p]["exp_avg"] for name, p in named.items()}
            gains = {name: self.state[p]["gain"] for name, p in named.items() if "gain" in self.state[p]}
            received = self._received(named, group, noisy, divisor)
            added, gains = persistent_part(moments, level.before, received, divisor, rule, gains, self._model)
            for name, gain in gains.items():
                self.state[named[name]]["gain"] = gain
        for name, parameter in named.items():
            self._receive(parameter, noisy.gradients[name] / divisor, group)
        moments = {name: self.state[p]["exp_avg"] for name, p in named.items()}
        if begun and not rule.persistent:
            return rule.denoise_all(moments, level.after.std, self._model)
        for name, part in added.items():
            moments[name] = part.add_(moments[name])
        return moments

    def _keep_levels(self, group: Group, levels: list[_Level]) -> None:
        """Writes them to the group, where ``state_dict`` finds them; frozen parameters keep the level they had."""
        before = _levels_of(group)
        kept = [_saved(level.after) for level in levels]
        moved: dict[int, int] = {}
        stepped = {id(p) for level in levels for p in level.named.values()}
        for parameter in group["params"]:
            state = self.state.get(parameter)
            if state and id(parameter) not in stepped:
                old = state.get("history", 0)
                if old not in moved:
                    moved[old] = len(kept)
                    kept.append(before[old])
                state["history"] = moved[old]
        for index, level in enumerate(levels):
            for parameter in level.named.values():
                self.state[parameter]["history"] = index
        group["moment_noise"] = kept

    def _recursion(self, group: Group) -> tuple[float, float]:
        """(decay, gain) of the first moment."""
        raise NotImplementedError

    def _received(self, named: Named, group: Group, noisy: NoisySum, divisor: float) -> NoisySum:
        """What goes into the moments, times ``divisor``: the release, and what is known without it."""
        return noisy

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        raise NotImplementedError

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        raise NotImplementedError


def _levels_of(group: Group) -> list[dict[str, Any]]:
    """One entry a history; states of before had one for the whole group."""
    saved = group.get("moment_noise")
    return [saved] if isinstance(saved, dict) else list(saved or [])


def _noise_of(saved: dict[str, Any], decay: float, gain: float) -> MomentNoise:
    row = None if saved["row"] is None else np.array(saved["row"])
    releases = saved.get("releases", ENOUGH)
    # States of before the rule have none.
    mass = saved["mass"] if "mass" in saved else gain * (1 - decay**releases) / (1 - decay)
    return MomentNoise(saved["variance"], row, releases, mass)


def _saved(noise: MomentNoise) -> dict[str, Any]:
    row = None if noise.row is None else noise.row.tolist()
    return {"variance": noise.variance, "row": row, "releases": noise.releases, "mass": noise.mass}


class SpectralSGD(_MomentOptimizer):
    """Stochastic gradient descent with momentum, along the denoised momentum: p <- p - lr D(m), m <- momentum m + g + weight_decay p.

    Args:
        model: holds the parameters; those that require a gradient are optimised.
        denoiser: with target="momentum".
        lr, momentum: as in ``torch.optim.SGD`` (dampening 0, no Nesterov).
        weight_decay: as in ``torch.optim.SGD``: a part of the gradient. It is a function of earlier releases, so the noise level is the same with it.
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
        super().__init__(model, denoiser, groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @staticmethod
    def _check(group: Group) -> None:
        _MomentOptimizer._check(group)
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
        gradients = {name: torch.add(noisy.gradients[name], p, alpha=decay * divisor) for name, p in named.items()}
        return replace(noisy, gradients=gradients)

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        parameter.add_(direction, alpha=-float(group["lr"]))


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
        super().__init__(model, denoiser, groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @staticmethod
    def _check(group: Group) -> None:
        _MomentOptimizer._check(group)
        for i, beta in enumerate(group["betas"]):
            _require_decay(f"betas[{i}]", beta)
        require_positive("eps", group["eps"])

    def _recursion(self, group: Group) -> tuple[float, float]:
        return group["betas"][0], 1 - group["betas"][0]

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
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
        raise ValueError(f"{name}={value!r} must be in [0, 1): it is the share of the moment that is kept at a step")
