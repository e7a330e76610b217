"""Quantised layers that round a record by what others hold, or that lose their gradient.

The layers are stand-ins with the names and the arithmetic of bitsandbytes 0.50, as its package is
large; ``tests/integrations/test_quantized_models.py`` is of the package itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.company import quantized
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.clipping.verify import verify_clipping

WIDTH, OTHERS, THRESHOLD, CLIP = 64, 23, 6.0, 1e-4


class Linear8bitLt(nn.Module):
    """LLM.int8(): rows are rounded to 8 bits, each by its largest number; columns in which any row
    has one above the threshold are multiplied as they are.
    """

    def __init__(self, weight: Tensor, threshold: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.state = SimpleNamespace(threshold=threshold)

    def forward(self, x: Tensor) -> Tensor:
        threshold = self.state.threshold
        far = x.abs() >= threshold if threshold else torch.zeros_like(x, dtype=torch.bool)
        columns = far.any(dim=0)
        near = x.masked_fill(far, 0.0)
        unit = near.abs().amax(dim=1, keepdim=True) / 127
        rounded = torch.round(near / unit.clamp_min(1e-12)) * unit
        return torch.where(columns, x, rounded) @ self.weight.T


class Linear4bit(nn.Module):
    """Packs its weight in evaluation mode where its input needs no gradient, and has none since."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.weight.quant_state = SimpleNamespace(packing_format_for_cpu=False)

    def forward(self, x: Tensor) -> Tensor:
        state = self.weight.quant_state
        if not self.training and not x.requires_grad and not state.packing_format_for_cpu:
            self.weight.data = self.weight.data * 2  # in another layout
            state.packing_format_for_cpu = True
        if state.packing_format_for_cpu:
            return F.linear(x, self.weight / 2).detach()
        return F.linear(x, self.weight)


for kind in (Linear8bitLt, Linear4bit):
    kind.__module__ = "bitsandbytes.nn.modules"


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


FAR = 100  # the word that only one record holds


def eight_bits(threshold: float) -> nn.Module:
    """What the first column says is nothing; what the others say is rounded away beside it."""
    torch.manual_seed(0)
    table = torch.rand(FAR + 1, WIDTH) * 0.022
    table[:, 0] = THRESHOLD - 0.1
    table[FAR] = THRESHOLD + 0.1
    weight = torch.randn(32, WIDTH)
    weight[:, 0] = 0.0
    words = nn.Embedding.from_pretrained(table)
    return nn.Sequential(words, Linear8bitLt(weight, threshold), nn.Linear(32, 2, bias=False))


def records(number: int) -> dict[str, Tensor]:
    return {"x": torch.arange(number), "y": torch.zeros(number, dtype=torch.long)}


def with_one_far(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """In the place of the last one: a larger batch would be looked at."""
    return batch | {"x": torch.cat([batch["x"][:-1], torch.tensor([FAR])])}


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "is_quantized", lambda module: False)


def moved_by_one_record(threshold: float) -> float:
    """In clipping norms."""
    bound = Clipper(CLIP, engine="bookkeeping").bind(eight_bits(threshold), loss)
    one = bound.clip(records(OTHERS + 1), step=0).gradients["2.weight"]
    other = bound.clip(with_one_far(records(OTHERS + 1)), step=4).gradients["2.weight"]
    return float((other - one).norm()) / CLIP


def test_one_record_decides_how_others_are_rounded_and_no_look_sees_it(unknown: None) -> None:
    assert moved_by_one_record(THRESHOLD) > 15


def test_a_threshold_over_the_batch_is_refused() -> None:
    message = "layer '1' .Linear8bitLt.*one record changes.*llm_int8_threshold=0.0"
    with pytest.raises(ValueError, match=message):
        moved_by_one_record(THRESHOLD)


def test_eight_bits_without_a_threshold_are_taken() -> None:
    assert moved_by_one_record(0.0) <= 1.001


class Adapted(nn.Module):
    """Below a quantised layer something is trained, and above it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.below = Linear4bit(8), nn.Linear(8, 8)
        self.quantized, self.drop = Linear4bit(8), nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.drop(self.quantized(torch.tanh(self.below(self.frozen(x))))))
        return found


def few(number: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(number, 8, generator=generator),
        "y": torch.arange(number) % 3,
    }


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_looks_pack_no_layer(dropout: float) -> None:
    # The guard compares in evaluation mode where dropout draws.
    model = Adapted(dropout).train()
    sums = Clipper(1.0).bind(model, loss).clip(few(), step=0).gradients
    assert not model.frozen.weight.quant_state.packing_format_for_cpu
    assert float(sums["below.weight"].norm()) > 0
    assert verify_clipping(model, loss, few()) < 1e-4
    assert not model.frozen.weight.quant_state.packing_format_for_cpu


def test_a_model_in_evaluation_mode_is_told_to_train() -> None:
    model = Adapted(0.0).eval()
    message = "'frozen' .Linear4bit. packed its weights.*call its train"
    with pytest.raises(ValueError, match=message), unchanged(model, thorough=True):
        model(few()["x"])


def test_layers_that_an_evaluation_packed_are_refused() -> None:
    model = Adapted(0.0)
    with torch.no_grad():
        model.eval()(few()["x"])
    bound = Clipper(1.0).bind(model.train(), loss)
    message = "'frozen' .Linear4bit. was packed.*learn from noise alone"
    with pytest.raises(ValueError, match=message):
        bound.clip(few(), step=0)


def test_a_trainer_keeps_layers_unpacked_before_it_trains() -> None:
    model = Adapted(0.0).eval()
    quantized.keep_unpacked(model)
    model(few()["x"])
    assert not model.frozen.weight.quant_state.packing_format_for_cpu
    assert not model.head.training
