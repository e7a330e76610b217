"""What a head reads: of each record alone, whatever stands beside it in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import config_of

from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.text.modeling_pooled import pooled
from quietgrad.training.tasks.text.models import load_encoder
from quietgrad.training.tasks.text.pooled import PooledClassifier
from quietgrad.training.tasks.text.pooling import Pooling, feature_width, features, upper_layers


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Any:
    import transformers

    return load_encoder(transformers, str(tiny_bert), "eager").eval()


def batch(encoder: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    return torch.randint(5, encoder.config.vocab_size, (3, 9)) * mask, mask


@pytest.mark.parametrize("pooling", ["mean", "layers"])
def test_padding_and_neighbours_change_nothing(encoder: Any, pooling: Pooling) -> None:
    ids, mask = batch(encoder)
    with torch.no_grad():
        together = features(encoder, pooling, ids, mask)
        for row, length in enumerate((9, 4, 1)):
            alone = features(
                encoder, pooling, ids[row : row + 1, :length], mask[row : row + 1, :length]
            )
            torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-5)
    assert together.shape == (3, feature_width(encoder.config, pooling))
    assert (together[0] - together[1]).norm() > 0.1


def test_layers_are_what_they_say(encoder: Any) -> None:
    """Two layers: means of layers 1 and 2, and the maximum of layer 2, by hand for one record."""
    ids, mask = batch(encoder)
    with torch.no_grad():
        found = features(encoder, "layers", ids, mask)[1]
        states = encoder(
            input_ids=ids[1:2, :4], attention_mask=mask[1:2, :4], output_hidden_states=True
        ).hidden_states
    parts = [states[1][0].mean(0), states[2][0].mean(0), states[2][0].amax(0)]
    by_hand = torch.cat([((p - p.mean()) / p.std(correction=0)).tanh() for p in parts])
    torch.testing.assert_close(found, by_hand / by_hand.norm(), rtol=0, atol=1e-4)
    assert float(found.norm()) == pytest.approx(1, abs=1e-5)


def test_the_file_beside_the_weights_pools_alike() -> None:
    torch.manual_seed(0)
    states = tuple(torch.randn(2, 5, 8) for _ in range(7))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    torch.testing.assert_close(pooled(states, mask, "layers"), upper_layers(states, mask))
    assert upper_layers(states, mask).shape == (2, 5 * 8)  # layers 3 to 6, and the maximum


def test_a_head_on_layers_leaves_the_clipping_norm_to_what_it_reads(encoder: Any) -> None:
    """Features of length 1: a bias would have half of every gradient's squared length."""
    ids, mask = batch(encoder)
    classifier = PooledClassifier(encoder, "layers", 3)
    F.cross_entropy(classifier(ids[:1], mask[:1]), torch.tensor([0])).backward()
    gradient = torch.cat([p.grad.flatten() for p in classifier.head.parameters()])
    errors = torch.tensor([1 / 3 - 1, 1 / 3, 1 / 3])
    assert float(gradient.norm()) == pytest.approx(float(errors.norm()), rel=1e-4)
    assert PooledClassifier(encoder, "mean", 3).head.bias is not None


def test_a_row_of_padding_alone_is_finite() -> None:
    states = tuple(torch.randn(1, 3, 4) for _ in range(3))
    assert upper_layers(states, torch.zeros(1, 3, dtype=torch.long)).isfinite().all()


def test_the_maximum_is_not_cached_under_blocks_that_train(settings: dict[str, Any]) -> None:
    top = {"model.tune": "full", "model.train_layers": 1, "model.head": "layers"}
    assert prepare(config_of(settings | top)).prefix_cache() is None
    assert prepare(config_of(settings | top | {"model.head": "mean"})).prefix_cache() is not None


def test_a_cache_that_is_made_under_autocast_leaves_no_other_head_behind(
    settings: dict[str, Any],
) -> None:
    """To compare the two paths the head is filled with other weights for a moment, and autocast
    keeps what it has cast.
    """
    top = {"model.tune": "full", "model.train_layers": 1, "training.precision": "bfloat16"}
    prepared = prepare(config_of(settings | top))
    classifier: Any = prepared.model.classifier
    with torch.no_grad():
        classifier.head.weight.fill_(0.01)
    ids = prepared.validation.collate(np.arange(4), prepared.device)
    given = (ids["input_ids"], ids["attention_mask"])
    with torch.autocast("cpu", torch.bfloat16):
        before = classifier(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert prepared.prefix_cache(prepared.validation) is not None
        torch.testing.assert_close(classifier(*given), before, rtol=0, atol=0)
