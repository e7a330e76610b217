"""Captured linear maps: what an opened routine is made of, each with the rule of its own weights.

Examples come first in what the rules see: shape legend b examples, t positions, d and p features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.clipping.capture.capture import Call, Identity, Recording
from quietgrad.clipping.capture.layout import Site
from quietgrad.clipping.norms.rules.linear import embedding_rule, linear_rule
from quietgrad.clipping.norms.rules.maps import (
    repeated_rule,
    stacked_linear_rule,
    stacked_shift_rule,
)
from quietgrad.clipping.norms.rules.registry import Rule


@dataclass(frozen=True)
class Maps:
    """The captured maps of one call of a module.

    Attributes:
        site: the module. Every map of one call has its own parameters, so that each of these
            arrives once a call.
        recording: of the pass.
        examples: b.
        names: id of a parameter -> its local name.
    """

    site: Site
    recording: Recording
    examples: int
    names: dict[int, str]

    def know(self, *weights: Tensor | None) -> bool:
        """Whether these are the module's own parameters, not something computed from them."""
        return all(weight is None or id(weight) in self.names for weight in weights)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b for [b, t, d]."""
        return self._captured(F.linear(x, weight, bias), x, linear_rule, weight, bias)

    def linear_over_time(self, x_tbd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with time first, in memory too."""
        y = F.linear(x_tbd, weight, bias).transpose(0, 1)
        return self._captured(y, x_tbd.transpose(0, 1), linear_rule, weight, bias).transpose(0, 1)

    def linear_later(self, x_tbd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """[t, b, p] in place of x W^T + b, whose value something else computes.

        Whoever adds it hands it that value's gradient. None where no gradient is wanted.
        """
        if not self._wanted(weight, bias):
            return None
        later = _Later.apply(x_tbd, weight, bias).transpose(0, 1)
        return self._captured(later, x_tbd.transpose(0, 1), linear_rule, weight, bias).transpose(
            0, 1
        )

    def stacked(
        self, xs_btd: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None
    ) -> list[Tensor]:
        """x_k W_k^T + b_k for equal blocks of rows W_k: one parameter, so one contribution.

        Shorter inputs are filled up with zeros, which add nothing.
        """
        inputs = _of_one_length(xs_btd)
        k = len(xs_btd)
        biases = [None] * k if bias is None else bias.chunk(k)
        parts = zip(inputs, weight.chunk(k), biases, strict=True)
        y_btkp = torch.stack([F.linear(x, part, b) for x, part, b in parts], dim=2)
        x_btkd = torch.stack(inputs, dim=2)
        y_btkp = self._captured(y_btkp, x_btkd, stacked_linear_rule, weight, bias)
        return _cut_back(y_btkp, xs_btd)

    def shifted(self, xs_btp: Sequence[Tensor], bias: Tensor) -> list[Tensor]:
        """x_k + b_k for equal blocks b_k: one parameter, so one contribution."""
        x_btkp = torch.stack(_of_one_length(xs_btp), dim=2)
        y_btkp = x_btkp + bias.view(len(xs_btp), -1)
        x = x_btkp.new_zeros(self.examples, 1)
        return _cut_back(self._captured(y_btkp, x, stacked_shift_rule, bias), xs_btp)

    def embedding(self, ids_bt: Tensor, weight: Tensor) -> Tensor:
        """[b, t, d] rows of a table."""
        return self._captured(F.embedding(ids_bt, weight), ids_bt, embedding_rule, weight)

    def repeated(self, vector: Tensor) -> Tensor:
        """[b, 1, n]: a vector once for every example."""
        rows = vector.reshape(1, 1, -1).expand(self.examples, -1, -1)
        return self._captured(rows, rows.new_zeros(self.examples, 1), repeated_rule, vector)

    def _wanted(self, weight: Tensor, bias: Tensor | None) -> dict[str, str]:
        own = self.site.parameters
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        local = {role: self.names[id(p)] for role, p in given.items()}
        return {role: own[name] for role, name in local.items() if name in own}

    def _captured(
        self, y: Tensor, x: Tensor, rule: Rule, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        wanted = self._wanted(weight, bias)
        if not wanted:
            return y
        part = replace(self.site, parameters=wanted, rule=rule)
        call = Call(part, self.recording, (), (), None, (0,), frozenset())
        kept, spread = x.detach(), self.recording.spread
        kept = kept if spread is None else spread.lasting(kept)
        [attached] = Identity.apply(call, [kept], self.recording.root, y)
        return attached


def _of_one_length(xs_btn: Sequence[Tensor]) -> list[Tensor]:
    longest = max(x.shape[1] for x in xs_btn)
    return [F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in xs_btn]


def _cut_back(y_btkn: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [y[:, : x.shape[1]] for x, y in zip(like, y_btkn.unbind(dim=2), strict=True)]


class _Later(torch.autograd.Function):
    """x W^T + b to autograd, for weights that are asked for their own gradients (the guard asks);
    the value is zero and takes no memory.
    """

    @staticmethod
    def forward(ctx: Any, x_tbd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_tbd)
        return weight.new_zeros(()).expand(*x_tbd.shape[:2], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None]:
        [x_tbd] = ctx.saved_tensors
        flat = gradient.flatten(0, 1)
        bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return None, flat.T @ x_tbd.flatten(0, 1), bias
