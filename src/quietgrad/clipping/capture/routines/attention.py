"""Multi-head attention: projections in, scores, projection out.

Shape legend: b examples, l queries, s keys, e features, n heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.clipping.capture.routines.maps import Maps


def attention(
    maps: Maps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None] | None:
    """What ``F.multi_head_attention_forward`` returns, whose arguments these are (time first); None
    where it is not known how to compute that here.
    """
    own = (in_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, out_proj_weight)
    biases = (in_proj_bias, bias_k, bias_v, out_proj_bias)
    if (
        any(x.dim() != 3 or x.shape[1] != maps.examples for x in (query, key, value))
        or any(x is not None for x in others.values())  # keys and values of elsewhere
        or not maps.know(*own, *biases)
        or any(w is not None and w.dtype != query.dtype for w in (*own, *biases, key, value))
        # Its forward pass runs twice then, the first time without capture: with other masks.
        or (dropout_p > 0 and training and maps.recording.attach_all)
        or (attn_mask is not None and attn_mask.dim() not in (2, 3))
        or (is_causal and attn_mask is None)
    ):
        return None
    # The routine's own reading of the hint.
    is_causal = is_causal and key_padding_mask is None and not need_weights
    if is_causal:
        attn_mask = None
    weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    q, k, v = _projected(maps, [query, key, value], in_proj_weight, weights, in_proj_bias)
    extra = 0
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, maps.repeated(bias_k)], dim=1)
        v = torch.cat([v, maps.repeated(bias_v)], dim=1)
        extra += 1
    q, k, v = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra += 1
    mask = _merged(attn_mask, key_padding_mask, num_heads, extra, query.dtype)
    dropout = dropout_p if training else 0.0
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[3])) @ k.transpose(2, 3)
        shares = (scores if mask is None else scores + mask).softmax(dim=3)
        if dropout:
            shares = F.dropout(shares, dropout)
        mixed = shares @ v
    else:
        shares = None
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    y = maps.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    if shares is not None and average_attn_weights:
        shares = shares.mean(dim=1)
    return y.transpose(0, 1), shares


def _projected(
    maps: Maps,
    inputs_tbe: list[Tensor],
    weight: Tensor | None,
    separate: tuple[Tensor | None, ...],
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    """[b, l or s, e] queries, keys and values."""
    query, key, value = inputs_tbe
    if weight is not None and query is key and key is value:
        return maps.linear(query.transpose(0, 1), weight, bias).chunk(3, dim=2)
    inputs = [x.transpose(0, 1) for x in inputs_tbe]
    if weight is not None:
        return tuple(maps.stacked(inputs, weight, bias))
    pairs = zip(inputs, separate, strict=True)
    found = [maps.linear(x, own, None) for x, own in pairs if own is not None]
    return tuple(found if bias is None else maps.shifted(found, bias))


def _merged(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    heads: int,
    extra: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """[b or 1, n or 1, l or 1, s] what is added to the scores; ``extra`` keys are open to all."""
    found = []
    if attn_mask is not None:
        found.append(
            attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, heads))
        )
    if key_padding_mask is not None:
        found.append(key_padding_mask[:, None, None])
    if not found:
        return None
    masks = [
        torch.zeros_like(m, dtype=dtype).masked_fill_(m, -math.inf) if m.dtype == torch.bool else m
        for m in found
    ]
    return F.pad(masks[0] if len(masks) == 1 else masks[0] + masks[1], (0, extra))
