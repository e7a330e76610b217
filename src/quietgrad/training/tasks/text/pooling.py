"""What a head reads of an encoder's token vectors: fixed functions of one record each, with nothing
that was fitted to data, so that they cost no privacy.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Pooling = Literal["mean", "layers"]
BELOW_ALL = -1e4  # what padding counts as in a maximum; finite, for a row that is all padding


def features(encoder: Any, pooling: Pooling, input_ids: Tensor, mask_bt: Tensor) -> Tensor:
    """[b, width] what the head reads, in float32, of [b, t] token ids and their mask."""
    if pooling == "mean":
        states = encoder(input_ids=input_ids, attention_mask=mask_bt).last_hidden_state
        return mean_over_tokens(states, mask_bt)
    found = encoder(input_ids=input_ids, attention_mask=mask_bt, output_hidden_states=True)
    return upper_layers((*found.hidden_states[:-1], found.last_hidden_state), mask_bt)


def feature_width(config: Any, pooling: Pooling) -> int:
    """How many numbers ``features`` has, by an encoder's configuration."""
    width, depth = int(config.hidden_size), int(config.num_hidden_layers)
    return width if pooling == "mean" else width * (depth - depth // 2 + 2)


def mean_over_tokens(states_btd: Tensor, mask_bt: Tensor) -> Tensor:
    """[b, d] mean over the tokens that are not padding, standardised over d, in float32."""
    mean_bd = plain_mean_over_tokens(states_btd, mask_bt)
    return F.layer_norm(mean_bd, mean_bd.shape[-1:])


def plain_mean_over_tokens(states_btd: Tensor, mask_bt: Tensor) -> Tensor:
    """[b, d] mean over the tokens that are not padding, in float32."""
    mask_bt1 = mask_bt.unsqueeze(-1).float()
    return (states_btd.float() * mask_bt1).sum(1) / mask_bt1.sum(1).clamp_min(1)


def upper_layers(hidden_states: tuple[Tensor, ...], mask_bt: Tensor) -> Tensor:
    """[b, parts * d] of the upper half of the layers, the middle one included: each one's mean over
    tokens, and the last one's maximum over tokens, standardised one by one and squashed by tanh;
    the whole has length 1.

    A sentence encoder's last layer is made for what a text is about; how it is said (tone, doubt,
    irony) is easier to read below it, and a single strong word in the maximum. A few numbers are
    large in every text, and would take most of the length: tanh leaves them less of it. Length 1
    keeps a gradient near the clipping norm.

    Args:
        hidden_states: of the embeddings and of every layer, each [b, t, d].
        mask_bt: 1 where there is a token, 0 where there is padding.
    """
    last = hidden_states[-1].float()
    chosen = hidden_states[(len(hidden_states) - 1) // 2 :]
    parts = [plain_mean_over_tokens(states, mask_bt) for states in chosen]
    parts.append(last.masked_fill(mask_bt.unsqueeze(-1) == 0, BELOW_ALL).amax(1))
    whole = torch.cat([F.layer_norm(part, part.shape[-1:]).tanh() for part in parts], dim=-1)
    return F.normalize(whole, dim=-1)
