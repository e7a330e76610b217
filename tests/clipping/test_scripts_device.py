"""A script that sets torch's default device: what clipping makes for itself lies where the model's
numbers are. "meta" stands for a GPU; what is made there by mistake holds nothing, or whatever lay
in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import CASES, Case, language_modelling, text_batch
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.auditing import audit_mechanism
from quietgrad.clipping import Clipper, DirectGradients, add_layer_rule, sum_over_positions
from quietgrad.clipping.norms.rules import registry, rms_norms

TRIED = [c for c in CASES if c.name in ("mlp-positions", "cnn-groupnorm", "bare-parameters")]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("t", [2, 32, 40, 1025])
def test_positions_are_added_up_where_they_are(elsewhere: None, t: int) -> None:
    x = torch.ones(3, t, 5, device="cpu")
    assert torch.equal(sum_over_positions(x), torch.full((3, 5), float(t), device="cpu"))


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def test_one_record_formed_apart_holds_nothing_of_the_memory() -> None:
    """Texts whose positions cancel are formed once more, outside the backward pass."""
    source = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5))
    x, g = (torch.randn(4, 40, 5, generator=source) for _ in range(2))
    large = 1e6 * torch.randn(4, 40, 5, generator=source)
    large[:, -1] = -large[:, :-1].sum(1)
    bound = Clipper(1e-3, "ghost", engine="bookkeeping").bind(model, weighted)
    bound.clip((x, g), step=0)  # the guard's look
    cancelling = x[:, :1].expand(4, 40, 5), large
    right = bound.clip(cancelling, step=2).gradients
    torch.set_default_device("meta")
    try:
        found = bound.clip(cancelling, step=2).gradients
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(found[name], right[name]) for name in right)


def llama() -> Any:
    import transformers as hf

    sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=24))
    return model, language_modelling, text_batch()


@pytest.mark.parametrize("case", [*TRIED, Case("llama", llama)], ids=str)
def test_models_are_clipped_as_without_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is not used, and layers that are tried once, among them."""
    model, loss, batch = case.build()
    right = Clipper(0.05, "exact").bind(model, loss).clip(batch, step=0).gradients
    monkeypatch.setattr(rms_norms, "_is_scaled_rms_norm", {})
    torch.set_default_device("meta")
    try:
        found = Clipper(0.05, "exact").bind(model, loss).clip(batch, step=0).gradients
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(found[name], right[name]) for name in right)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_a_rule_of_ones_own_is_tried(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        return {"weight": DirectGradients(sum_over_positions(x * grad))}

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    x = torch.randn(4, 6, 4, device="cpu")
    add_layer_rule(rule, Scale(), x)
    bound = Clipper(1e-3).bind(Scale(), weighted)
    assert bound.clip((x, x), step=0).gradients["weight"].isfinite().all()


def test_an_audit_runs(elsewhere: None) -> None:
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=1, target_delta=1e-5).build(3)
    assert audit_mechanism(plan, runs=40, seed=0).claimed > 0
