"""The head of this library's own: on the mean of an encoder's token vectors; and folders that hold
an encoder with it (``modeling_mean_pooled``).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE


class MeanPooledClassifier(nn.Module):
    """Encoder, mean over the tokens that are not padding, standardisation of the mean, linear head.

    Sentence encoders are trained for the mean of their token vectors, so a linear head on it starts
    from good features.
    """

    def __init__(self, encoder: nn.Module, width: int, num_labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, num_labels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[examples, tokens] ids and mask to [examples, labels] logits."""
        states_btd = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state
        return self.head(mean_over_tokens(states_btd, attention_mask).to(self.head.weight.dtype))


def mean_over_tokens(states_btd: Tensor, mask_bt: Tensor) -> Tensor:
    """[b, d] mean over the tokens that are not padding, standardised over d, in float32."""
    mean_bd = plain_mean_over_tokens(states_btd, mask_bt)
    return F.layer_norm(mean_bd, mean_bd.shape[-1:])


def plain_mean_over_tokens(states_btd: Tensor, mask_bt: Tensor) -> Tensor:
    """[b, d] mean over the tokens that are not padding, in float32."""
    mask_bt1 = mask_bt.unsqueeze(-1).float()
    return (states_btd.float() * mask_bt1).sum(1) / mask_bt1.sum(1).clamp_min(1)


def is_mean_pooled(name: str) -> bool:
    """Whether a folder holds an encoder with this library's own head (``save_classifier``)."""
    described = Path(name) / DESCRIPTION_FILE
    if not described.is_file():
        return False
    about = json.loads(described.read_text(encoding="utf-8"))
    return bool(about.get("head") == "mean" and about.get("whole"))


def load_mean_pooled(folder: str, attention: str | None = None) -> MeanPooledClassifier:
    """The classifier in such a folder, head and all."""
    from quietgrad.training.tasks.text.modeling_mean_pooled import (
        MeanPooledForSequenceClassification,
    )

    whole: Any = MeanPooledForSequenceClassification.from_pretrained(folder)
    if attention:
        whole.encoder.set_attn_implementation(attention)
    classifier = MeanPooledClassifier(
        whole.encoder, whole.encoder.config.hidden_size, whole.config.num_labels
    )
    classifier.head = whole.head
    return classifier


@functools.cache
def register_mean_pooled() -> None:
    """transformers then knows such folders in this process, and does not ask whether to trust the
    code beside their weights, which it would not run.
    """
    import transformers

    from quietgrad.training.tasks.text.modeling_mean_pooled import (
        MeanPooledConfig,
        MeanPooledForSequenceClassification,
    )

    transformers.AutoConfig.register(MeanPooledConfig.model_type, MeanPooledConfig, exist_ok=True)
    transformers.AutoModelForSequenceClassification.register(
        MeanPooledConfig, MeanPooledForSequenceClassification, exist_ok=True
    )
