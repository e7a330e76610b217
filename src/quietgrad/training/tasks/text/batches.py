"""Token batches of similar lengths: a batch is cut into micro-batches after sorting by length, so
that little is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.tasks.text.data import LabelledTexts

# Tables of learnt positions, by their names in transformers.
POSITIONS = ("position_embeddings", "embed_positions", "wpe")


@dataclass(frozen=True)
class TokenisedTexts:
    """Token ids of every record, unpadded, with labels."""

    ids: tuple[NDArray[np.int64], ...]
    labels: NDArray[np.int64]
    pad_id: int

    def __len__(self) -> int:
        return len(self.ids)

    def micro_batches(
        self, indices: NDArray[np.int64], size: int, device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """Cuts the records at ``indices`` into micro-batches of at most ``size``, sorted by length,
        padded to the longest inside each.
        """
        for part in self.micro_batch_indices(indices, size):
            yield self.collate(part, device)

    def micro_batch_indices(
        self, indices: NDArray[np.int64], size: int
    ) -> Iterator[NDArray[np.int64]]:
        """The same cut, as indices of records."""
        order = indices[np.argsort([len(self.ids[i]) for i in indices], kind="stable")]
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def subset(self, indices: NDArray[np.int64]) -> TokenisedTexts:
        return TokenisedTexts(
            tuple(self.ids[i] for i in indices), self.labels[indices], self.pad_id
        )

    def middle(self, size: int) -> NDArray[np.int64]:
        """Indices of ``size`` records of median length, which stand for all."""
        order = np.argsort([len(ids) for ids in self.ids], kind="stable")
        return order[max(0, (len(order) - size) // 2) :][:size]

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """input_ids and attention_mask [examples, longest], labels [examples]."""
        longest = max((len(self.ids[i]) for i in indices), default=1)
        ids = torch.full((len(indices), longest), self.pad_id, dtype=torch.long)
        mask = torch.zeros((len(indices), longest), dtype=torch.long)
        for row, i in enumerate(indices):
            tokens = self.ids[i]
            ids[row, : len(tokens)] = torch.from_numpy(tokens)
            mask[row, : len(tokens)] = 1
        labels = torch.from_numpy(self.labels[indices])
        return {
            "input_ids": ids.to(device),
            "attention_mask": mask.to(device),
            "labels": labels.to(device),
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


def require_fitting(name: str, encoder: Any, tokenizer: Any, max_length: int) -> None:
    """Checks that a model has a position for every token, and its tokenizer words: otherwise a long
    text fails in the middle of a run, or all texts are the same.

    Raises:
        ValueError: naming model and setting.
    """
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"model.name={name!r} cannot be loaded: its tokenizer knows no words; are the "
            "tokenizer's files missing?"
        )
    marks = tokenizer.num_special_tokens_to_add()
    if max_length <= marks:
        raise ValueError(
            f"model.max_length={max_length} leaves no room for a text beside {marks} special "
            "tokens; use more"
        )
    for path, table in encoder.named_modules():
        if path.endswith(POSITIONS) and isinstance(table, nn.Embedding):
            # Where padding has a position, texts begin behind it.
            places = table.num_embeddings - (-1 if table.padding_idx is None else table.padding_idx)
            if max_length >= places:
                raise ValueError(
                    f"model.max_length={max_length} exceeds the {places - 1} positions of "
                    f"{name!r}; use at most {places - 1}"
                )


def every_other(texts: TokenisedTexts) -> tuple[TokenisedTexts, TokenisedTexts]:
    """Records 0, 2, 4 ... and records 1, 3, 5 ..."""
    everyone = np.arange(len(texts))
    return texts.subset(everyone[0::2]), texts.subset(everyone[1::2])
