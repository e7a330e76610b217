"""Per-example gradients and Gram matrices of convolutions, every way they are formed, against
autograd over random geometries.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.estimators.materialized import kept_gradients, materialized_norms
from quietgrad.clipping.norms.factors import BLOCK_ELEMENTS, ConvolutionFactors, convolution
from quietgrad.clipping.norms.factors.patches import Geometry, patch_columns, patch_gram, patches

pytestmark = pytest.mark.usefixtures("examined_once")

EXAMPLES = 5
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@st.composite
def _uses(draw: st.DrawFn) -> tuple[ConvolutionFactors, Tensor]:
    """One use of a random kernel, and its per-example gradients by autograd, [b, entries]."""
    dims = draw(st.integers(1, 3))
    per_axis = st.tuples(*[st.integers(1, 3)] * dims)
    kernel, stride, dilation = draw(per_axis), draw(per_axis), draw(per_axis)
    padding = draw(st.tuples(*[st.integers(0, 2)] * dims))
    groups = draw(st.sampled_from([1, 2]))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [
        max(1, span - 2 * pad) + draw(st.integers(0, 3))
        for span, pad in zip(spans, padding, strict=True)
    ]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(EXAMPLES, 3 * groups, *size, generator=generator, dtype=torch.float64)
    weight = torch.randn(
        2 * groups, 3, *kernel, generator=generator, dtype=torch.float64, requires_grad=True
    )
    y = CONVOLUTIONS[dims](x, weight, None, stride, padding, dilation, groups)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    each = [
        torch.autograd.grad((y[i] * grad[i]).sum(), weight, retain_graph=True)[0].flatten()
        for i in range(EXAMPLES)
    ]
    return ConvolutionFactors(
        x, grad, Geometry(kernel, stride, padding, dilation, groups)
    ), torch.stack(each)


@settings(max_examples=60, deadline=None)
@given(_uses())
def test_transposed_patches_and_gram_matrices_are_those_of_patches(
    case: tuple[ConvolutionFactors, Tensor],
) -> None:
    use, _ = case
    expected = patches(use.x, use.geometry).flatten(0, 1)
    columns = [c.clone() for c in patch_columns(use.x, use.geometry, 2, torch.float64)]
    torch.testing.assert_close(torch.cat(columns).transpose(1, 2), expected)
    torch.testing.assert_close(patch_gram(use.x, use.geometry), expected @ expected.transpose(1, 2))


@settings(max_examples=60, deadline=None)
@given(_uses())
def test_every_way_gives_autograds_gradients_and_norms(
    case: tuple[ConvolutionFactors, Tensor],
) -> None:
    use, expected = case
    squared = expected.square().sum(dim=1)
    weights = torch.linspace(-1.0, 1.0, EXAMPLES, dtype=torch.float64)
    s = use.sizes
    kernel = torch.Size((s.g * s.p, s.d // use.geometry.taps, *use.geometry.kernel))
    # One example a call by the native routine; two at a time from patches; all at once.
    for cached in (0, 2 * s.g * s.t * s.d, 10**6):
        with mock.patch.object(convolution, "CACHED_ELEMENTS", cached):
            norms, kept = kept_gradients([use], torch.float64)
            torch.testing.assert_close(norms.squared, squared)
            torch.testing.assert_close(torch.cat(kept.values), expected)
            total = kept.weighted_sum(weights, kernel, torch.float64)
            torch.testing.assert_close(total.flatten(), weights @ expected)
            torch.testing.assert_close(materialized_norms([use], torch.float64).squared, squared)
            for pixels in (True, False):
                with mock.patch.object(
                    convolution, "pixel_gram_pays", lambda *_, pays=pixels: pays
                ):
                    torch.testing.assert_close(ghost_norms([use], torch.float64).squared, squared)


@pytest.mark.parametrize("cached", [0, 10**6])
def test_gradients_of_half_precision_factors_are_summed_in_float32(cached: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 9, 9, generator=generator).bfloat16()
    grad = torch.randn(3, 6, 7, 7, generator=generator).bfloat16()
    use = ConvolutionFactors(x, grad, Geometry((3, 3), (1, 1), (0, 0), (1, 1), 1))
    wide = ConvolutionFactors(x.double(), grad.double(), use.geometry)
    expected = materialized_norms([wide], torch.float64).squared
    with mock.patch.object(convolution, "CACHED_ELEMENTS", cached):
        for norms in (
            kept_gradients([use], torch.float32)[0],
            materialized_norms([use], torch.float32),
            ghost_norms([use], torch.float32),
        ):
            # Products of bfloat16 entries are exact in float32; accumulated in bfloat16 they would
            # be 1e-2 off.
            torch.testing.assert_close(norms.squared, expected, rtol=1e-5, atol=0.0)


@pytest.mark.grid(1, "networks in another memory format")
@pytest.mark.parametrize("estimator", ["auto", "materialized", "ghost"])
def test_images_with_channels_last(estimator: Any) -> None:
    """With "auto" the first micro-batch keeps factors, whose sum the native routine lays out as the
    images are, and the smaller one gradients.
    """
    torch.manual_seed(0)
    model = torch.nn.Conv2d(512, 512, 3, padding=1)
    x = torch.randn(7, 512, 20, 20)
    clipper = Clipper(1.0, estimator, engine="bookkeeping", physical_batch_size=4)
    expected = clipper.clip(model, _mean_square, x).gradients
    model = model.to(memory_format=torch.channels_last)
    found = clipper.clip(
        model, _mean_square, x.contiguous(memory_format=torch.channels_last)
    ).gradients
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def _mean_square(model: torch.nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().mean(1)


class _Largest(TorchDispatchMode):
    """Entries of the largest storage that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.entries = max(
                    self.entries, made.untyped_storage().nbytes() // made.element_size()
                )
        return result


@pytest.mark.grid(1, "networks and sizes; the largest takes ten seconds")
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [
        ((256, 64, 32, 32), 3, 1, 1),
        ((256, 64, 32, 32), 3, 2, 0),
        ((256, 64, 32, 32), 1, 2, 0),
        ((2, 64, 4, 4), 3, 1, 40),
    ],
    ids=["same", "no-padding", "one-by-one", "much-padding"],
)
def test_no_temporary_grows_past_the_stated_size(
    size: tuple[int, ...], kernel: int, stride: int, padding: int
) -> None:
    """Also where the input itself is larger, and where padding makes far more outputs than there
    are inputs.
    """
    geometry = Geometry((kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), 1)
    out = (size[2] + 2 * padding - kernel) // stride + 1
    use = ConvolutionFactors(torch.ones(size), torch.ones(size[0], 8, out, out), geometry)
    for norms in (materialized_norms, ghost_norms):
        with _Largest() as largest:
            norms([use], torch.float32)
        assert 0 < largest.entries <= BLOCK_ELEMENTS


def test_half_precision_is_widened_an_example_at_a_time() -> None:
    x = torch.ones(24, 64, 96, 96, dtype=torch.bfloat16)
    use = ConvolutionFactors(x, x[:, :8], Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1))
    assert use.examples_in_cache == 1
    with _Largest() as largest:
        materialized_norms([use], torch.float32)
    assert largest.entries <= 2 * x[0].numel()
