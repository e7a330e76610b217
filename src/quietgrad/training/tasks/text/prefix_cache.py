"""The frozen lower part of an encoder, run once per record instead of once per step.

Where only the top blocks (or only the head) train and nothing is random below them, the hidden
states that enter the lowest trainable block are a fixed function of the record. They are computed
once, and training then costs the upper blocks alone. Privacy is untouched: per-record
preprocessing.
Memory: records x tokens x width, in the training precision; for a head alone records x what it
reads, in float32. Serves BERT-like encoders with eager
attention; others train without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.tasks.records import Told, unheard
from quietgrad.training.tasks.text.batches import TokenisedTexts
from quietgrad.training.tasks.text.pooled import PooledClassifier
from quietgrad.training.tasks.text.pooling import Pooling, feature_width, features, mean_over_tokens

BLOCK_EXAMPLES = 128
LARGEST_DIFFERENCE = 2e-2  # of logits and features, relative: bfloat16 rounding at most


class UpperBlocks(nn.Module):
    """The trainable top of a classifier: blocks and head, shared with the classifier, applied to
    cached hidden states; without blocks, the head, applied to cached features.
    """

    def __init__(self, blocks: list[nn.Module], head: nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, states_btd: Tensor, attention_mask: Tensor) -> Tensor:
        """[examples, tokens, width] states and [examples, tokens] mask to [examples, labels]
        logits; without blocks the states are [examples, 1, width] features.
        """
        if not len(self.blocks):
            return self.head(states_btd.squeeze(1).to(self.head.weight.dtype))
        states = states_btd
        additive = (1.0 - attention_mask[:, None, None, :].to(states.dtype)) * torch.finfo(
            states.dtype
        ).min
        for block in self.blocks:
            output = block(states, additive)
            states = output[0] if isinstance(output, tuple) else output
        return self.head(mean_over_tokens(states, attention_mask).to(self.head.weight.dtype))


@dataclass(frozen=True)
class PrefixCache:
    """Cached states of all training records, and the model that goes on from them.

    Attributes:
        upper: blocks and head above the cache.
        states: [tokens of all records, width], on the CPU; where only the head trains, [records,
            width] of what it reads.
        offsets: [records + 1], where each record's states begin.
        texts: the records.
        pooled: whether only the head trains: each record is then one state, its features.
    """

    upper: UpperBlocks
    states: Tensor
    offsets: NDArray[np.int64]
    texts: TokenisedTexts
    pooled: bool

    def collate(self, indices: NDArray[np.int64], device: torch.device) -> dict[str, Tensor]:
        """states [examples, longest, width], attention_mask [examples,
        longest], labels [examples].
        """
        if self.pooled:
            chosen = torch.from_numpy(indices)
            return {
                "states": self.states[chosen].unsqueeze(1).to(device),
                "attention_mask": torch.ones(len(indices), 1, dtype=torch.long, device=device),
                "labels": torch.from_numpy(self.texts.labels[indices]).to(device),
            }
        batch = self.texts.collate(indices, torch.device("cpu"))
        mask = batch["attention_mask"]
        states = torch.zeros(*mask.shape, self.states.shape[1], dtype=self.states.dtype)
        for row, i in enumerate(indices):
            tokens = self.states[self.offsets[i] : self.offsets[i + 1]]
            states[row, : len(tokens)] = tokens
        return {
            "states": states.to(device).float(),
            "attention_mask": mask.to(device),
            "labels": batch["labels"].to(device),
        }


def build_prefix_cache(
    classifier: nn.Module,
    texts: TokenisedTexts,
    probe: TokenisedTexts,
    device: torch.device,
    precision: Any,
    told: Told = unheard,
) -> PrefixCache | None:
    """Computes the cache, or returns None where it does not apply.

    Args:
        classifier: model to train; only parameters of its top blocks and head may be trainable.
        texts: training records.
        probe: public records on which the cached path is compared with the whole model.
        device: where the classifier is.
        precision: () -> context manager of the training precision.
        told: hears how many records are done.

    Returns:
        The cache; None for other architectures, or if the lowest block trains, or if the comparison
        fails.
    """
    found = _split(classifier)
    if found is None:
        return None
    encoder, blocks, first = found
    assert isinstance(classifier, PooledClassifier)
    upper = UpperBlocks(blocks[first:], classifier.head)
    was_training = classifier.training
    classifier.eval()
    try:
        with torch.no_grad(), precision():
            if not _agrees(classifier, upper, encoder, first, probe, device):
                return None
            if first == len(blocks):
                states, offsets = _all_features(encoder, classifier.pooling, texts, told, device)
            else:
                states, offsets = _all_states(encoder, first, texts, told, device)
    finally:
        classifier.train(was_training)
    upper.train(was_training)
    return PrefixCache(upper, states, offsets, texts, pooled=first == len(blocks))


def _split(classifier: nn.Module) -> tuple[nn.Module, list[nn.Module], int] | None:
    """The bare encoder, its blocks, and the index of the lowest block with a
    trainable parameter.
    """
    if not isinstance(classifier, PooledClassifier):
        return None
    encoder: Any = classifier.encoder
    if hasattr(encoder, "get_base_model"):
        encoder = encoder.get_base_model()  # peft
    if type(encoder).__name__ not in ("BertModel", "RobertaModel"):
        return None
    if getattr(encoder.config, "_attn_implementation", None) != "eager":
        return None
    if any(isinstance(m, nn.Dropout) and m.p > 0 for m in encoder.modules()):
        return None
    blocks = list(encoder.encoder.layer)
    inside = {id(p): index for index, block in enumerate(blocks) for p in block.parameters()}
    trainable = [p for p in encoder.parameters() if p.requires_grad]
    if any(id(p) not in inside for p in trainable):
        return None
    first = min((inside[id(p)] for p in trainable), default=len(blocks))
    if first < len(blocks) and classifier.pooling != "mean":
        return None  # its head reads layers below those that train, too
    return (encoder, blocks, first) if first > 0 else None


class _StoppedEarly(Exception):
    """Carries the states out of a forward pass whose upper part is not needed."""


def _states_below(encoder: Any, first: int, batch: dict[str, Tensor]) -> Tensor:
    """Hidden states that enter block ``first``; the blocks above are not run."""
    blocks = encoder.encoder.layer
    caught: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(args[0] if args else kwargs["hidden_states"])
        raise _StoppedEarly

    handle = blocks[first].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    except _StoppedEarly:
        pass
    finally:
        handle.remove()
    return caught[0]


def _agrees(
    classifier: PooledClassifier,
    upper: UpperBlocks,
    encoder: Any,
    first: int,
    probe: TokenisedTexts,
    device: torch.device,
) -> bool:
    """Whether cached path and whole model give the same logits on a few public records, with a head
    that is not zero.
    """
    batch = probe.collate(np.arange(min(8, len(probe))), device)
    saved = classifier.head.weight.detach().clone()
    classifier.head.weight.copy_(
        torch.linspace(-1, 1, saved.numel(), device=device).reshape(saved.shape).sin()
    )
    try:
        whole = classifier(batch["input_ids"], batch["attention_mask"]).float()
        if len(upper.blocks):
            states = _states_below(encoder, first, batch)
        else:
            states = _features(encoder, classifier.pooling, batch).unsqueeze(1)
        cached = upper(states.float(), batch["attention_mask"]).float()
    except (TypeError, AttributeError, KeyError, IndexError):
        return False  # an architecture whose blocks are called differently
    finally:
        classifier.head.weight.copy_(saved)
        torch.clear_autocast_cache()  # a caller's autocast would go on with the other weights
    return bool((whole - cached).norm() <= LARGEST_DIFFERENCE * whole.norm())


def _features(encoder: Any, pooling: Pooling, batch: dict[str, Tensor]) -> Tensor:
    return features(encoder, pooling, batch["input_ids"], batch["attention_mask"])


def _all_features(
    encoder: Any, pooling: Pooling, texts: TokenisedTexts, told: Told, device: torch.device
) -> tuple[Tensor, NDArray[np.int64]]:
    """[records, width] of what the head reads."""
    found = torch.empty(len(texts), feature_width(encoder.config, pooling))
    for part in _by_length(_lengths(texts), told):
        made = _features(encoder, pooling, texts.collate(part, device))
        found[torch.from_numpy(part)] = made.cpu()
    return found, np.arange(len(texts) + 1)


def _all_states(
    encoder: Any, first: int, texts: TokenisedTexts, told: Told, device: torch.device
) -> tuple[Tensor, NDArray[np.int64]]:
    """[tokens, width] of what enters block ``first``, and where each record begins."""
    lengths = _lengths(texts)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
    states = torch.empty(int(offsets[-1]), int(encoder.config.hidden_size), dtype=dtype)
    for part in _by_length(lengths, told):
        batch = texts.collate(part, device)
        found = _states_below(encoder, first, batch).to("cpu", dtype)
        for row, i in enumerate(part):
            states[offsets[i] : offsets[i + 1]] = found[row, : lengths[i]]
    return states, offsets


def _lengths(texts: TokenisedTexts) -> NDArray[np.int64]:
    return np.array([len(row) for row in texts.ids], dtype=np.int64)


def _by_length(lengths: NDArray[np.int64], told: Told) -> Iterator[NDArray[np.int64]]:
    """Blocks of records of about one length, the longest first: what is left then takes no longer
    than it looks.
    """
    order = np.argsort(-lengths, kind="stable")
    for start in range(0, len(order), BLOCK_EXAMPLES):
        yield order[start : start + BLOCK_EXAMPLES]
        told(min(start + BLOCK_EXAMPLES, len(order)), len(order))
