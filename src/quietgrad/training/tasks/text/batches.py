"""Texts as token ids."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.checks import SettingsWarning
from quietgrad.training.settings.tables import ModelTable
from quietgrad.training.tasks.records import ByLength, padded
from quietgrad.training.tasks.text.data import LabelledTexts

# Tables of learnt positions, by their names in transformers.
POSITIONS = ("position_embeddings", "embed_positions", "wpe")


@dataclass(frozen=True)
class TokenisedTexts(ByLength):
    """Token ids of every record, unpadded, with labels."""

    ids: tuple[NDArray[np.int64], ...]
    labels: NDArray[np.int64]
    pad_id: int

    def subset(self, indices: NDArray[np.int64]) -> TokenisedTexts:
        return TokenisedTexts(
            tuple(self.ids[i] for i in indices), self.labels[indices], self.pad_id
        )

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """input_ids and attention_mask [examples, longest], labels [examples]."""
        rows = [self.ids[i] for i in indices]
        return {
            "input_ids": padded(rows, self.pad_id).to(device),
            "attention_mask": padded([np.ones_like(row) for row in rows], 0).to(device),
            "labels": torch.from_numpy(self.labels[indices]).to(device),
        }


def tokenise(texts: LabelledTexts, tokenizer: Any, max_length: int) -> TokenisedTexts:
    """Tokenises all texts or pairs, cut at ``max_length`` tokens; segments are not told apart by
    type, which RoBERTa and its kind do not know either.
    """
    pairs = {} if texts.seconds is None else {"text_pair": list(texts.seconds)}
    encoded = tokenizer(
        list(texts.texts), **pairs, truncation=True, max_length=max_length, padding=False
    )["input_ids"]
    pad = tokenizer.pad_token_id
    return TokenisedTexts(
        tuple(np.asarray(row, dtype=np.int64) for row in encoded),
        texts.labels,
        0 if pad is None else int(pad),
    )


def fitting_length(name: str, encoder: Any, tokenizer: Any, max_length: int) -> int:
    """Checks that a model has a position for every token, and its tokenizer words: otherwise a long
    text fails in the middle of a run, or all texts are the same.

    Returns:
        ``tokens_kept``; there is a warning where that is not what was asked for.

    Raises:
        ValueError: naming model and setting.
    """
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"model.name={name!r} cannot be loaded: its tokenizer knows no words; are the "
            "tokenizer's files missing?"
        )
    kept = tokens_kept(encoder, max_length)
    if kept < max_length:
        warnings.warn(
            f"{name!r} has {kept} positions, so texts are cut at {kept} tokens in place of "
            f"model.max_length={max_length}, the default",
            SettingsWarning,
            stacklevel=2,
        )
    marks = tokenizer.num_special_tokens_to_add()
    if kept <= marks:
        raise ValueError(
            f"model.max_length={kept} leaves no room for a text beside {marks} special "
            "tokens; use more"
        )
    most = _positions(encoder)
    if kept > most:
        raise ValueError(
            f"model.max_length={max_length} exceeds the {int(most)} positions of {name!r}; use at "
            f"most {int(most)}"
        )
    return kept


def tokens_kept(encoder: nn.Module, max_length: int) -> int:
    """Of a text: ``max_length``; where that is the default, at most what the model has positions
    for.
    """
    if max_length != ModelTable.max_length:
        return max_length
    return int(min(max_length, _positions(encoder)))


def _positions(encoder: nn.Module) -> float:
    """Most tokens of a text."""
    found = math.inf
    for path, table in encoder.named_modules():
        if path.endswith(POSITIONS) and isinstance(table, nn.Embedding):
            # Where padding has a position, texts begin behind it; BART's and OPT's by an offset.
            used = 0 if table.padding_idx is None else table.padding_idx + 1
            used = max(used, int(getattr(table, "offset", 0)))
            found = min(found, table.num_embeddings - used)
    return found


def every_other(texts: TokenisedTexts) -> tuple[TokenisedTexts, TokenisedTexts]:
    """Records 0, 2, 4 ... and records 1, 3, 5 ..."""
    everyone = np.arange(len(texts))
    return texts.subset(everyone[0::2]), texts.subset(everyone[1::2])
