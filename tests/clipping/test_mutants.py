"""Deliberately broken mechanisms: the comparison with the oracle has to notice every one of them,
or it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from cases import CASES
from test_against_oracle import assert_equal_to_oracle
from torch import nn

from quietgrad.clipping import bound
from quietgrad.clipping.capture.routines import maps, recurrent
from quietgrad.clipping.capture.routines.time import Order
from quietgrad.clipping.engines import accumulator, bookkeeping, one_example
from quietgrad.clipping.engines.at_once import weight_and_bias
from quietgrad.clipping.norms.estimators.several import together
from quietgrad.clipping.norms.estimators.several.rank_one import RankOne
from quietgrad.clipping.norms.estimators.several.together import Together
from quietgrad.clipping.norms.factors import (
    DenseFactors,
    DirectGradients,
    OneHotFactors,
    SummedRows,
)
from quietgrad.clipping.norms.rounding import Measured, Norms
from quietgrad.clipping.norms.rules import registry
from quietgrad.clipping.soundness.guard import Guard
from quietgrad.clipping.verify import verify_clipping

RIGHT_TOGETHER = Together.measure
RIGHT_RANK_ONES = RankOne.measure
RIGHT_MEASURE, RIGHT_FACTORS, RIGHT_FINISH = (
    accumulator.Accumulator._measure,
    bookkeeping.clip_factors,
    accumulator.Accumulator.finish,
)

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """What is broken, how, and a model of the shared list on which that must show."""

    name: str
    case: str
    break_it: Break

    def __str__(self) -> str:
        return self.name


def measuring(change: Callable) -> Break:
    def break_it(patch: pytest.MonkeyPatch) -> None:
        for some in (Together, RankOne):
            patch.setattr(some, "takes", lambda *_: False)  # all come by here
        patch.setattr(accumulator.Accumulator, "_measure", change)

    return break_it


def finishing(change: Callable) -> Break:
    return lambda patch: patch.setattr(accumulator.Accumulator, "finish", change)


def factors(change: Callable) -> Break:
    def break_it(patch: pytest.MonkeyPatch) -> None:
        for engine in (bookkeeping, one_example):
            patch.setattr(engine, "clip_factors", change)

    return break_it


def adding(engine_name: str, change: Callable) -> Break:
    right = getattr(bound, engine_name)
    return lambda patch: patch.setattr(
        bound, engine_name, lambda *arguments: change(right, *arguments)
    )


def rule(kind: type[nn.Module], change: Callable) -> Break:
    right = registry._RULES[kind]
    return lambda patch: patch.setitem(
        registry._RULES, kind, lambda *arguments: change(right(*arguments), *arguments)
    )


def replacing(where: object, name: str, change: Callable) -> Break:
    return lambda patch: patch.setattr(where, name, change)


def scaled(measured: Measured, factor) -> Measured:
    return Measured(
        measured.squared * factor, measured.slack * factor, measured.margin * factor**0.5
    )


def matrices_left_out(self, name, uses):
    measured, kept = RIGHT_MEASURE(self, name, uses)
    return scaled(measured, 0.0) if isinstance(uses[0], DenseFactors) else measured, kept


def only_the_last_use(self, name, uses):
    return RIGHT_MEASURE(self, name, uses[-1:])[0], RIGHT_MEASURE(self, name, uses)[1]


def squared_norm_as_norm(self):
    right = RIGHT_FINISH(self)
    return Norms(right.estimate**2, right.own**2, right.certified**2, right.least)


def norms_added_up(self, name, uses):
    measured, kept = RIGHT_MEASURE(self, name, uses)
    return scaled(measured, measured.squared.rsqrt().nan_to_num(0.0, 0.0, 0.0)), kept


def uses_summed_after_squaring(self, name, uses):
    parts = [RIGHT_MEASURE(self, name, [use])[0] for use in uses]
    total = Measured(
        sum(p.squared for p in parts), sum(p.slack for p in parts), sum(p.margin for p in parts)
    )
    return total, RIGHT_MEASURE(self, name, uses)[1]


def last_use_not_added(self, name, uses):
    measured, kept = RIGHT_MEASURE(self, name, uses)
    return measured, kept[:-1] if len(kept) > 1 else kept


def no_minimum_with_one(norms, limits, scaling):
    return limits.unsqueeze(1) / norms


def batch_clipped_as_a_whole(norms, limits, scaling):
    return RIGHT_FACTORS(norms.norm().expand_as(norms), limits, scaling)


def last_example_left_out(norms, limits, scaling):
    found = RIGHT_FACTORS(norms, limits, scaling)
    found[:, -1] = 0
    return found


def factors_of_neighbours(norms, limits, scaling):
    return RIGHT_FACTORS(norms, limits, scaling).roll(1, 1)


def divided_by_the_batch_size(right, work, part, sums):
    seen = right(work, part, sums)
    for g in sums.values():
        g /= len(seen.shares)
    return seen


def without(local: str) -> Callable:
    return lambda found, *_: {name: c for name, c in found.items() if name != local}


def padding_read_as_a_word(found, module, ids, grad, wanted):
    b = ids.shape[0]
    return {
        "weight": OneHotFactors(
            ids.reshape(b, -1), grad.reshape(b, 1, -1, grad.shape[-1]), module.num_embeddings
        )
    }


def not_normalised(found, module, x, grad, wanted):
    values = (x * grad).reshape(grad.shape[0], -1, x.shape[-1]).sum(1)
    return found | {"weight": DirectGradients(values)}


def first_position_only(found, *_):
    weight = found["weight"]
    return found | {"weight": DenseFactors(weight.left_bgtp[:, :, :1], weight.right_bgtd[:, :, :1])}


def examples_shifted(found, *_):
    return {
        name: SummedRows(c.rows.roll(1, 0)) if name == "bias" else c for name, c in found.items()
    }


def repeated_for_neighbours(module, x, grad, wanted):
    return {"weight": DirectGradients(grad.flatten(1).roll(1, 0))}


def last_that_waits_left_out(self):
    self._waiting = self._waiting[:-1]
    RIGHT_TOGETHER(self)


def last_rank_one_left_out(self):
    self._waiting = {dtype: waiting[:-1] for dtype, waiting in self._waiting.items()}
    self._waiting = {dtype: waiting for dtype, waiting in self._waiting.items() if waiting}
    RIGHT_RANK_ONES(self)


def ones_beside_the_wrong_factor(patch):
    def swapped(site, found):
        both = weight_and_bias(site, found)
        if both is None:
            return None
        return both._replace(ones="left" if both.ones == "right" else "right")

    patch.setattr(accumulator, "weight_and_bias", swapped)


PACKED = "packed-cross-attention"

MUTANTS = [
    Mutant("matrices-left-out-of-the-norm", "mlp", measuring(matrices_left_out)),
    Mutant("squared-norm-used-as-norm", "mlp", finishing(squared_norm_as_norm)),
    Mutant("norms-of-layers-added-up", "mlp", measuring(norms_added_up)),
    Mutant("only-the-last-use-of-a-shared-layer", "bare-parameters", measuring(only_the_last_use)),
    Mutant("tied-weights-as-sum-of-squares", "llama-tied", measuring(uses_summed_after_squaring)),
    Mutant("shared-layer-as-sum-of-squares", "bare-parameters",
    measuring(uses_summed_after_squaring)),
    Mutant("last-use-of-tied-weights-not-added", "llama-tied", measuring(last_use_not_added)),
    Mutant("grams-that-wait-forgotten", "gpt2",
    replacing(Together, "measure", last_that_waits_left_out)),
    Mutant("grams-all-taken-for-one", "gpt2",
    replacing(together, "is_same", lambda *_: True)),
    Mutant("biases-left-out-of-ghost-norms", "gpt2",
    replacing(together, "_add_ones", lambda *_: None)),
    Mutant("ones-beside-the-wrong-factor", "gpt2", ones_beside_the_wrong_factor),
    Mutant("rows-of-rank-one-that-wait-forgotten", "mlp",
    replacing(RankOne, "measure", last_rank_one_left_out)),
    Mutant("no-minimum-with-one", "mlp", factors(no_minimum_with_one)),
    Mutant("batch-clipped-as-a-whole", "mlp", factors(batch_clipped_as_a_whole)),
    Mutant("an-example-left-out", "mlp", factors(last_example_left_out)),
    Mutant("neighbours-factors", "mlp", factors(factors_of_neighbours)),
    Mutant("sum-divided-by-the-batch-size", "mlp", adding("add_by_bookkeeping",
    divided_by_the_batch_size)),
    Mutant("bias-gradient-missing", "mlp", rule(nn.Linear, without("bias"))),
    Mutant("convolution-bias-missing", "cnn-groupnorm", rule(nn.Conv2d, without("bias"))),
    Mutant("biases-of-neighbouring-examples", "mlp", rule(nn.Linear, examples_shifted)),
    Mutant("first-position-only", "mlp-positions", rule(nn.Linear, first_position_only)),
    Mutant("padding-index-ignored", "recurrent-attention", rule(nn.Embedding,
    padding_read_as_a_word)),
    Mutant("normalisation-weight-of-raw-inputs", "mlp", rule(nn.LayerNorm, not_normalised)),
    Mutant("states-after-the-step", PACKED, replacing(Order, "before", Order.after)),
    Mutant("steps-past-the-end", PACKED, replacing(Order, "only_where_active", lambda *_: None)),
    Mutant("states-held-past-the-end", PACKED, replacing(Order, "hold", lambda *_: None)),
    Mutant("sorted-states", PACKED, replacing(recurrent, "_permuted", lambda state, order: state)),
    Mutant("attention-biases-of-neighbours", PACKED, replacing(maps, "repeated_rule",
    repeated_for_neighbours)),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_oracle_comparison_notices(mutant: Mutant, monkeypatch) -> None:
    model, loss, batch = next(c for c in CASES if c.name == mutant.case).build()
    assert_equal_to_oracle(model, loss, batch)  # it is the mutation that fails, nothing else
    monkeypatch.setattr(
        Guard, "is_due", lambda *arguments: False
    )  # the guard sees some of them by itself; here the comparison has to
    monkeypatch.setattr(accumulator, "require_same_norms", lambda *_: None)  # the same
    mutant.break_it(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal_to_oracle(model, loss, batch)
    assert not verify_clipping(model, loss, batch) < 1e-4  # which all good models stay below
