"""Language modelling of answers: the loss of each record, how good a model is at the next token,
and what it writes by itself.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.training.tasks.answers.pairs import TokenisedPairs
from quietgrad.training.tasks.splits import IGNORED

Decoded = Literal["none", "rouge1", "rougeL", "exact_match"]


def answer_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[examples] mean cross entropy over the answer's tokens; 0 for an example without any."""
    losses, counted = _token_losses(
        model(batch["input_ids"], batch["attention_mask"]), batch["labels"]
    )
    return losses.sum(1) / counted.sum(1).clamp_min(1)


def _token_losses(logits_btv: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
    """[b, t - 1] cross entropies of the next token, 0 where it is not learnt, and whether it is."""
    following = labels_bt[:, 1:]
    losses = F.cross_entropy(
        logits_btv[:, :-1].float().flatten(0, 1),
        following.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return losses.view(following.shape), following != IGNORED


@dataclass(frozen=True)
class AnswerScores:
    """On the answers' tokens, each predicted from those before it.

    Attributes:
        token_accuracy: share predicted right.
        perplexity: exp of the mean cross entropy.
    """

    token_accuracy: float
    perplexity: float


def answer_scores(
    model: nn.Module,
    pairs: TokenisedPairs,
    size: int,
    device: torch.device,
    chosen: NDArray[np.int64] | None = None,
) -> AnswerScores:
    """In evaluation mode and without gradients; memory grows with size x length x vocabulary."""
    was_training = model.training
    model.eval()
    right, tokens, total = 0, 0, 0.0
    wanted = np.arange(len(pairs)) if chosen is None else chosen
    with torch.no_grad():
        for part in pairs.micro_batch_indices(wanted, size):
            batch = pairs.collate(part, device)
            logits = model(batch["input_ids"], batch["attention_mask"])
            losses, counted = _token_losses(logits, batch["labels"])
            found = logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
            right += int((found & counted).sum())
            tokens += int(counted.sum())
            total += float(losses.double().sum())
    model.train(was_training)
    return AnswerScores(right / max(1, tokens), math.exp(min(700.0, total / max(1, tokens))))


def decoded_score(
    kind: str,
    classifier: nn.Module,
    tokenizer: Any,
    pairs: TokenisedPairs,
    chosen: NDArray[np.int64],
    length: int,
) -> float:
    """Mean over records of how the greedily decoded answer compares with the given one.

    Args:
        kind: "rouge1" or "rougeL" (F1 of single words, and of the longest common subsequence, Lin
            2004; against one reference, words not stemmed), or "exact_match" (after lower case,
            without punctuation and articles, as SQuAD's).
        classifier: a causal language model, as ``CausalLanguageModel``.
        tokenizer: its tokenizer.
        pairs: the records.
        chosen: indices of those to answer.
        length: most tokens of an answer.
    """
    score = {"rouge1": rouge1, "rougeL": rouge_l, "exact_match": exact_match}[kind]
    texts = written_answers(classifier, tokenizer, pairs, chosen, length)
    found = [score(text, pairs.answers[i]) for text, i in zip(texts, chosen, strict=True)]
    return float(np.mean(found))


def written_answers(
    classifier: nn.Module,
    tokenizer: Any,
    pairs: TokenisedPairs,
    chosen: NDArray[np.int64],
    length: int,
    size: int = 1,
) -> list[str]:
    """What the model writes after each prompt, the likeliest token each time.

    Args:
        classifier, tokenizer, pairs, chosen, length: as of ``decoded_score``.
        size: prompts of a batch, of similar lengths; shorter ones are padded in front.
    """
    model: Any = classifier.encoder
    was_training = classifier.training
    classifier.eval()
    device = next(classifier.parameters()).device
    found: dict[int, str] = {}
    with torch.no_grad():
        for part in pairs.micro_batch_indices(chosen, size):
            prompts = [torch.from_numpy(pairs.ids[i][: pairs.starts[i]]) for i in part]
            longest = max(map(len, prompts))
            ids = torch.full((len(part), longest), pairs.pad_id)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, longest - len(prompt) :] = prompt
                mask[row, longest - len(prompt) :] = 1
            written = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=length,
                do_sample=False,
                pad_token_id=pairs.pad_id,
                eos_token_id=pairs.end_id,
            )
            texts = tokenizer.batch_decode(written[:, longest:], skip_special_tokens=True)
            found |= dict(zip(part.tolist(), texts, strict=True))
    classifier.train(was_training)
    return [found[int(i)] for i in chosen]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def rouge1(written: str, wanted: str) -> float:
    """F1 of the words that two texts share, each as often as in both."""
    left, right = _words(written), _words(wanted)
    return _f1(sum((Counter(left) & Counter(right)).values()), len(left), len(right))


def rouge_l(written: str, wanted: str) -> float:
    """F1 of the longest sequence of words that stands, with gaps, in both texts."""
    left, right = _words(written), _words(wanted)
    lengths = [0] * (
        len(right) + 1
    )  # of the longest common subsequence with each beginning of ``right``
    for word in left:
        before = 0
        for j, other in enumerate(right, start=1):
            kept = lengths[j]
            lengths[j] = before + 1 if word == other else max(lengths[j], lengths[j - 1])
            before = kept
    return _f1(lengths[-1], len(left), len(right))


def _f1(shared: int, written: int, wanted: int) -> float:
    return 2 * shared / (written + wanted) if shared else 0.0


def exact_match(written: str, wanted: str) -> float:
    """1 if two texts are equal but for case, punctuation and articles."""
    articles = {"a", "an", "the"}
    left, right = ([w for w in _words(text) if w not in articles] for text in (written, wanted))
    return float(left == right)
