"""A head that does not train privately: fitted to public records before private training begins, or
drawn at random; and frozen.

A head that starts from zero lets no gradient through to the layers below, and then takes nearly all
of the clipping norm for itself. Fitted to records that are public anyway (the validation part is
declared so), it leaves the whole clipping norm to the layers that train privately. Without such
records a random one serves: the layers below learn to meet it (Hoffer, Hubara and Soudry 2018, "Fix
your classifier").
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quietgrad.training.tasks.text.batches import TokenisedTexts
from quietgrad.training.tasks.text.pooled import PooledClassifier
from quietgrad.training.tasks.text.pooling import features

DECAY = 1e-3  # ridge penalty: a few thousand records, a few hundred features


def fit_public_head(
    classifier: torch.nn.Module, public: TokenisedTexts, device: torch.device, steps: int
) -> None:
    """Fits the linear head to the frozen encoder's features of public records, by L-BFGS, and
    freezes it.

    Args:
        classifier: with a head on pooled features.
        public: records whose labels are public.
        device: where the classifier is.
        steps: iterations of L-BFGS.

    Raises:
        ValueError: for another kind of classifier.
    """
    if not isinstance(classifier, PooledClassifier):
        raise ValueError(
            "model.public_head_steps needs a head on pooled features; set model.head to 'mean' or "
            "'layers'"
        )
    inputs, labels = _inputs(classifier, public, device)
    head = classifier.head
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(head(inputs), labels) + DECAY * head.weight.square().sum()
        value.backward()
        return value

    with torch.autocast(
        device.type, enabled=False
    ):  # a line search in half precision finds no direction to go
        optimizer.step(loss)
    head.requires_grad_(False)
    for parameter in head.parameters():
        parameter.grad = None


def draw_random_head(classifier: torch.nn.Module) -> None:
    """Gives the linear head orthonormal rows from torch's random state and no bias, and freezes it.

    Args:
        classifier: with a head on pooled features.

    Raises:
        ValueError: for another kind of classifier.
    """
    if not isinstance(classifier, PooledClassifier):
        raise ValueError(
            "model.random_head needs a head on pooled features; set model.head to 'mean' or "
            "'layers'"
        )
    torch.nn.init.orthogonal_(classifier.head.weight)
    if classifier.head.bias is not None:
        torch.nn.init.zeros_(classifier.head.bias)
    classifier.head.requires_grad_(False)


def _inputs(
    classifier: PooledClassifier, texts: TokenisedTexts, device: torch.device
) -> tuple[Tensor, Tensor]:

    was_training = classifier.training
    classifier.eval()
    found, labels = [], []
    with torch.no_grad():
        for part in texts.micro_batch_indices(np.arange(len(texts)), 256):
            batch = texts.collate(part, device)
            given = (batch["input_ids"], batch["attention_mask"])
            found.append(features(classifier.encoder, classifier.pooling, *given))
            labels.append(batch["labels"])
    classifier.train(was_training)
    return torch.cat(found).to(classifier.head.weight.dtype), torch.cat(labels)
