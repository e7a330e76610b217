"""Exact clipping against the slow oracle over the architectures of ``architectures.py``, trained in
full and with LoRA.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from architectures import (
    ARCHITECTURES,
    LORA_TARGETS,
    TWINS,
    Expected,
    ask_oracle,
    assert_equal_to,
    with_lora,
)
from cases import Case
from torch import nn

pytestmark = pytest.mark.usefixtures("examined_once")

MICRO_BATCH_SIZES = [None, 1, 3]
WITH_TWIN = [c for c in ARCHITECTURES if c.name in TWINS]


@lru_cache(maxsize=1)
def _built(case: Case, tune: str) -> tuple[nn.Module, Any, Any, Expected]:
    """With what the oracle says, of the model or its twin: once for all micro-batch sizes, which
    follow each other.
    """
    model, loss, batch = case.build()
    model = model if tune == "full" else with_lora(model, LORA_TARGETS[case.name])
    if case.name not in TWINS:
        return model, loss, batch, ask_oracle(model, loss, batch)
    twin, _, _ = TWINS[case.name].build()
    if tune == "lora":
        twin = with_lora(twin, LORA_TARGETS[case.name])
    twin.load_state_dict(model.state_dict())
    return model, loss, batch, ask_oracle(twin, loss, batch)


@pytest.mark.grid(16, "every model with one of its tunings, at one of three cuts")
@pytest.mark.parametrize("physical_batch_size", MICRO_BATCH_SIZES)
@pytest.mark.parametrize("tune", ["full", "lora"])
@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_architecture_against_the_oracle_of_itself_or_its_twin(
    case: Case, tune: str, physical_batch_size: int | None
) -> None:
    model, loss, batch, expected = _built(case, tune)
    assert_equal_to(expected, model, loss, batch, physical_batch_size)


@pytest.mark.parametrize("case", WITH_TWIN, ids=str)
def test_frozen_embeddings_hide_nothing(case: Case) -> None:
    """Then nothing trainable comes before the checkpointed layers, and autograd could stop short of
    them without an error.
    """
    model, loss, batch = case.build()
    twin, _, _ = TWINS[case.name].build()
    for one in (model, twin):
        one.bert.embeddings.requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    assert_equal_to(ask_oracle(twin, loss, batch), model, loss, batch)


def test_what_should_be_active_is_active() -> None:
    """The features these cases are about really change the computation."""
    models = {case.name: case.build()[0] for case in ARCHITECTURES}
    assert models["llama-eager"].config._attn_implementation == "eager"
    assert models["llama-sdpa"].config._attn_implementation == "sdpa"
    assert models["gemma"].lm_head.weight is models["gemma"].model.embed_tokens.weight
    assert models["mistral"].config.sliding_window == 3
    assert any("q_norm" in name for name, _ in models["qwen3"].named_parameters())
    for name in ("bert-checkpointed", "bert-checkpointed-reentrant"):
        assert models[name].training
        assert all(layer.gradient_checkpointing for layer in models[name].bert.encoder.layer)
    for name, trains in [("t5", True), ("t5-frozen-bias", False)]:
        tables = [p for n, p in models[name].named_parameters() if "relative_attention_bias" in n]
        assert len(tables) == 2 and all(table.requires_grad is trains for table in tables)
