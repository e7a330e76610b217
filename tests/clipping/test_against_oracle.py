"""Every fast path against the slow oracle, over the shared list of models."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from cases import CASES, Case
from torch import nn

from quietgrad.clipping import Clipper, clipped_gradients
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms
from quietgrad.tensors import batch_size_of

pytestmark = pytest.mark.usefixtures("examined_once")

EXACT = ["exact", "materialized", "ghost"]
SMALL = [c for c in CASES if c.name != "minilm"]


def full_training() -> list:
    """Every model in every way; in ``make test`` in two of them, others for the next model, and the
    real shape of MiniLM once.
    """
    ways = [(estimator, size) for estimator in EXACT for size in (None, 1, 3)] + [("ghost64", 3)]
    others = pytest.mark.slow("every model in every way; each is clipped in two, and each way used")

    def left(case: Case, place: int, way: int) -> bool:
        return (place + way) % 5 != 0 if case in SMALL else ways[way] != ("exact", None)

    return [
        pytest.param(
            case,
            *ways[way],
            id="-".join(map(str, (case, *ways[way]))),
            marks=[others] if left(case, place, way) else [],
        )
        for place, case in enumerate(CASES)
        for way in range(len(ways))
    ]


@lru_cache(maxsize=1)
def asked(case: Case, lora: bool = False) -> tuple[Any, Any, Any, Any]:
    """Model, loss, batch and the oracle's per-example gradients: made once for all ways of clipping
    a case, which follow each other.
    """
    model, loss, batch = case.build()
    model = with_lora(case, model) if lora else model
    return model, loss, batch, oracle_gradients(model, loss, batch)


def assert_equal_to_oracle(
    model,
    loss,
    batch,
    gradients=None,
    *,
    estimator="exact",
    physical_batch_size=None,
    tolerance=1e-5,
) -> None:
    """``gradients``: the oracle's, where it was asked before."""
    gradients = oracle_gradients(model, loss, batch) if gradients is None else gradients
    norms = oracle_norms(gradients)
    clip = float(norms.median())  # some examples clipped, some not
    expected = oracle_clipped_sum(gradients, clip)
    bound = Clipper(clip, estimator, physical_batch_size=physical_batch_size).bind(
        model, loss
    )  # one look of the guard for both
    # Norms are taken twice at a guarded step, several parameters at once at others.
    guarded, usual = bound.clip(batch, step=0), bound.clip(batch, step=2)
    fast_norms = bound.norms(batch, step=0)
    torch.testing.assert_close(fast_norms.double(), norms.double(), rtol=tolerance, atol=0)
    size = max(float(g.norm()) for g in expected.values())
    for actual in (guarded, usual):
        assert actual.gradients.keys() == expected.keys()
        for name, g in expected.items():
            error = float((actual.gradients[name] - g).norm()) / max(float(g.norm()), 1e-2 * size)
            assert error < tolerance, (name, error)


@pytest.mark.parametrize(("case", "estimator", "physical_batch_size"), full_training())
def test_full_training(case: Case, estimator: str, physical_batch_size: int | None) -> None:
    assert_equal_to_oracle(
        *asked(case), estimator=estimator, physical_batch_size=physical_batch_size
    )


LORA_TARGETS = {
    "bert": ["query", "value"],
    "roberta": ["query", "value"],
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj", "down_proj"],
    "vit": "all-linear",
}


def with_lora(case: Case, model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3,
        target_modules=LORA_TARGETS[case.name],
        lora_dropout=0.0,
        init_lora_weights=False,
        fan_in_fan_out=case.name == "gpt2",
    )
    return peft.get_peft_model(model, config)


@pytest.mark.grid(5, "every model at one of its three cuts")
@pytest.mark.parametrize("physical_batch_size", [None, 1, 3])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in LORA_TARGETS], ids=str)
def test_lora(case: Case, physical_batch_size: int | None) -> None:
    assert_equal_to_oracle(*asked(case, lora=True), physical_batch_size=physical_batch_size)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_nothing_is_left_on_the_model(case: Case) -> None:
    model, loss, batch = case.build()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    clipped_gradients(model, loss, batch, 1.0)
    for name, module in model.named_modules():
        assert set(vars(module)) == before[name]
        assert (
            not module._forward_hooks
            and not module._forward_pre_hooks
            and not module._backward_hooks
        )
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_bare_parameter_batch_size_one_example_matches_any_other_cut() -> None:
    model, loss, batch = CASES[3].build()
    assert batch_size_of(batch) == 4
    assert isinstance(model, nn.Module)
    whole = clipped_gradients(model, loss, batch, 0.1).gradients
    cut = clipped_gradients(model, loss, batch, 0.1, physical_batch_size=1).gradients
    for name, g in whole.items():
        torch.testing.assert_close(g, cut[name], rtol=1e-5, atol=1e-7)
