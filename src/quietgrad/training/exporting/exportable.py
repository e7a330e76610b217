"""A finished model as a function of tensors, with what one needs to know to call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

BATCH, LENGTH = "batch", "length"
SHORTEST = 2  # tokens


@dataclass(frozen=True)
class Exportable:
    """What leaves a run for a program without this library.

    Attributes:
        module: in evaluation mode, on the CPU; takes the inputs in order and returns logits.
        inputs: name -> made-up input, [2, ...], in order.
        axes: name -> names of the leading dimensions that may differ: "batch", or "batch" and
            "length".
        labels: of the logits' last dimension; empty for a language model.
        longest: tokens that the model has positions for; 0 where there is no length.
        facts: what else a caller needs: how inputs are made.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    labels: list[str]
    longest: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def of_tokens(classifier: nn.Module, labels: list[str], facts: dict[str, Any]) -> Exportable:
    """Of a model that reads input_ids and attention_mask; adapters are merged into it.

    Args:
        classifier: with ``encoder``, as ``load_saved`` returns it; it is changed.
        labels, facts: as in ``Exportable``.
    """
    holder = cast(Any, classifier)
    if hasattr(holder.encoder, "merge_and_unload"):
        holder.encoder = holder.encoder.merge_and_unload()
    config = holder.encoder.config
    longest = int(getattr(config, "max_position_embeddings", 0) or 512)
    if "roberta" in str(getattr(config, "model_type", "")):
        longest -= 2  # its positions begin behind the padding's
    ids = torch.randint(0, int(config.vocab_size), (2, min(8, longest)),
                        generator=torch.Generator().manual_seed(0))  # fmt: skip
    mask = torch.ones_like(ids)
    mask[1, ids.shape[1] // 2 :] = 0
    axes = dict.fromkeys(("input_ids", "attention_mask"), (BATCH, LENGTH))
    inputs = {"input_ids": ids, "attention_mask": mask}
    return Exportable(classifier.eval(), inputs, axes, labels, longest, facts)


def with_shape(given: Exportable, batch: int, length: int) -> tuple[Tensor, ...]:
    """The made-up inputs in another batch size and, of tokens, another length."""
    found = []
    for name, value in given.inputs.items():
        rows = torch.cat([value] * -(-batch // len(value)))[:batch]
        if LENGTH in given.axes[name]:
            rows = torch.cat([rows] * -(-length // rows.shape[1]), dim=1)[:, :length]
            if name == "attention_mask":
                rows = rows.sort(dim=1, descending=True).values
        found.append(rows.contiguous())
    return tuple(found)
