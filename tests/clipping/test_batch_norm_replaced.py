"""``replace_batch_norm``: what stands in the place of a BatchNorm does what that did beside mixing
records, or nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.clipping import replace_batch_norm
from quietgrad.integrations.opacus.validators import ModuleValidator


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: dropout and activation inside, once it has normalised."""

    def __init__(self, channels: int, **options: bool) -> None:
        super().__init__(channels, **options)
        self.drop = nn.Dropout(0.5)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class ActivationFirst(WithActivation):
    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, self.drop(self.act(x.clone())))


class Function(nn.BatchNorm2d):
    """No module of its own says what it does beside normalising."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Renamed(nn.BatchNorm1d):
    """Normalises in its own words."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_an_activation_inside_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), WithActivation(8), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 3, 6, 6))
    nn.init.normal_(model[1].weight)
    weight, act = model[1].weight.detach().clone(), model[1].act
    replace_batch_norm(model)
    norm, drop, found = model[1]
    assert isinstance(norm, nn.GroupNorm) and isinstance(drop, nn.Dropout) and found is act
    assert torch.equal(norm.weight, weight)
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(model[1].eval()(x), F.silu(norm(x)))
    batch = {"x": torch.randn(4, 3, 6, 6), "y": torch.tensor([0, 1, 2, 0])}
    assert_equal_to_oracle(model.eval(), cross_entropy, batch)


@pytest.mark.parametrize("kind", [ActivationFirst, Function])
def test_what_cannot_be_told_is_refused_before_anything_is_replaced(
    kind: Callable[[int], nn.Module],
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(kind(3)))
    first = model[0]
    with pytest.raises(ValueError, match=rf"layer '1.0' \({kind.__name__}\) does more than"):
        replace_batch_norm(model)
    assert model[0] is first
    with pytest.raises(ValueError, match="does more than"):
        ModuleValidator.fix(model)


@pytest.mark.parametrize(
    "layer",
    [Renamed(6), nn.SyncBatchNorm(6), WithActivation(6, track_running_stats=False).eval()],
    ids=lambda layer: type(layer).__name__,
)
def test_what_only_normalises_is_replaced(layer: nn.Module) -> None:
    found = replace_batch_norm(nn.Sequential(layer))[0]
    norm = found[0] if isinstance(found, nn.Sequential) else found
    assert isinstance(norm, nn.GroupNorm) and norm.num_channels == 6
    assert norm.training is layer.training


def test_one_layer_in_several_places_stays_one() -> None:
    layer = nn.BatchNorm1d(4)
    model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Sequential(layer)})
    replace_batch_norm(model)
    assert isinstance(model["a"], nn.GroupNorm)
    assert model["a"] is model["b"] is model["c"][0]


def test_what_is_frozen_and_of_half_precision_stays_so() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4)).to(torch.bfloat16)
    model[0].weight.requires_grad_(False)
    norm = replace_batch_norm(model)[0]
    assert norm.weight.dtype == norm.bias.dtype == torch.bfloat16
    assert not norm.weight.requires_grad and norm.bias.requires_grad


def test_a_layer_without_a_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer '0' \(LazyBatchNorm2d\) has no width yet"):
        replace_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))


def test_a_channel_is_not_normalised_by_itself() -> None:
    """Squeeze and excitation: a map of one pixel."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip
    replace_batch_norm(model)
    assert model[2].num_groups == 8
    batch = {"x": torch.randn(4, 3, 6, 6), "y": torch.tensor([0, 1, 2, 0])}
    assert_equal_to_oracle(model, cross_entropy, batch)
    assert replace_batch_norm(nn.BatchNorm2d(1)).num_groups == 1
