"""Patches times a projection without patches: the same numbers, whatever the kernel; the same bits,
whoever else is in the batch; and no further off than the bound says.
"""

from __future__ import annotations

import pytest
import torch

from quietgrad.clipping.norms.estimators.hutch import hutch_norms
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.sketches import own_rounding
from quietgrad.clipping.norms.factors import ConvolutionFactors, Geometry
from quietgrad.clipping.norms.factors.patch_products import FEWEST, MOST, sums_over_patches
from quietgrad.clipping.norms.rounding import MOST_COUNTED, NormSums
from quietgrad.clipping.norms.spread import spread_of
from quietgrad.randomness import RandomKey

F32 = torch.float32
# channels of the input, of the output, kernel, stride, padding, dilation, groups, size
KERNELS = [
    (3, 8, (3, 3), (1, 1), (1, 1), (1, 1), 1, (8, 8)),
    (16, 8, (3, 3), (2, 2), (1, 1), (1, 1), 1, (9, 7)),
    (12, 6, (5, 3), (1, 2), (2, 1), (1, 1), 1, (8, 8)),
    (16, 8, (3, 3), (1, 1), (2, 2), (2, 2), 2, (6, 6)),
    (64, 16, (1, 1), (2, 2), (0, 0), (1, 1), 1, (6, 6)),
    (32, 64, (3, 3), (1, 1), (0, 1), (1, 1), 4, (20, 20)),
]


def made(kernel: tuple, examples: int = 7, seed: int = 0) -> ConvolutionFactors:
    channels, rows, size, stride, padding, dilation, groups, image = kernel
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, channels, *image, generator=source)
    weight = torch.zeros(rows, channels // groups, *size)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding, dilation, groups)
    grad = torch.randn(out.shape, generator=source)
    return ConvolutionFactors(x, grad, Geometry(size, stride, padding, dilation, groups))


@pytest.mark.parametrize("kernel", KERNELS)
def test_products_are_those_of_the_patches(kernel: tuple) -> None:
    use = made(kernel)
    sums = use.column_sums(F32)
    assert sums is not None and FEWEST <= sums.within <= MOST
    assert sums.within * sums.stretches == sums.entries == use.sizes.d
    projection = torch.randn(use.sizes.d, 5, generator=torch.Generator().manual_seed(1))
    slow = use.unfolded().right_bgtd.double() @ projection.double()
    fast = use.right_product(projection, F32)
    assert fast.shape == slow.shape
    torch.testing.assert_close(fast.double(), slow, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_image_has_the_same_bits_in_any_company(kernel: tuple) -> None:
    use = made(kernel, examples=33)
    projection = torch.randn(use.sizes.d, 8, generator=torch.Generator().manual_seed(1))
    whole = use.right_product(projection, F32)
    for span in (slice(0, 1), slice(2, 5), slice(1, 18), slice(32, 33)):
        assert torch.equal(use.examples(span).right_product(projection, F32), whole[span])
    order = torch.randperm(33, generator=torch.Generator().manual_seed(2))
    mixed = ConvolutionFactors(use.x[order] * 1.0, use.grad[order], use.geometry)
    assert torch.equal(mixed.right_product(projection, F32), whole[order])
    last = use.x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        ConvolutionFactors(last, use.grad, use.geometry).right_product(projection, F32), whole
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_bound_covers_what_rounding_did(kernel: tuple) -> None:
    """Against the same projection in float64, where patches are formed."""
    use = made(kernel)
    fast = hutch_norms([use], "w", 16, Projections(RandomKey.from_seed(3)), F32)
    wide = ConvolutionFactors(use.x.double(), use.grad.double(), use.geometry)
    projection = (
        Projections(RandomKey.from_seed(3)).gaussian("w", "hutch", use.sizes.d, 16).double()
    )
    sketch = wide.unfolded().left_bgtp.transpose(2, 3) @ (wide.unfolded().right_bgtd @ projection)
    slow = sketch.square().sum((1, 2, 3))
    error = (fast.squared.double().sqrt() - slow.sqrt()).abs()
    assert (error <= fast.margin + fast.slack.sqrt()).all()
    # Of the sketch; the sum's own rounding counts every output position.
    of_sum = MOST_COUNTED * own_rounding([use], use.grad, F32).of_spread
    assert (fast.margin < 1e-3 * slow.sqrt() + of_sum * spread_of([use], F32).norm).all()


SCALES = [(1e-6, 1e6), (1e-39, 1e37), (1e-30, 1e30), (1e30, 1e-30), (1e19, 1e-38), (1e12, 1e-42)]


@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[3]])
def test_certified_norms_hold_at_any_scale(kernel: tuple, scales: tuple[float, float]) -> None:
    """Denormal numbers and ones near the largest, few large entries among small ones, an offset."""
    plain = made(kernel)
    drawn = Projections(RandomKey.from_seed(4))
    projection = drawn.gaussian("w", "hutch", plain.sizes.d, 16).double()
    for x in (plain.x, plain.x**9, plain.x + 1000.0):
        use = ConvolutionFactors(x * scales[0], plain.grad * scales[1], plain.geometry)
        found = NormSums.empty(1, len(x), x.device)
        s = use.sizes
        found.add(0, hutch_norms([use], "w", 16, drawn, F32), s.g * s.p * s.d)
        wide = ConvolutionFactors(use.x.double(), use.grad.double(), use.geometry).unfolded()
        sketch = wide.left_bgtp.transpose(2, 3) @ (wide.right_bgtd @ projection)
        true = sketch.square().sum((1, 2, 3)).sqrt()
        certified = found.norms().divisors()[0]
        assert (true <= certified * (1 + 1e-12)).all()
        if scales == (1e-6, 1e6):  # at the others it may be infinite, and the record adds zero
            assert (certified < 1.1 * true).all()


@pytest.mark.parametrize("channels", [1, 2, 61])
def test_channels_that_make_no_sums_of_middle_length_form_patches(channels: int) -> None:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    assert sums_over_patches(geometry, channels, torch.zeros(1), F32) is None
    use = made((channels, 4, (3, 3), (1, 1), (1, 1), (1, 1), 1, (6, 6)))
    norms = hutch_norms([use], "w", 512, Projections(RandomKey.from_seed(3)), F32).squared
    left, right = use.unfolded().left_bgtp, use.unfolded().right_bgtd
    exact = (left.transpose(2, 3) @ right).square().sum((1, 2, 3))
    torch.testing.assert_close(norms.double(), exact.double(), rtol=0.3, atol=0)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_spread_of_a_convolution_is_above_that_of_its_patches(stride: int, groups: int) -> None:
    """A mutant forgot that an entry lies under several taps; its bounds of rounding were too small
    by the root of their number, and no error of random data shows that.
    """
    draws = torch.Generator().manual_seed(stride)
    geometry = Geometry((3, 3), (stride, stride), (1, 1), (1, 1), groups)
    for x in (torch.ones(2, 4, 9, 9), torch.randn(2, 4, 9, 9, generator=draws)):
        side = 9 if stride == 1 else 5
        grad = x[:, :, :side, :side].contiguous()
        factors = ConvolutionFactors(x, grad, geometry)
        bound, _, _ = factors.spread_sums(torch.float32)
        rows = factors.unfolded()
        lengths = rows.left_bgtp.double().norm(dim=3) * rows.right_bgtd.double().norm(dim=3)
        assert (bound >= lengths.sum(dim=2) * (1 - 1e-6)).all()
