"""What fingerprints of per-example gradients tell apart, and what they must not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.capture.layout import Site
from quietgrad.clipping.soundness import fingerprints
from quietgrad.clipping.soundness.fingerprints import Factors, factors_of, numbers, print_of

SITE = Site("layer", nn.Linear(3, 4), {}, None)
RECORDS, POSITIONS = 5, 6


def batch() -> tuple[Tensor, Tensor]:
    """Inputs and gradients of a layer."""
    source = torch.Generator().manual_seed(3)
    x, g = (torch.randn(RECORDS, POSITIONS, width, generator=source) for width in (3, 4))
    return x, g


def of(x: Tensor, g: Tensor, first: int | None = None) -> Factors:
    found = factors_of(Use(SITE, (x,), {}, {0: g}), len(g), first)
    assert found is not None
    return found


def test_each_record_is_its_own_row() -> None:
    x, g = batch()
    together = of(x, g)
    for row in range(RECORDS):
        alone = of(x[row : row + 1], g[row : row + 1])
        same = [alone.is_row_of(together, other, 0.02, 0.0) for other in range(RECORDS)]
        assert same == [other == row for other in range(RECORDS)]


def test_records_that_are_taken_apart_give_what_they_give_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, g = batch()
    at_once, few = of(x, g), of(x, g, first=2)
    monkeypatch.setattr(fingerprints, "AT_ONCE", 90)  # two records
    apart = of(x, g)
    for name in ("input_bd", "input_norms", "gradient_bd", "gradient_norms", "reach"):
        torch.testing.assert_close(getattr(apart, name), getattr(at_once, name))
        torch.testing.assert_close(getattr(few, name), getattr(at_once, name)[:2])


def test_norms_and_reach_are_of_all_entries() -> None:
    x, g = batch()
    g[1, 2, 3] = -9.0
    found = of(x, g)
    torch.testing.assert_close(found.input_norms, x.double().flatten(1).norm(dim=1))
    torch.testing.assert_close(found.gradient_norms, g.double().flatten(1).norm(dim=1))
    torch.testing.assert_close(found.reach, g.double().flatten(1).abs().amax(1))


def test_what_cancels_in_the_sums_is_seen_in_the_norms() -> None:
    x, g = batch()
    known, other = numbers(POSITIONS, g.device, g.dtype), g.clone()
    other[:, 0] += 5 / known[0]
    other[:, 1] -= 5 / known[1]
    torch.testing.assert_close(of(x, g).gradient_bd, of(x, other).gradient_bd, rtol=1e-5, atol=1e-5)
    assert not of(x, g).is_row_of(of(x, other), 0, 0.02, 0.0)


def test_places_of_one_sign_are_told_apart() -> None:
    x, g = batch()
    known = numbers(POSITIONS, g.device, g.dtype)
    assert known[0] * known[1] > 0
    order = [1, 0, 2, 3, 4, 5]
    assert not of(x, g).is_row_of(of(x, g[:, order]), 0, 0.02, 0.0)


def test_what_is_no_number_is_told_from_what_is() -> None:
    x, g = batch()
    gone, moved = g.clone(), g.clone()
    gone[0, :, 1] = float("nan")
    moved[0, :, 1] = float("nan")
    moved[0, :, 2] += 1.0
    none = torch.zeros_like(g)
    assert of(x, gone).is_row_of(of(x, gone), 0, 0.02, 0.0)
    assert not of(x, none).is_row_of(of(x, none * gone), 0, 0.02, 0.0)
    assert not of(x, g).is_row_of(of(x, gone), 0, 0.02, 0.0)
    assert not of(x, gone).is_row_of(of(x, g), 0, 0.02, 0.0)
    assert not of(x, gone).is_row_of(of(x, moved), 0, 0.02, 0.0)


def test_inputs_count_unless_both_gradients_are_rounding() -> None:
    x, g = batch()
    g = g / g.flatten(1).norm(dim=1).view(-1, 1, 1)
    small, other = of(x, 0.9 * g), of(-x, 1.05 * g)
    assert not small.is_row_of(other, 0, 0.0, floor=1.0)
    assert not other.is_row_of(small, 0, 0.0, floor=1.0)
    assert small.is_row_of(other, 0, 0.0, floor=2.0)


def test_what_has_another_width_cannot_be_compared() -> None:
    x, g = batch()
    assert of(x, g).is_row_of(of(F.pad(x, (0, 1)), g), 0, 0.02, 0.0)
    assert not of(x, g).is_row_of(of(F.pad(x, (0, 1)), -g), 0, 0.02, 0.0)


@pytest.mark.parametrize("words", [True, False])
def test_inputs_at_positions_without_a_gradient_add_nothing(words: bool) -> None:
    x, g = batch()
    x = x[:, :, 0] if words else x
    g[:, 4] = 0.0
    other = x.clone()
    other[:, 4] += 7.0
    assert of(x, g).is_row_of(of(other, g), 0, 1e-6, 0.0)
    other[:, 3] += 7.0
    assert not of(x, g).is_row_of(of(other, g), 0, 0.02, 0.0)


def test_a_loud_record_changes_no_other_ones_weights() -> None:
    x, g = batch()
    alone = of(x[:1], g[:1])
    g[1] *= 1e6
    assert alone.is_row_of(of(x, g), 0, 1e-6, 0.0)


def test_half_precision_is_noted_of_either() -> None:
    x, g = batch()
    assert [of(*pair).half for pair in ((x, g), (x.half(), g), (x, g.bfloat16()))] == [
        False,
        True,
        True,
    ]


def test_what_has_no_examples_has_no_fingerprint() -> None:
    x, g = batch()
    assert factors_of(Use(SITE, (x,), {}, {0: g}), RECORDS - 1) is None
    assert factors_of(Use(SITE, (x,), {}, {1: g}), RECORDS) is None
    assert factors_of(Use(SITE, (), {}, {0: g}), RECORDS) is None
    assert factors_of(Use(SITE, (), {}, {0: g[:1]}), 1) is not None


def test_a_print_is_of_all_blocks_and_of_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "AT_ONCE", 4)
    flat = torch.arange(1.0, 11.0)
    last, blocks = flat.clone(), flat[[4, 5, 6, 7, 0, 1, 2, 3, 8, 9]]
    last[9] = 0.0
    norm, _ = print_of(flat)
    torch.testing.assert_close(float(norm), float(flat.double().norm()))
    within = flat[[1, 0, *range(2, 10)]]
    for other in (last, blocks, within, flat.flip(0)):
        assert abs(float(print_of(other)[1] - print_of(flat)[1])) > 0.1
    assert print_of(flat[:0]).tolist() == [0.0, 0.0]
    assert not print_of(torch.tensor([1.0, math.nan])).isfinite().any()
