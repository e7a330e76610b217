"""One layer and direction of a GRU over all time steps; see ``lstm``.

Shape legend: t steps, b examples, h cells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quietgrad.clipping.capture.routines.maps import Maps
from quietgrad.clipping.capture.routines.time import Order, or_zeros


def gru_layer(
    maps: Maps,
    x_tbd: Tensor,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    biased: bool,
    order: Order,
) -> tuple[Tensor, ...]:
    """[t, b, h] outputs, [b, h] last output."""
    w_in, w, *rest = weights
    b_in, b = rest if biased else (None, None)
    inputs = maps.linear_over_time(x_tbd, w_in, b_in)
    with torch.no_grad():
        run = _forward(inputs, states[0], w, b, order)
    recurrent = maps.linear_later(order.before(run[-1]), w, b)
    return _Gru.apply(order, (*run, w.detach()), inputs, *states, recurrent)


def _forward(
    inputs: Tensor, h0: Tensor, w: Tensor, b: Tensor | None, order: Order
) -> tuple[Tensor, ...]:
    steps, h = len(inputs), inputs.shape[2] // 3
    gates = inputs.clone()  # becomes reset and update gates and the new content
    recalled = inputs.new_empty(steps, *h0.shape)  # W h + b of the content
    outputs = order.states(h0, steps)
    transposed = w.t()
    for t, before, after in order.steps(steps):
        past = (
            outputs[before] @ transposed
            if b is None
            else torch.addmm(b, outputs[before], transposed)
        )
        first, new = gates[t, :, : 2 * h], gates[t, :, 2 * h :]
        first.add_(past[:, : 2 * h]).sigmoid_()
        recalled[t] = past[:, 2 * h :]
        new.addcmul_(first[:, :h], recalled[t]).tanh_()
        torch.lerp(new, outputs[before], first[:, h:], out=outputs[after])
        order.hold(t, outputs[before], outputs[after])
    return gates, recalled, outputs


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Order, saved: tuple[Tensor, ...], *attached: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.order = order
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        outputs = saved[2]
        # Copies: what is saved must not change when the outputs are changed in place.
        return order.after(outputs).clone(), order.last(outputs)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, at_outputs: Tensor | None, at_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gates, recalled, outputs, w = ctx.saved_tensors
        order: Order = ctx.order
        steps, h = len(gates), outputs.shape[2]
        r, z, n = gates.chunk(3, dim=2)
        by_new = (1 - z) * (1 - n.square())
        # Of reset, update and the recalled content, by the output.
        d = torch.cat(
            [
                by_new * recalled * r * (1 - r),
                (order.before(outputs) - n) * z * (1 - z),
                by_new * r,
            ],
            dim=2,
        )
        order.only_where_active(d, by_new)
        kept, of_output = order.one_where_inactive(z), d.unflatten(2, (3, h))
        at_outputs = or_zeros(at_outputs, order.after(outputs))
        dh = or_zeros(at_last, outputs[0]) + at_outputs[order.last_step(steps)]
        for t, earlier in order.backwards(steps):
            of_output[t].mul_(dh.unsqueeze(1))
            by_new[t].mul_(dh)
            passed = dh * kept[t]
            if earlier is not None:
                passed += at_outputs[earlier]
            dh = torch.addmm(passed, d[t], w)
        at_inputs = torch.cat([d[..., : 2 * h], by_new], dim=2)
        return None, None, at_inputs, dh, d if ctx.needs_input_grad[4] else None
