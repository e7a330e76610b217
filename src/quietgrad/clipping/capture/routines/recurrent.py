"""LSTM, GRU and RNN: layers and directions one after the other, each over all its time steps.

Batches of padded and of packed sequences, either layout, initial states, projections, dropout
between layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from quietgrad.clipping.capture.escapes import sorted_beforehand
from quietgrad.clipping.capture.routines.elman import relu_layer, tanh_layer
from quietgrad.clipping.capture.routines.gru import gru_layer
from quietgrad.clipping.capture.routines.lstm import lstm_layer
from quietgrad.clipping.capture.routines.maps import Maps
from quietgrad.clipping.capture.routines.time import Order
from quietgrad.sending import sent

Layer = Callable[..., tuple[Tensor, ...]]

_LAYERS: dict[str, Layer] = {
    "lstm": lstm_layer,
    "gru": gru_layer,
    "rnn_tanh": tanh_layer,
    "rnn_relu": relu_layer,
}


def recurrent(
    routine: str, maps: Maps, packed: PackedSequence | None, args: Sequence[Any]
) -> tuple[Tensor, ...] | None:
    """What ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` returns; None where it is not
    known how to compute that here.

    Args:
        routine: its name.
        maps: makes its linear maps.
        packed: the module's own input, where it is a packed sequence: the routine is not told how
            the examples were sorted.
        args: the routine's.

    Raises:
        NotCaptured: for sequences that were sorted before they were packed: their rows may stand in
            another order than those of other layers.
    """
    if len(args) != 9:
        return None
    if packed is None:
        x, hx, weights, biased, layers, dropout, training, two_way, batch_first = args
        if x.dim() != 3:
            return None
        x_tbd, inactive = x.transpose(0, 1).contiguous() if batch_first else x, None
    else:
        if packed.sorted_indices is None and maps.examples > 1:
            raise sorted_beforehand(maps.site)
        data, batch_sizes, hx, weights, biased, layers, dropout, training, two_way = args
        own = PackedSequence(data, batch_sizes, packed.sorted_indices, packed.unsorted_indices)
        x_tbd, lengths = pad_packed_sequence(own)
        places = torch.arange(len(x_tbd), device=lengths.device).unsqueeze(1)
        inactive = sent((places >= lengths).unsqueeze(2), x_tbd.device)
    states = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
    random = bool(dropout and training and layers > 1)
    if (
        x_tbd.shape[1] != maps.examples
        or not x_tbd.numel()
        or not maps.know(*weights)
        or any(s.dtype != x_tbd.dtype for s in (*states, *weights))
        # Its forward pass runs twice then, the first time without capture: with other masks.
        or (random and maps.recording.attach_all)
    ):
        return None
    if packed is not None:
        states = tuple(_permuted(s, packed.unsorted_indices) for s in states)
    found = _layers(
        _LAYERS[routine], maps, x_tbd, states, weights, biased, two_way, inactive,
        layers, dropout if random else 0.0,
    )  # fmt: skip
    outputs, *last = found
    if packed is not None:
        last = [_permuted(s, packed.sorted_indices) for s in last]
        return _packed_as(packed, outputs, lengths), *last
    return outputs.transpose(0, 1) if batch_first else outputs, *last


def _layers(
    run: Layer,
    maps: Maps,
    x_tbd: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Tensor],
    biased: bool,
    two_way: bool,
    inactive: Tensor | None,
    layers: int,
    dropout: float,
) -> tuple[Tensor, ...]:
    """[t, b, outputs] of the last layer, and last states of all, [layers, b, h] each."""
    directions = 2 if two_way else 1
    each = len(weights) // (layers * directions)
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            output, *ends = run(
                maps,
                x_tbd,
                tuple(s[k] for s in states),
                tuple(weights[k * each : (k + 1) * each]),
                biased,
                Order(bool(direction), inactive),
            )
            outputs.append(output)
            for kept, end in zip(last, ends, strict=True):
                kept.append(end)
        x_tbd = torch.cat(outputs, dim=2) if two_way else outputs[0]
        if dropout and layer < layers - 1:
            x_tbd = F.dropout(x_tbd, dropout)
    return x_tbd, *(torch.stack(ends) for ends in last)


def _permuted(state: Tensor, order: Tensor | None) -> Tensor:
    return state if order is None else state.index_select(1, order)


def _packed_as(packed: PackedSequence, outputs_tbd: Tensor, lengths: Tensor) -> Tensor:
    """The data of a packed sequence that is sorted as this one."""
    order = packed.sorted_indices
    if order is not None:
        outputs_tbd = outputs_tbd.index_select(1, order)
        lengths = lengths.sort(descending=True).values  # as packed sequences always are
    data, _ = torch._VF._pack_padded_sequence(outputs_tbd, lengths, False)
    return data
