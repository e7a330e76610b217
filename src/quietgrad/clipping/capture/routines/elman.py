"""One layer and direction of a plain recurrent network, tanh or ReLU; see ``lstm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quietgrad.clipping.capture.routines.maps import Maps
from quietgrad.clipping.capture.routines.time import Order, or_zeros


def tanh_layer(
    maps: Maps,
    x_tbd: Tensor,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    biased: bool,
    order: Order,
) -> tuple[Tensor, ...]:
    """[t, b, h] outputs, [b, h] last output."""
    return _layer(maps, x_tbd, states[0], weights, biased, order, rectified=False)


def relu_layer(
    maps: Maps,
    x_tbd: Tensor,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    biased: bool,
    order: Order,
) -> tuple[Tensor, ...]:
    """[t, b, h] outputs, [b, h] last output."""
    return _layer(maps, x_tbd, states[0], weights, biased, order, rectified=True)


def _layer(
    maps: Maps,
    x_tbd: Tensor,
    h0: Tensor,
    weights: tuple[Tensor, ...],
    biased: bool,
    order: Order,
    rectified: bool,
) -> tuple[Tensor, ...]:
    w_in, w, *rest = weights
    b_in, b = rest if biased else (None, None)
    inputs = maps.linear_over_time(x_tbd, w_in, b_in)
    with torch.no_grad():
        outputs = order.states(h0, len(inputs))
        sums, transposed = (inputs if b is None else inputs + b), w.t()
        for t, before, after in order.steps(len(inputs)):
            torch.addmm(sums[t], outputs[before], transposed, out=outputs[after])
            _ = outputs[after].relu_() if rectified else outputs[after].tanh_()
            order.hold(t, outputs[before], outputs[after])
    recurrent = maps.linear_later(order.before(outputs), w, b)
    return _Elman.apply(order, rectified, (outputs, w.detach()), inputs, h0, recurrent)


class _Elman(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        order: Order,
        rectified: bool,
        saved: tuple[Tensor, Tensor],
        *attached: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.order, ctx.rectified = order, rectified
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        # Copies: what is saved must not change when the outputs are changed in place.
        return order.after(saved[0]).clone(), order.last(saved[0])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, at_outputs: Tensor | None, at_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        outputs, w = ctx.saved_tensors
        order: Order = ctx.order
        after = order.after(outputs)
        d = (after > 0).to(after.dtype) if ctx.rectified else 1 - after.square()
        order.only_where_active(d)
        at_outputs = or_zeros(at_outputs, after)
        dh = or_zeros(at_last, outputs[0]) + at_outputs[order.last_step(len(d))]
        for t, earlier in order.backwards(len(d)):
            d[t].mul_(dh)
            passed = order.passed(t, dh, None if earlier is None else at_outputs[earlier])
            dh = d[t] @ w if passed is None else torch.addmm(passed, d[t], w)
        return None, None, None, d, dh, d if ctx.needs_input_grad[5] else None
