"""What optimisers with a denoised direction share: a step takes one released sum, the moment keeps
its noise level, and a rule decides the direction.

The moment itself goes on undenoised, so noise still cancels across steps, and its noise level
follows from that of the releases (``MomentNoise``): one level for all parameters that took part in
the same steps, so layers may be frozen and thawed. Parameter groups, learning rate schedules and
``state_dict`` are torch's. Steps take a ``NoisySum``, never ``.grad``: what was not released cannot
get in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.checks import require_at_least, require_finite
from quietgrad.denoising.moment import MomentNoise
from quietgrad.denoising.rules.protocols import MomentStep, MomentumRule, require_momentum_rule
from quietgrad.noise.noisy_sum import NoisySum

Group = dict[str, Any]
Named = dict[str, nn.Parameter]


class _Level(NamedTuple):
    """Parameters whose moments have received the same releases, and their noise before and after
    one more.
    """

    before: MomentNoise
    after: MomentNoise
    named: Named


class MomentOptimizer(torch.optim.Optimizer):
    """Names, noise bookkeeping and the order of a step; what differs is how a release enters the
    state, and how the direction is scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: MomentumRule,
        groups: Iterable[Group] | None,
        defaults: Group,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be the module that was clipped, not {type(model).__name__}: gradients "
                "are known by its parameters' names; pass a part of its parameters as groups"
            )
        require_momentum_rule("rule", rule)
        self._model = model
        self._rule = rule
        self._last: weakref.ref[NoisySum] | None = None
        trainable = [p for p in model.parameters() if p.requires_grad]
        super().__init__(
            trainable if groups is None else groups, {**defaults, "moment_noise": None}
        )

    def add_param_group(self, param_group: Group) -> None:
        """As in torch; the settings of the group are checked, and that its parameters are the
        model's.
        """
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        known = {id(p) for p in self._model.parameters()}
        if any(id(p) not in known for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise ValueError(
                "groups has a parameter that is not model's; pass the model that was clipped, and "
                "its own"
            )

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out all but its own attributes
        return super().__getstate__() | {"_model": self._model, "_rule": self._rule, "_last": None}

    @staticmethod
    def _check(group: Group) -> None:
        for name in ("lr", "weight_decay"):
            value = float(group[name])
            require_finite(name, value)
            require_at_least(
                name, value, 0, "pass 0 for none" if name == "weight_decay" else "0 stands still"
            )

    @torch.no_grad()
    def step(self, noisy: NoisySum | None = None) -> None:  # type: ignore[override]
        """One update from one released sum.

        Args:
            noisy: what ``PrivateRun.backward`` or ``release`` returned, not denoised yet.

        Raises:
            TypeError: without a ``NoisySum``.
            ValueError: if it was denoised or stepped on before, is sharded, or lacks a parameter
                of this optimiser. Nothing has changed then.
        """
        if not isinstance(noisy, NoisySum):
            raise TypeError(
                "call step(noisy) with the NoisySum that run.backward() returned, not step(): "
                "gradients in .grad carry no noise level"
            )
        noisy.require_whole(type(self).__name__)
        if noisy.denoised:
            raise ValueError(
                "this sum was denoised before: its noise level is not known any more; pass the "
                "released one"
            )
        if self._last is not None and self._last() is noisy:
            raise ValueError(
                "this sum was stepped on before: twice the same noise does not average out, and "
                "the moment's noise level would be wrong; step once on a release"
            )
        names = {id(p): name for name, p in self._model.named_parameters()}
        named = [
            {names[id(p)]: p for p in group["params"] if p.requires_grad}
            for group in self.param_groups
        ]
        missing = [name for group in named for name in group if name not in noisy.gradients]
        if missing:
            raise ValueError(
                f"the released sum has no gradient of {missing[0]!r}; clip and step with the same "
                "trainable parameters"
            )
        for name, parameter in (item for group in named for item in group.items()):
            if noisy.gradients[name].shape != parameter.shape:
                raise ValueError(
                    f"the released sum has {tuple(noisy.gradients[name].shape)} for {name!r}, and "
                    f"the parameter is {tuple(parameter.shape)}; clip and step with the same model"
                )
        divisor = noisy.divisor
        levels = [
            [
                _Level(
                    noise,
                    noise.after(
                        *self._recursion(group), noisy.noise_std / divisor, noisy.mixing_row
                    ),
                    of_level,
                )
                for noise, of_level in self._histories(group, parameters)
            ]
            for group, parameters in zip(self.param_groups, named, strict=True)
        ]
        self._last = weakref.ref(noisy)
        for group, of_group in zip(self.param_groups, levels, strict=True):
            self._step_group(group, of_group, noisy, divisor)

    def _histories(self, group: Group, named: Named) -> list[tuple[MomentNoise, Named]]:
        """Parameters by what their moments have received so far."""
        levels = _levels_of(group)
        begun = [
            self.state[p] for p in group["params"] if self.state.get(p)
        ]  # frozen ones too: they keep a level
        if any(state.get("history", 0) >= len(levels) for state in begun):
            raise ValueError(
                "a moment comes from a state without its noise level, as of another optimiser's; "
                "load what this optimiser's state_dict gave, or begin anew"
            )
        found: dict[int | None, Named] = {}
        for name, parameter in named.items():
            state = self.state.get(parameter, {})
            index = state.get("history", 0) if state else None
            found.setdefault(index, {})[name] = parameter
        noises = {i: MomentNoise() if i is None else _noise_of(levels[i]) for i in found}
        return [(noises[i], of_level) for i, of_level in found.items()]

    def _step_group(
        self, group: Group, levels: list[_Level], noisy: NoisySum, divisor: float
    ) -> None:
        for level in levels:
            for name, direction in self._directions(level, group, noisy, divisor).items():
                self._move(level.named[name], direction, group)
        self._keep_levels(group, levels)

    def _directions(
        self, level: _Level, group: Group, noisy: NoisySum, divisor: float
    ) -> dict[str, Tensor]:
        """The release goes into the moments; returns what the rule makes of them."""
        named = level.named
        states = {name: self.state.get(p, {}) for name, p in named.items()}

        def receive() -> dict[str, Tensor]:
            for name, parameter in named.items():
                self._receive(parameter, noisy.gradients[name] / divisor, group)
            return {name: self.state[p]["exp_avg"] for name, p in named.items()}

        step = MomentStep(
            before={name: state["exp_avg"] for name, state in states.items() if state},
            noise_before=level.before,
            noise_after=level.after,
            incoming=lambda: self._received(named, group, noisy, divisor),
            receive=receive,
            expected_batch_size=divisor,
            gains={name: state["gain"] for name, state in states.items() if "gain" in state},
        )
        directions, gains = self._rule.directions(step, self._model)
        moments = step.after
        for name, gain in gains.items():
            self.state[named[name]]["gain"] = list(gain)
        return moments | directions

    def _keep_levels(self, group: Group, levels: list[_Level]) -> None:
        """Writes them to the group, where ``state_dict`` finds them; frozen parameters keep the
        level they had.
        """
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
        """What goes into the moments, times ``divisor``: the release, and what
        is known without it.
        """
        return noisy

    def _receive(self, parameter: nn.Parameter, gradient: Tensor, group: Group) -> None:
        raise NotImplementedError

    def _move(self, parameter: nn.Parameter, direction: Tensor, group: Group) -> None:
        raise NotImplementedError


def _levels_of(group: Group) -> list[dict[str, Any]]:
    """One entry a history."""
    return list(group.get("moment_noise") or [])


def _noise_of(saved: dict[str, Any]) -> MomentNoise:
    row = None if saved["row"] is None else np.array(saved["row"])
    return MomentNoise(saved["variance"], row, saved["releases"], saved["mass"])


def _saved(noise: MomentNoise) -> dict[str, Any]:
    row = None if noise.row is None else noise.row.tolist()
    return {"variance": noise.variance, "row": row, "releases": noise.releases, "mass": noise.mass}
