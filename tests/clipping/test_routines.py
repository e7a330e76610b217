"""What holds for every opened routine: sketches, views of a record, and what is left of a step
without its own weight gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import test_attention as attention
import test_recurrent as recurrent
import torch
from cases import cross_entropy
from torch import Tensor, nn
from torch.autograd.graph import Node

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.backward import forward_captured, visit_captured_calls
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms

MODELS = {
    "lstm": lambda: recurrent.Sequences("lstm", recurrent.packed_outputs, num_layers=2),
    "gru": lambda: recurrent.Sequences("gru", recurrent.twice),
    "rnn": lambda: recurrent.Sequences("rnn", recurrent.last_states),
    "attention": lambda: attention.Attends(attention.itself),
    "cross-attention": lambda: attention.Attends(attention.three_inputs, add_bias_kv=True),
    "both": lambda: attention.Attends(attention.weights_too),
}


@pytest.mark.grid(4, "the same sketches for other layers")
@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("kind", MODELS)
def test_sketches_estimate_their_norms(kind: str, estimator: Any) -> None:
    model, batch = MODELS[kind](), recurrent.batch_of()
    norms = oracle_norms(oracle_gradients(model, cross_entropy, batch))
    torch.manual_seed(0)
    found = Clipper(1.0, estimator, sketch_dim=256).norms(model, cross_entropy, batch)
    torch.testing.assert_close(found.double(), norms.double(), rtol=0.2, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_views_of_a_record_are_averaged(kind: str) -> None:
    model, rows = MODELS[kind](), recurrent.batch_of()
    batch = {name: tensor.unflatten(0, (2, 2)) for name, tensor in rows.items()}

    def mean_of_views(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
        return cross_entropy(model, flat).unflatten(0, (-1, 2)).mean(1)

    gradients = oracle_gradients(model, mean_of_views, batch)
    clip = float(oracle_norms(gradients).median())
    clipper = Clipper(clip, views=2, engine="bookkeeping")
    found = clipper.clip(model, cross_entropy, batch).gradients
    for name, expected in oracle_clipped_sum(gradients, clip).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_no_weight_gradient_is_computed_unasked(kind: str) -> None:
    model, batch = MODELS[kind](), recurrent.batch_of()
    layout, arrived = layout_of(model), []
    passes = forward_captured(model, layout, cross_entropy, batch, lambda use: None, False)
    with passes as (losses, recording):
        nodes = _nodes_of_weights(losses)
        for node in nodes:
            node.register_hook(lambda *_: arrived.append(1))
        visit_captured_calls(losses, recording, layout)
    assert nodes and not arrived


def _nodes_of_weights(losses: Tensor) -> set[Node]:
    """Nodes whose gradients go to parameters and nowhere else."""
    found, open_, known = set(), [losses.grad_fn], set()
    while open_:
        node = open_.pop()
        if node is None or node in known:
            continue
        known.add(node)
        after = [n for n, _ in node.next_functions if n is not None]
        if after and all(type(n).__name__ == "AccumulateGrad" for n in after):
            leaves = [n.variable for n in after]  # type: ignore[attr-defined]
            if all(isinstance(leaf, nn.Parameter) for leaf in leaves):
                found.add(node)
        open_ += after
    return found
