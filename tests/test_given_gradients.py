"""Gradients of a user's own: one record's sum is never longer than the clipping norm, as it is
held, and what is no number adds nothing.
"""

from __future__ import annotations

import pytest
import torch

from quietgrad import PrivacyConfig
from quietgrad.plan.contribution import clip_given

NORM = 0.7
CLAIM = (
    PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=2, max_grad_norm=NORM)
    .build(10)
    .clipper.claim
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_makes_no_record_longer_than_the_clipping_norm(dtype: torch.dtype) -> None:
    """Mutant: no margin below the norm, which half of all sums are then above in their last bit."""
    drawn = torch.Generator().manual_seed(0)
    longest = 0.0
    for entries in (1, 3, 50):
        for _ in range(40):
            given = {
                name: (9 * torch.randn(entries, generator=drawn)).to(dtype) for name in ("a", "b")
            }
            sums = clip_given(given, None, CLAIM).gradients
            found = float(torch.cat([g.double() for g in sums.values()]).norm())
            assert found <= NORM
            longest = max(longest, found)
    assert longest > NORM * (1 - 1e-5)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_record_that_is_no_number_somewhere_adds_nothing_anywhere(wrong: float) -> None:
    """Mutant: what of it is finite is added, divided by nothing that bounds it."""
    a, b = torch.full((2, 3), 0.1), torch.full((2, 4), 0.1)
    a[1, 0] = wrong
    b[1] = 1e6
    sums = clip_given({"a": a, "b": b}, 2, CLAIM).gradients
    assert torch.equal(sums["a"], a[0]) and torch.equal(sums["b"], b[0])
    assert clip_given({"a": a, "b": b}, 2, CLAIM).private.examples == 2
