"""Deliberately broken mechanisms: the comparison with the oracle has to notice every one of them, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from cases import CASES
from test_against_oracle import assert_equal_to_oracle
from torch import nn

from quietgrad.clipping import engine, rules
from quietgrad.clipping.factors import DenseFactors, DirectGradients, OneHotFactors, weighted_sum
from quietgrad.clipping.verify import verify_clipping

RIGHT_NORMS, RIGHT_SQUARED, RIGHT_ADD = engine.estimate_norms, engine._squared_norms, engine.add_clipped

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """What is broken, how, and a model of the shared list on which that must show."""

    name: str
    case: str
    break_it: Break

    def __str__(self) -> str:
        return self.name


def norms(change: Callable) -> Break:
    return lambda patch: patch.setattr(engine, "estimate_norms", change)


def adding(change: Callable) -> Break:
    return lambda patch: patch.setattr(engine, "add_clipped", change)


def rule(kind: type[nn.Module], change: Callable) -> Break:
    right = rules._RULES[kind]
    return lambda patch: patch.setitem(rules._RULES, kind, lambda *arguments: change(right(*arguments), *arguments))


def one_parameter_left_out(factored, *arguments):
    kept = dict(list(factored.contributions.items())[1:])
    return RIGHT_NORMS(replace(factored, contributions=kept), *arguments)


def only_the_last_use(factored, *arguments):
    return RIGHT_NORMS(
        replace(factored, contributions={n: u[-1:] for n, u in factored.contributions.items()}), *arguments
    )


def squared_norm_as_norm(*arguments):
    return RIGHT_NORMS(*arguments).pow(2)


def sum_of_the_layers_norms(factored, *arguments):
    each = [RIGHT_NORMS(replace(factored, contributions={n: u}), *arguments) for n, u in factored.contributions.items()]
    return torch.stack(each).sum(0)


def uses_summed_after_squaring(uses, *arguments):
    return sum(RIGHT_SQUARED([use], *arguments) for use in uses)


def no_minimum_with_one(sums, factored, norms, max_grad_norm):
    for name, uses in factored.contributions.items():
        for use in uses:
            sums[name] += weighted_sum(use, max_grad_norm / norms, factored.parameters[name].shape, sums[name].dtype)


def divided_by_the_batch_size(sums, factored, norms, max_grad_norm):
    part = {name: torch.zeros_like(g) for name, g in sums.items()}
    RIGHT_ADD(part, factored, norms, max_grad_norm)
    for name, g in part.items():
        sums[name] += g / factored.batch_size


def clipped_layer_by_layer(sums, factored, norms, max_grad_norm):
    for name, uses in factored.contributions.items():
        one = replace(factored, contributions={name: uses})
        RIGHT_ADD(sums, one, RIGHT_NORMS(one, "exact", 2, None), max_grad_norm)


def batch_clipped_as_a_whole(sums, factored, norms, max_grad_norm):
    RIGHT_ADD(sums, factored, norms.norm().expand_as(norms), max_grad_norm)


def last_example_left_out(sums, factored, norms, max_grad_norm):
    RIGHT_ADD(sums, factored, torch.cat([norms[:-1], norms.new_full((1,), float("nan"))]), max_grad_norm)


def without(local: str) -> Callable:
    return lambda found, *_: {name: c for name, c in found.items() if name != local}


def padding_read_as_a_word(found, module, ids, grad, wanted):
    b = ids.shape[0]
    return {"weight": OneHotFactors(ids.reshape(b, -1), grad.reshape(b, 1, -1, grad.shape[-1]), module.num_embeddings)}


def not_normalised(found, module, x, grad, wanted):
    values = (x * grad).reshape(grad.shape[0], -1, x.shape[-1]).sum(1)
    return found | {"weight": DirectGradients(values)}


def first_position_only(found, *_):
    weight = found["weight"]
    return found | {"weight": DenseFactors(weight.left_bgtp[:, :, :1], weight.right_bgtd[:, :, :1])}


def examples_shifted(found, *_):
    return {name: DirectGradients(c.values_bn.roll(1, 0)) if name == "bias" else c for name, c in found.items()}


MUTANTS = [
    Mutant("a-layer-left-out-of-the-norm", "mlp", norms(one_parameter_left_out)),
    Mutant("squared-norm-used-as-norm", "mlp", norms(squared_norm_as_norm)),
    Mutant("norms-of-layers-added-up", "mlp", norms(sum_of_the_layers_norms)),
    Mutant("only-the-last-use-of-a-shared-layer", "bare-parameters", norms(only_the_last_use)),
    Mutant("tied-weights-as-sum-of-squares", "llama-tied", lambda p: p.setattr(engine, "_squared_norms", uses_summed_after_squaring)),
    Mutant("shared-layer-as-sum-of-squares", "bare-parameters", lambda p: p.setattr(engine, "_squared_norms", uses_summed_after_squaring)),
    Mutant("no-minimum-with-one", "mlp", adding(no_minimum_with_one)),
    Mutant("sum-divided-by-the-batch-size", "mlp", adding(divided_by_the_batch_size)),
    Mutant("clipped-layer-by-layer", "mlp", adding(clipped_layer_by_layer)),
    Mutant("batch-clipped-as-a-whole", "mlp", adding(batch_clipped_as_a_whole)),
    Mutant("an-example-left-out", "mlp", adding(last_example_left_out)),
    Mutant("bias-gradient-missing", "mlp", rule(nn.Linear, without("bias"))),
    Mutant("convolution-bias-missing", "cnn-groupnorm", rule(nn.Conv2d, without("bias"))),
    Mutant("biases-of-neighbouring-examples", "mlp", rule(nn.Linear, examples_shifted)),
    Mutant("first-position-only", "mlp-positions", rule(nn.Linear, first_position_only)),
    Mutant("padding-index-ignored", "recurrent-attention", rule(nn.Embedding, padding_read_as_a_word)),
    Mutant("normalisation-weight-of-raw-inputs", "mlp", rule(nn.LayerNorm, not_normalised)),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_oracle_comparison_notices(mutant: Mutant, monkeypatch) -> None:
    model, loss, batch = next(c for c in CASES if c.name == mutant.case).build()
    assert_equal_to_oracle(model, loss, batch)  # it is the mutation that fails, nothing else
    mutant.break_it(monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal_to_oracle(model, loss, batch)
    assert not verify_clipping(model, loss, batch) < 1e-4  # which all good models stay below
