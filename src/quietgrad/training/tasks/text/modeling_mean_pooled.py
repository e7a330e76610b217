"""Text classifier of Quietgrad (differentially private training): an encoder, the mean of its token
vectors, standardised, and a linear head.

This file stands beside the weights and needs torch and transformers alone. Load the folder with
``AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class MeanPooledConfig(PretrainedConfig):
    """The encoder's configuration, and the labels."""

    model_type = "quietgrad-mean-pooled"

    def __init__(self, encoder_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Keeps the encoder's configuration as a dictionary with its ``model_type``."""
        self.encoder_config = encoder_config or {"model_type": "bert"}
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


class MeanPooledForSequenceClassification(PreTrainedModel):
    """Encoder, mean over the tokens that are not padding, layer norm without parameters, head."""

    config_class = MeanPooledConfig
    base_model_prefix = "encoder"

    def __init__(self, config: MeanPooledConfig) -> None:
        """Random weights; ``from_pretrained`` fills them."""
        super().__init__(config)
        self.encoder = build_encoder(config.encoder_config)
        self.head = nn.Linear(self.encoder.config.hidden_size, config.num_labels)  # type: ignore[union-attr,arg-type]
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
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        mean = (states.float() * mask).sum(1) / mask.sum(1).clamp_min(1)
        mean = nn.functional.layer_norm(mean, mean.shape[-1:])
        logits = self.head(mean.to(self.head.weight.dtype))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        if return_dict is False:
            return (logits,) if loss is None else (loss, logits)
        return SequenceClassifierOutput(loss=loss, logits=logits)
