"""Bags of words: rows of a table, and what is made of each bag's rows.

Shape legend: b examples, one bag each, t words, d features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quietgrad.clipping.capture.escapes import several_inputs
from quietgrad.clipping.capture.routines.maps import Maps


def embedding_bag(
    maps: Maps,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """What ``F.embedding_bag`` returns, whose arguments these are; None where it is not known how
    to compute that here.

    Raises:
        NotCaptured: for bags that are given by offsets and are not one an example.
    """
    if max_norm is not None or scale_grad_by_freq or not maps.know(weight):
        return None
    if offsets is None:
        if input.dim() != 2 or len(input) != maps.examples:
            return None
        ids_bt, shares_bt = input, per_sample_weights
        inside_bt = torch.ones_like(ids_bt, dtype=torch.bool)
    else:
        ends = offsets[1:] if include_last_offset else torch.cat([offsets[1:], _length(input)])
        starts = offsets[: len(ends)]
        if len(ends) != maps.examples:
            raise several_inputs(maps.site)
        lengths = (ends - starts).unsqueeze(1)
        steps = torch.arange(max(int(lengths.max()), 1), device=input.device)
        inside_bt = steps < lengths
        places = torch.where(inside_bt, starts.unsqueeze(1) + steps, 0)
        ids_bt = input[places] if len(input) else places
        shares_bt = per_sample_weights
        if shares_bt is not None and len(input):  # of no words there are no shares either
            shares_bt = shares_bt[places]
    if padding_idx is not None:
        inside_bt = inside_bt & (ids_bt != padding_idx)
    rows_btd = maps.embedding(ids_bt.long(), weight)
    if mode == "max":
        seen = rows_btd.masked_fill(~inside_bt.unsqueeze(2), -math.inf).max(dim=1).values
        return seen.masked_fill(~inside_bt.any(dim=1, keepdim=True), 0.0)
    counted_bt = inside_bt.to(rows_btd.dtype)
    if shares_bt is not None and shares_bt.numel():
        counted_bt = torch.where(inside_bt, shares_bt, 0.0)
    if mode == "mean":
        counted_bt = counted_bt / inside_bt.sum(dim=1, keepdim=True).clamp_min(1)
    return torch.bmm(counted_bt.unsqueeze(1), rows_btd).squeeze(1)


def _length(words: Tensor) -> Tensor:
    return torch.tensor([len(words)], device=words.device)
