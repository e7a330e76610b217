"""One layer and direction of an LSTM over all time steps.

The gradient at its gates, position by position, is what its weights' per-example gradients are made
of; it is formed in one pass back through time that computes no weight gradient. Elementwise
derivatives are taken for all steps at once before that pass.

Shape legend: t steps, b examples, h cells, p outputs (h, or the width of the projection).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quietgrad.clipping.capture.routines.maps import Maps
from quietgrad.clipping.capture.routines.time import Order, or_zeros


def lstm_layer(
    maps: Maps,
    x_tbd: Tensor,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    biased: bool,
    order: Order,
) -> tuple[Tensor, ...]:
    """[t, b, p] outputs, [b, p] last output, [b, h] last cell."""
    w_in, w, *rest = weights
    b_in, b = rest[:2] if biased else (None, None)
    w_out = rest[-1] if len(rest) % 2 else None
    inputs = maps.linear_over_time(x_tbd, w_in, b_in)
    with torch.no_grad():
        run = _forward(inputs, states[0], states[1], w, b, w_out, order)
    _, _, cut, outputs, _ = run
    recurrent = maps.linear_later(order.before(outputs), w, b)
    projected = None
    if cut is not None and w_out is not None:
        projected = maps.linear_later(cut, w_out, None)
    saved = (*run, w.detach(), None if w_out is None else w_out.detach())
    return _Lstm.apply(order, saved, inputs, *states, recurrent, projected)


def _forward(
    inputs: Tensor,
    h0: Tensor,
    c0: Tensor,
    w: Tensor,
    b: Tensor | None,
    w_out: Tensor | None,
    order: Order,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    steps, h = len(inputs), inputs.shape[2] // 4
    gates = inputs.clone() if b is None else inputs + b
    outputs, cells = order.states(h0, steps), order.states(c0, steps)
    bounded = torch.empty_like(cells[1:])  # tanh(c)
    cut = None if w_out is None else torch.empty_like(bounded)  # o tanh(c)
    hidden = order.after(outputs) if cut is None else cut
    gate_views = list(
        zip(gates, gates[..., : 2 * h], gates[..., 2 * h : 3 * h], gates[..., 3 * h :], strict=True)
    )
    transposed = w.t()
    for t, before, after in order.steps(steps):
        gate, first, middle, last = gate_views[t]
        gate.addmm_(outputs[before], transposed)
        first.sigmoid_()
        middle.tanh_()
        last.sigmoid_()
        torch.mul(first[:, h:], cells[before], out=cells[after]).addcmul_(first[:, :h], middle)
        torch.tanh(cells[after], out=bounded[t])
        torch.mul(last, bounded[t], out=hidden[t])
        if cut is not None and w_out is not None:
            torch.mm(cut[t], w_out.t(), out=outputs[after])
        order.hold(t, cells[before], cells[after])
        order.hold(t, outputs[before], outputs[after])
    return gates, bounded, cut, outputs, cells


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, order: Order, saved: tuple[Tensor | None, ...], *attached: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.order = order
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        outputs, cells = saved[3], saved[4]
        assert outputs is not None and cells is not None
        # Copies: what is saved must not change when the outputs are changed in place.
        return order.after(outputs).clone(), order.last(outputs), order.last(cells)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, at_outputs: Tensor | None, at_last: Tensor | None, at_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        gates, bounded, _, outputs, cells, w, w_out = ctx.saved_tensors
        order: Order = ctx.order
        steps, h = len(gates), gates.shape[2] // 4
        i, f, n, o = gates.chunk(4, dim=2)
        # Of the gates: derivative by the cell (three of them) or by the output (the last).
        d = torch.cat(
            [
                n * i * (1 - i),
                order.before(cells) * f * (1 - f),
                i * (1 - n.square()),
                bounded * o * (1 - o),
            ],
            dim=2,
        )
        by_cell = o * (1 - bounded.square())
        order.only_where_active(d, by_cell)
        forget = order.one_where_inactive(f)
        of_cell, of_output = d[..., : 3 * h].unflatten(2, (3, h)), d[..., 3 * h :]
        at_outputs = or_zeros(at_outputs, order.after(outputs))
        through = (
            torch.empty_like(at_outputs) if w_out is not None else None
        )  # gradients at the projection
        dh = or_zeros(at_last, outputs[0]) + at_outputs[order.last_step(steps)]
        dc = or_zeros(at_cell, cells[0]).clone()
        for t, earlier in order.backwards(steps):
            above = dh
            if through is not None:
                through[t] = dh
                above = dh @ w_out
            dc.addcmul_(above, by_cell[t])
            of_cell[t].mul_(dc.unsqueeze(1))
            of_output[t].mul_(above)
            dc.mul_(forget[t])
            passed = order.passed(t, dh, None if earlier is None else at_outputs[earlier])
            dh = d[t] @ w if passed is None else torch.addmm(passed, d[t], w)
        if not ctx.needs_input_grad[6]:
            through = None
        elif through is not None:
            order.only_where_active(through)
        return None, None, d, dh, dc, d if ctx.needs_input_grad[5] else None, through
