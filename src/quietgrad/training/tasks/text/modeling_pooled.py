"""Text classifier of Quietgrad (differentially private training): an encoder, features pooled from
its token vectors, and a linear head.

This file stands beside the weights and needs torch and transformers alone. Load the folder with
``AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class PooledConfig(PretrainedConfig):
    """The encoder's configuration, how its token vectors are pooled, and the labels."""

    model_type = "quietgrad-pooled"

    def __init__(
        self, encoder_config: dict[str, Any] | None = None, pooling: str = "mean", **kwargs: Any
    ) -> None:
        """Keeps the encoder's configuration as a dictionary with its ``model_type``; ``pooling`` is
        "mean" or "layers".
        """
        self.encoder_config = encoder_config or {"model_type": "bert"}
        self.pooling = pooling
        super().__init__(**kwargs)


def build_encoder(settings: dict[str, Any]) -> nn.Module:
    """An encoder with random weights, without a pooling layer where its class allows that."""
    values = dict(settings)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    try:
        encoder: nn.Module = AutoModel.from_config(config, add_pooling_layer=False)
    except TypeError:
        encoder = AutoModel.from_config(config)
    return encoder


def standardised(part: torch.Tensor) -> torch.Tensor:
    """Layer norm without parameters."""
    return nn.functional.layer_norm(part, part.shape[-1:])


def pooled(hidden_states: tuple[torch.Tensor, ...], mask: torch.Tensor, how: str) -> torch.Tensor:
    """What the head reads: "mean" is that of the last layer's tokens, standardised; "layers" has
    the means of the upper half of the layers and the maximum of the last, each standardised and
    squashed by tanh, all together of length 1.
    """
    first = (len(hidden_states) - 1) // 2 if how == "layers" else -1
    chosen = hidden_states[first:]
    mask = mask.unsqueeze(-1).float()
    parts = [(states.float() * mask).sum(1) / mask.sum(1).clamp_min(1) for states in chosen]
    if how != "layers":
        return standardised(parts[0])
    parts.append(chosen[-1].float().masked_fill(mask == 0, -1e4).amax(1))
    whole = torch.cat([standardised(part).tanh() for part in parts], dim=-1)
    return nn.functional.normalize(whole, dim=-1)


class PooledForSequenceClassification(PreTrainedModel):
    """Encoder, pooled features, head."""

    config_class = PooledConfig
    base_model_prefix = "encoder"

    def __init__(self, config: PooledConfig) -> None:
        """Random weights; ``from_pretrained`` fills them."""
        super().__init__(config)
        self.encoder = build_encoder(config.encoder_config)
        inner: Any = self.encoder.config
        depth = int(inner.num_hidden_layers)
        layers = config.pooling == "layers"
        width = inner.hidden_size * (depth - depth // 2 + 2 if layers else 1)
        labels: int = config.num_labels  # type: ignore[assignment]
        self.head = nn.Linear(width, labels, bias=not layers)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> Any:
        """Logits [examples, labels], and the mean cross entropy where labels are given; segments
        were not told apart in training.
        """
        if input_ids is None:
            raise ValueError("input_ids are needed")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        found = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True
        )
        states = (*found.hidden_states[:-1], found.last_hidden_state)
        read = pooled(states, attention_mask, self.config.pooling)
        logits = self.head(read.to(self.head.weight.dtype))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return SequenceClassifierOutput(loss=loss, logits=logits)
