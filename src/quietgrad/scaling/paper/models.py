"""Models on paper: causal language models by their shape, and models that are there.

A model of many equal blocks is run with two and with three; all that is counted grows by the same
amount for every further one (between the first and the last block's turn the bytes alive run in a
straight line). Tests hold this against the whole model, and the whole model against a real step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from quietgrad.clipping.capture.backward import Checkpointing, PerExampleLoss
from quietgrad.clipping.capture.layout import Layout, layout_of
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.planner.tracing import ModelTrace, trace
from quietgrad.scaling.paper.cutting import Exchange, asking, cut, gather, of_adapters
from quietgrad.scaling.paper.micro_batch import (
    BLOCK,
    Paper,
    block_of,
    on_paper,
    parameters_of,
    quiet,
)
from quietgrad.scaling.paper.once import Known
from quietgrad.scaling.paper.shapes import Shape
from quietgrad.tensors import Batch

FEW_BLOCKS = 4  # models of so many blocks are run whole
SHARING = (8, 4, 2)  # devices of a record; links between more are slow
HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Tuning:
    """What of a model is trained, and how.

    Attributes:
        lora: rank of adapters on all linear layers of the blocks; None trains everything.
        dtype: of the weights.
        checkpointing: activations of a block are computed again in the backward pass.
        parts: devices that share each record; 1: none does.
    """

    lora: int | None = None
    dtype: str = "bfloat16"
    checkpointing: bool = False
    parts: int = 1


def causal_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """[b] mean cross-entropy of the next token, in float32: what a plan by shape takes the loss
    to be.
    """
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits[:, :-1].float()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.mean(dim=1)


def fake_model(shape: Shape, tuning: Tuning) -> tuple[nn.Module, FakeTensorMode, list[Exchange]]:
    """A model of shapes alone, the mode that it runs in, and what its layers exchange. Vectors are
    made: rules try theirs.
    """
    import transformers as hf

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model: nn.Module = hf.AutoModelForCausalLM.from_config(
            shape.config(), dtype=getattr(torch, tuning.dtype)
        )
        exchanges = cut(model, tuning.parts) if tuning.parts > 1 else []
        heads = [e.module for e in exchanges if e.gathered]
        if tuning.lora is not None:
            import peft

            settings = peft.LoraConfig(
                r=tuning.lora, lora_alpha=2 * tuning.lora, target_modules="all-linear"
            )
            with quiet():
                model = peft.get_peft_model(
                    model,
                    settings,
                    autocast_adapter_dtype=False,
                    low_cpu_mem_usage=True,
                )
            exchanges += of_adapters(model, exchanges, tuning.parts)
        gather(model, heads, tuning.parts)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                if id(p) not in made:  # tied weights stay one
                    with mode if p.dim() > 1 else contextlib.nullcontext():
                        own = torch.ones(p.shape, dtype=p.dtype)
                    made[id(p)] = nn.Parameter(own, requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]
        for name, b in list(module._buffers.items()):
            if b is not None:
                module._buffers[name] = torch.ones(b.shape, dtype=b.dtype)
    if tuning.checkpointing:
        body: Any = model
        body.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model.train(), mode, exchanges


def parts_of(shape: Shape, devices: int) -> int:
    """Most devices (8, 4 or 2) that can share each record of so many: where transformers has a plan
    that cuts the model, and it divides. Else 1.
    """
    heads = [v for k, v in shape.values if k in HEADS and isinstance(v, int)]
    for parts in SHARING:
        if devices % parts == 0 and heads and not any(n % parts for n in heads):
            with contextlib.suppress(ValueError):
                fake_model(shape.with_layers(1), Tuning(parts=parts))
                return parts
    return 1


@lru_cache(maxsize=8)
def alike(shape: Shape) -> bool:
    """Whether every block holds what the first one does, so that some tell of the others."""
    import transformers as hf

    with torch.device("meta"):
        model: nn.Module = hf.AutoModelForCausalLM.from_config(shape.config())
    blocks: dict[int, list[tuple[str, torch.Size]]] = {}
    for name, p in model.named_parameters():
        blocks.setdefault(block_of(name), []).append((_renamed(name, 0), p.shape))
    return all(of == blocks[0] for block, of in blocks.items() if block > 0)


@lru_cache(maxsize=8)
def _known(dtype: str) -> Known:
    """What norms of some sizes hold, for weights of a type: the same in every model."""
    return {}


@lru_cache(maxsize=64)
def paper_of_shape(
    shape: Shape,
    tuning: Tuning,
    examples: int,
    length: int,
    clipper: Clipper,
    engine: Engine = "bookkeeping",
    whole: bool = False,
) -> Paper:
    """A causal language model by its shape, on ``examples`` texts of ``length`` tokens.

    Args:
        shape, tuning: the model.
        examples, length: of the micro-batch.
        clipper: settings of the norms.
        engine: see ``on_paper``.
        whole: runs every block, however many.
    """

    def run(layers: int) -> Paper:
        model, mode, exchanges = fake_model(shape.with_layers(layers), tuning)
        batch = _texts(mode, examples, length)
        known = _known(tuning.dtype)
        with asking(exchanges) as asked:
            peaks = on_paper(model, causal_loss, batch, clipper, engine, mode, known)
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        traced = _traced(shape.with_layers(layers), tuning, length)
        again = 1 + tuning.checkpointing
        item = getattr(torch, tuning.dtype).itemsize
        sent = item * sum(
            e.forward * (again if block_of(f"{e.layer}.") >= 0 else 1)
            + e.backward * (e.layer in asked)
            for e in exchanges
        )
        drawn = {f"{e.layer}.weight": e.drawn for e in exchanges}
        found = parameters_of(model, drawn)
        pieces = {e.layer + ".layer" * e.gathered for e in exchanges}
        copied = sum(
            p.entries
            for p in found
            if exchanges and p.trained and p.name.rpartition(".")[0] not in pieces
        )
        return Paper(found, buffers, peaks, traced, examples, sent, copied)

    if whole or shape.layers <= FEW_BLOCKS or not alike(shape):
        return run(shape.layers)
    return _grown(run(2), run(3), shape.layers)


def paper_of_model(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch, clipper: Clipper
) -> Callable[[int, Engine], Paper]:
    """(examples, engine) -> a micro-batch of a model that is there, whose weights stay as they are.

    Args:
        model, per_example_loss: of the run.
        batch: records that are not private: the shapes of one are taken.
        clipper: settings of the norms.
    """
    layout = layout_of(model)
    traced = trace(model, layout, per_example_loss, slice_batch(batch, 0, 1), Checkpointing())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    known: Known = {}

    @lru_cache(maxsize=16)
    def paper_of(examples: int, engine: Engine) -> Paper:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def repeated(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            with mode:
                return torch.zeros((examples, *value.shape[1:]), dtype=value.dtype)

        some = tree_map(repeated, batch)
        peaks = on_paper(model, per_example_loss, some, clipper, engine, mode, known)
        return Paper(parameters_of(model), buffers, peaks, traced, examples)

    return paper_of


def _texts(mode: FakeTensorMode, examples: int, length: int) -> dict[str, Tensor]:
    with mode:
        return {"input_ids": torch.zeros(examples, length, dtype=torch.long)}


@lru_cache(maxsize=64)
def _traced(shape: Shape, tuning: Tuning, length: int) -> ModelTrace:
    model, mode, _ = fake_model(shape, tuning)
    with quiet():
        layout: Layout = layout_of(model)
        one = _texts(mode, 1, length)
        with mode:
            return trace(model, layout, causal_loss, one, Checkpointing())


def _grown(two: Paper, three: Paper, layers: int) -> Paper:
    """What a model of so many blocks counts, from two and three of them."""
    more = layers - 2

    def line(a: float, b: float) -> Any:
        return a + more * (b - a)

    def last(label: str, layers: int) -> str:
        return f"{label} {layers - 1}"

    peaks = {}
    for label, value in two.peaks.items():
        kind, _, block = label.partition(" ")
        if block == "1":  # of the last block
            peaks[last(kind, layers)] = line(value, three.peaks[last(kind, 3)])
        else:
            peaks[label] = line(value, three.peaks[label])
    outside = [p for p in two.parameters if p.block < 0]
    first = [p for p in two.parameters if p.block == 0]
    blocks = [replace(p, name=_renamed(p.name, i), block=i) for i in range(layers) for p in first]
    a, b = two.trace, three.trace
    of_block = {_renamed(p.name, 0): p for p in a.parameters if block_of(p.name) == 0}
    traced = [p for p in a.parameters if block_of(p.name) < 0]
    for i in range(layers):
        traced += [
            type(p)(_renamed(n, i), p.cost, p.shape, p.output_gradient_bytes)
            for n, p in of_block.items()
        ]
    numbers = {
        name: line(getattr(a, name), getattr(b, name))
        for name in (
            "saved_bytes",
            "multiplications",
            "weight_multiplications",
            "calls",
            "gradient_bytes",
            "sum_bytes",
        )
    }
    model = ModelTrace(tuple(traced), **numbers)
    buffers = line(two.buffer_bytes, three.buffer_bytes)
    sent = line(two.sent_per_position, three.sent_per_position)
    copied = line(two.copied, three.copied)
    return Paper((*outside, *blocks), buffers, peaks, model, two.examples, sent, copied)


def _renamed(name: str, block: int) -> str:
    return BLOCK.sub(f".{block}.", name, count=1)
