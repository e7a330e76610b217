"""Multi-head attention under capture: the same numbers as one example at a time, whatever its
configuration, and never by way of the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture import fallback
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.engines import contributions
from quietgrad.clipping.soundness.guard import Guard
from quietgrad.generators import keyed_generators

pytestmark = pytest.mark.usefixtures("examined_once")

EXAMPLES, LENGTH, WIDTH, HEADS = 4, 5, 6, 2
Use = Callable[["Attends", Tensor, Tensor], Tensor]


def itself(model: Attends, x: Tensor, padding: Tensor, **settings: Any) -> Tensor:
    return model.attention(x, x, x, **settings)[0]


def without_weights(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    return itself(model, x, padding, need_weights=False)


def padded(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    return itself(model, x, padding, key_padding_mask=padding)


def causal(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return itself(model, x, padding, attn_mask=mask, is_causal=True, need_weights=False)


def all_masks(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()
    one = itself(model, x, padding, attn_mask=mask, key_padding_mask=padding, need_weights=False)
    each = mask.expand(len(x) * HEADS, -1, -1)
    return one + itself(model, x, padding, attn_mask=each, key_padding_mask=padding)


def weights_too(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    y, shares = model.attention(x, x, x)
    _, of_heads = model.attention(x, x.sin(), x, average_attn_weights=False)
    return y + shares.sin().sum(2, keepdim=True) + of_heads.sin().sum((1, 3)).unsqueeze(2)


def crossed(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    memory = model.memory(x[:, :3])
    return model.attention(x, memory, memory)[0]


def three_inputs(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    keys = model.memory(x[:, :3])
    y, _ = model.attention(x[:, :2], keys, model.values(keys), need_weights=False)
    return y


def time_first(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return model.attention(x, x, x, key_padding_mask=padding)[0].transpose(0, 1)


def twice(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
    return itself(model, itself(model, x, padding), padding)


class Attends(nn.Module):
    def __init__(self, use: Use, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings = {"batch_first": True} | settings
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **settings)
        with torch.no_grad():  # biases begin at zero
            for p in self.attention.parameters():
                p.add_(0.1 * torch.randn_like(p))
        self.memory = nn.Linear(WIDTH, settings.get("kdim", WIDTH))
        self.values = nn.Linear(settings.get("kdim", WIDTH), settings.get("vdim", WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self, x, x[:, :, 0] == 0).tanh().mean(1))


def batch_of() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, LENGTH, WIDTH, generator=generator)
    for i in range(1, EXAMPLES):
        x[i, LENGTH - i :] = 0
    return {"x": x, "y": torch.randint(0, 3, (EXAMPLES,), generator=generator)}


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(use: Any, examples: int, signs: Any) -> Any:
        raise AssertionError(f"{use.site.name} went through the fallback")

    monkeypatch.setattr(contributions, "fallback_contributions", refuse)
    # Nor one example at a time. Looks of the guard take most of the time; it has its own tests, and
    # looks at these layers in the shared list of cases.
    monkeypatch.setattr(BoundClipper, "_falling_back", lambda self, work: work())
    monkeypatch.setattr(Guard, "is_due", lambda *arguments: False)


def assert_captured(model: nn.Module, **settings: Any) -> None:
    settings = {"physical_batch_size": EXAMPLES} | settings
    assert_equal_to_oracle(model, cross_entropy, batch_of(), **settings)


USES = [
    itself, without_weights, padded, causal, all_masks, weights_too, crossed, three_inputs,
    time_first, twice,
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "settings", [{}, {"bias": False, "add_zero_attn": True}, {"add_bias_kv": True}], ids=str
)
def test_every_use(use: Use, settings: dict[str, Any]) -> None:
    if use is weights_too and settings:
        pytest.skip("more keys than queries")
    assert_captured(Attends(use, **settings, batch_first=use is not time_first))


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"add_bias_kv": True}], ids=str)
def test_keys_and_values_of_other_widths(settings: dict[str, Any]) -> None:
    assert_captured(Attends(three_inputs, kdim=3, vdim=4, **settings))


@pytest.mark.parametrize("estimator", ["materialized", "ghost", "exact"])
@pytest.mark.parametrize("physical_batch_size", [1, 3])
@pytest.mark.parametrize("use", [itself, crossed])
def test_every_estimator_and_cut(use: Use, physical_batch_size: int, estimator: Any) -> None:
    model = Attends(use, add_bias_kv=True)
    assert_captured(model, estimator=estimator, physical_batch_size=physical_batch_size)


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj", "bias", "weight", "out", "bias_k"])
@pytest.mark.parametrize("use", [itself, three_inputs])
def test_frozen_parts(use: Use, frozen: str) -> None:
    model = Attends(use, add_bias_kv=True)
    for name, parameter in model.attention.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert_captured(model)


def test_evaluation_mode_and_double_precision() -> None:
    model = Attends(itself, dropout=0.3).eval().double()
    batch = batch_of()
    batch["x"] = batch["x"].double()
    assert_equal_to_oracle(
        model, cross_entropy, batch, physical_batch_size=EXAMPLES, tolerance=1e-10
    )


@pytest.mark.parametrize("use", [itself, without_weights])
def test_dropout_draws_as_the_plain_pass_does(use: Use) -> None:
    model, batch = Attends(use, dropout=0.4).train(), batch_of()
    bound = Clipper(1e6, physical_batch_size=EXAMPLES).bind(model, cross_entropy)
    bound.check(batch)
    with keyed_generators(5):
        captured = bound.clip(batch, step=5).gradients  # no guarded step
    torch.manual_seed(5)
    parameters = dict(model.attention.named_parameters(prefix="attention"))
    plain = torch.autograd.grad(cross_entropy(model, batch).sum(), list(parameters.values()))
    for name, gradient in zip(parameters, plain, strict=True):
        torch.testing.assert_close(captured[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("use", [itself, three_inputs])
def test_a_record_that_is_not_finite_stays_alone(use: Use, value: float) -> None:
    model, batch = Attends(use, add_bias_kv=True), batch_of()
    bound = Clipper(1.0, physical_batch_size=EXAMPLES).bind(model, cross_entropy)
    bound.check(batch)
    others = {name: tensor[[0, 2, 3]] for name, tensor in batch.items()}
    expected = bound.clip(others, step=5).gradients
    batch["x"][1, 1, 1] = value
    with_it = bound.clip(batch, step=5)
    assert int(with_it.private.nonfinite) == 1
    for name, gradient in with_it.gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_a_layer_of_torchs_own_transformer() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(x, x.flip(1)).mean(1))

    assert_captured(Encoder())


def test_weights_that_are_computed_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    called = []
    monkeypatch.setattr(
        contributions,
        "fallback_contributions",
        lambda use, n, signs: called.append(use) or fallback.fallback_contributions(use, n, signs),
    )
    model = Attends(itself)
    model.attention.out_proj = torch.nn.utils.parametrizations.weight_norm(model.attention.out_proj)
    assert_captured(model)
    assert called


def test_flattened_examples_are_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def windows(model: Attends, x: Tensor, padding: Tensor) -> Tensor:
        found = itself(model, x.repeat_interleave(2, dim=0), padding)
        return found.unflatten(0, (-1, 2)).mean(1)

    model = Attends(windows)
    with pytest.raises(NotCaptured, match="layer 'attention'"):
        Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch_of())
    assert_captured(model)
