"""The head of this library's own: on features pooled from an encoder's token vectors; and folders
that hold an encoder with it (``modeling_pooled``).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.tasks.loaded import POOLED
from quietgrad.training.tasks.text.pooling import Pooling, feature_width, features


class PooledClassifier(nn.Module):
    """Encoder, features pooled from its token vectors (``pooling``), linear head.

    On "layers" the head has no bias. Beside features of length 1 a bias has half of a gradient's
    squared length, and so of the clipping norm; what the features of all texts have in common, a
    third of them, serves as one.
    """

    def __init__(self, encoder: nn.Module, pooling: Pooling, num_labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling: Pooling = pooling
        width = feature_width(encoder.config, pooling)
        self.head = nn.Linear(width, num_labels, bias=pooling == "mean")
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[examples, tokens] ids and mask to [examples, labels] logits."""
        found = features(self.encoder, self.pooling, input_ids, attention_mask)
        return self.head(found.to(self.head.weight.dtype))


def is_pooled(name: str) -> bool:
    """Whether a folder holds an encoder with this library's own head (``save_classifier``)."""
    described = Path(name) / DESCRIPTION_FILE
    if not described.is_file():
        return False
    about = json.loads(described.read_text(encoding="utf-8"))
    return bool(about.get("head") in POOLED and about.get("whole"))


def load_pooled(folder: str, attention: str | None = None) -> PooledClassifier:
    """The classifier in such a folder, head and all."""
    from quietgrad.training.tasks.text.modeling_pooled import (
        PooledForSequenceClassification,
    )

    whole: Any = PooledForSequenceClassification.from_pretrained(folder)
    if attention:
        whole.encoder.set_attn_implementation(attention)
    classifier = PooledClassifier(whole.encoder, whole.config.pooling, whole.config.num_labels)
    classifier.head = whole.head
    return classifier


@functools.cache
def register_pooled() -> None:
    """transformers then knows such folders in this process, and does not ask whether to trust the
    code beside their weights, which it would not run.
    """
    import transformers

    from quietgrad.training.tasks.text.modeling_pooled import (
        PooledConfig,
        PooledForSequenceClassification,
    )

    transformers.AutoConfig.register(PooledConfig.model_type, PooledConfig, exist_ok=True)
    transformers.AutoModelForSequenceClassification.register(
        PooledConfig, PooledForSequenceClassification, exist_ok=True
    )
