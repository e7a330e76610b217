"""The losses people train with, each reduced to one value per example, against the slow oracle; and
losses that have no such form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, VOCABULARY, text_batch
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.clipping import clipped_gradients, per_example_norms
from quietgrad.clipping.capture import capture
from quietgrad.clipping.capture.call_shapes import in_rows
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.soundness.guard import Guard
from quietgrad.clipping.verify import verify_clipping

pytestmark = pytest.mark.usefixtures("examined_once")

MICRO_BATCH_SIZES = [None, 1, 3]
BY_NAME = {case.name: case for case in CASES}


class TextEncoder(nn.Module):
    """Words to ``outputs`` numbers per example."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids)).mean(1))


def encoder_and_batch(
    outputs: int, target: Callable[[], Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    model = TextEncoder(outputs)
    return model, {"x": text_batch()["input_ids"], "y": target()}


# ------------------------------------------------------------------------------------------------
# one value per example


def class_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def multi_label_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"], reduction="none").mean(
        1
    )


def regression_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]).squeeze(1), batch["y"], reduction="none")


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[examples, tokens] losses, 0 at padding, and the mask."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[
        :, :-1
    ]
    mask = batch["attention_mask"][:, 1:].to(logits.dtype)
    return F.cross_entropy(
        logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
    ) * mask, mask


def token_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses, mask = token_losses(model, batch)
    return losses.sum(1) / mask.sum(1)


def token_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(model, batch)[0].sum(1)


def _encoder(outputs: int, target: Callable[[], Tensor]) -> Callable[[], Any]:
    return lambda: encoder_and_batch(outputs, target)


def _decoder(name: str) -> Callable[[], Any]:
    def build() -> Any:
        model, _, batch = BY_NAME[name].build()
        return model, batch

    return build


LOSSES = {
    "classification": (_encoder(3, lambda: torch.randint(0, 3, (4,))), class_loss),
    "multi-label": (_encoder(5, lambda: torch.randint(0, 2, (4, 5)).float()), multi_label_loss),
    "regression": (_encoder(1, lambda: torch.randn(4)), regression_loss),
    "token-mean-llama": (_decoder("llama"), token_mean),
    "token-mean-gpt2": (_decoder("gpt2"), token_mean),
    "token-sum-llama": (_decoder("llama"), token_sum),
    "token-sum-gpt2": (_decoder("gpt2"), token_sum),
}


@pytest.mark.grid(5, "losses times cuts")
@pytest.mark.parametrize("physical_batch_size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_against_the_oracle(name: str, physical_batch_size: int | None) -> None:
    build, loss = LOSSES[name]
    model, batch = build()
    assert_equal_to_oracle(model, loss, batch, physical_batch_size=physical_batch_size)


def test_sum_and_mean_over_tokens_differ_by_each_examples_length() -> None:
    """The examples have different lengths, so a mean over the whole batch's tokens would give
    neither.
    """
    model, _, batch = BY_NAME["llama"].build()
    lengths = batch["attention_mask"][:, 1:].sum(1)
    assert len(set(lengths.tolist())) > 1
    means, sums = (per_example_norms(model, loss, batch) for loss in (token_mean, token_sum))
    torch.testing.assert_close(means * lengths, sums, rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------
# not one value per example


def hugging_face_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
    ).loss


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            hugging_face_loss,
            r"returned a tensor of 0 dimensions; return a tensor of shape \(examples,\)",
        ),
        (
            lambda model, batch: token_mean(model, batch).mean(),
            r"returned a tensor of 0 dimensions.*reduction='none'",
        ),
        (
            lambda model, batch: token_losses(model, batch)[0],
            r"returned a tensor of 2 dimensions.*average over tokens",
        ),
        (
            lambda model, batch: token_losses(model, batch)[0].flatten(),
            r"return a tensor of shape \(examples,\)",
        ),
    ],
    ids=["model-output-loss", "batch-mean", "per-token", "per-token-flat"],
)
def test_losses_over_tokens_or_the_whole_batch_are_refused(loss, message: str) -> None:
    model, _, batch = BY_NAME["llama"].build()
    for physical_batch_size in (None, 1):  # with one example at a time, too
        with pytest.raises(ValueError, match=message):
            clipped_gradients(model, loss, batch, 1.0, physical_batch_size=physical_batch_size)
        with pytest.raises(ValueError, match=message):
            per_example_norms(model, loss, batch, physical_batch_size=physical_batch_size)


def info_nce(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One value per example, but each compares its example with all others of the batch."""
    anchors, partners = F.normalize(model(batch["x"]), dim=1), F.normalize(model(batch["y"]), dim=1)
    return F.cross_entropy(anchors @ partners.T / 0.1, torch.arange(len(anchors)), reduction="none")


def centred_regression(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Regression on outputs from which the batch's mean was taken: the same
    mistake, less visible.
    """
    out = model(batch["x"]).squeeze(1)
    return (out - out.mean() - batch["y"]).pow(2)


def detached_centring(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same with the mean detached: no gradient flows from one example to another, but the
    values still depend on each other.
    """
    out = model(batch["x"]).squeeze(1)
    return (out - out.detach().mean() - batch["y"]).pow(2)


COUPLED = {
    "info-nce": (_encoder(4, lambda: text_batch()["input_ids"]), info_nce),
    "centred": (_encoder(1, lambda: torch.randn(4)), centred_regression),
    "centred-by-detached-mean": (_encoder(1, lambda: torch.randn(4)), detached_centring),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_compare_examples_are_refused(name: str) -> None:
    build, loss = COUPLED[name]
    model, batch = build()
    with pytest.raises(ValueError, match="example"):
        clipped_gradients(model, loss, batch, 1.0)


def test_why_they_must_be_refused(monkeypatch) -> None:
    """Without one record the sum moves by more than the clipping norm: the other examples' clipped
    gradients change with it.
    """
    monkeypatch.setattr(Guard, "is_due", lambda *arguments: False)
    build, loss = COUPLED["info-nce"]
    model, batch = build()
    clip = 0.3 * float(per_example_norms(model, loss, batch).min())
    all_of_them = clipped_gradients(model, loss, batch, clip).gradients
    but_the_last = clipped_gradients(model, loss, slice_batch(batch, 0, 3), clip).gradients
    moved = (
        sum(float((g - but_the_last[name]).pow(2).sum()) for name, g in all_of_them.items()) ** 0.5
    )
    assert moved > 1.5 * clip


@pytest.mark.parametrize("name", COUPLED)
def test_verify_notices_losses_that_compare_examples(name: str) -> None:
    build, loss = COUPLED[name]
    model, batch = build()
    try:
        difference = verify_clipping(model, loss, batch)
    except ValueError:  # refused outright is as good
        return
    assert difference > 1e-2


@pytest.mark.parametrize("estimator", ["ghost", "materialized"])
def test_a_loss_that_turns_its_gradient_round(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross-entropy of ``logits.mT``: the head's gradient lies turned, and is turned back once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 11))
    ids = torch.randint(0, 11, (5, 8))
    seen: list[bool] = []

    def noted(gradient: Tensor | None) -> Tensor | None:
        found = in_rows(gradient)
        if gradient is not None and found is not None:
            assert torch.equal(found, gradient) and found.stride(-1) <= 1
            seen.append(found is not gradient)
        return found

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"][:, :-1])
        found = F.cross_entropy(logits.mT, batch["x"][:, 1:], reduction="none")
        return found.mean(dim=1)

    monkeypatch.setattr(capture, "in_rows", noted)
    assert_equal_to_oracle(model, loss, {"x": ids}, estimator=estimator)
    assert any(seen) and not all(seen)


def test_only_a_gradient_that_is_turned_is_copied() -> None:
    rows = torch.randn(2, 3, 4)
    one_for_all = torch.randn(2, 1, 1).expand(2, 3, 4)  # of a sum over features: no memory for it
    for whole in (None, rows, rows[:, :, 1:], one_for_all, torch.randn(2, 4), rows.unsqueeze(3)):
        assert in_rows(whole) is whole
    assert in_rows(rows.mT).stride() == (12, 3, 1)  # type: ignore[union-attr]
