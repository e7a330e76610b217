"""Real private steps of a causal language model on processes, with what they hold and send."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.world import without_looks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.distributed import sharded as sharded_company
from quietgrad.noise import BandedNoise, IndependentNoise
from quietgrad.plan import PrivacyConfig
from quietgrad.plan.run import PrivateRun
from quietgrad.scaling.paper.held import Held
from quietgrad.scaling.paper.models import causal_loss
from quietgrad.scaling.paper.shapes import Shape, of_config
from quietgrad.scaling.ways.forecast import ACTIVATIONS

CUT = {  # as transformers' own plan of a Llama
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd")
STEPS = 5  # the guard looks at releases 1, 2 and 4: the last one is an ordinary step
UNLOOKED = 2  # without looks, the second is one


def small_shape(vocabulary: int, width: int, blocks: int, inner: int) -> Shape:
    values = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": inner,
        "tie_word_embeddings": False,
    }
    return of_config(values, f"width {width}", "this test")


def made(shape: Shape, lora: int | None = None) -> nn.Module:
    """The model; with adapters of a rank on all linear layers of its blocks, where it is given."""
    import transformers as hf

    torch.manual_seed(0)
    model: nn.Module = hf.AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float32)
    if lora is not None:
        import peft

        settings = peft.LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear")
        model = peft.get_peft_model(model, settings)
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zeros would leave the other factor without a gradient
                nn.init.normal_(p, std=0.02)
    return model.train()


def cut_plan(model: nn.Module) -> dict[str, Any]:
    """``CUT``; of adapters the factor that meets whole features is whole on every device."""
    if not any("lora_" in name for name, _ in model.named_parameters()):
        return CUT
    found = {}
    for name, style in CUT.items():
        inside = f"base_model.model.{name}"
        if not name.endswith("_proj"):
            found[inside] = style
            continue
        found[f"{inside}.base_layer"] = style
        factor = "A" if isinstance(style, RowwiseParallel) else "B"
        found[f"{inside}.lora_{factor}.default"] = style
    return found


def stepped(
    rank: int,
    build: Any,
    vocabulary: int,
    job: tuple[int, int, int, int, int],
    estimator: str = "auto",
    looks: bool = True,
    sharded: bool = False,
    together: int = 1,
) -> tuple[int, dict[str, float]]:
    """(the most bytes of the last step, what each kind of collective operation sent in it).

    Args:
        rank: of this process.
        build: makes the model.
        vocabulary: of its tokens.
        job: devices, examples of a micro-batch, micro-batches, tokens of a text, bands.
        estimator: of the norms.
        looks: whether the guard looks at releases. Of a large model that is most of the time, and
            no part of what an ordinary step holds and sends.
        sharded: whether blocks, and then the model, are given to ``fully_shard``.
        together: devices that share each record; layers are cut over them.
    """
    size, examples, rounds, length, bands = job
    groups = size // together
    steps = STEPS if looks else max(UNLOOKED, bands)
    held, sent = Held(), dict[str, float]()
    restore = _counting(sent, rank, size)
    try:
        looking = contextlib.nullcontext() if looks else without_looks()
        with looking, pytest.MonkeyPatch.context() as patch, held, Functional(sent, together):
            _count_rings(sent, groups, patch)
            model = build()
            if sharded or together > 1:
                _tell_of_sizes(held, patch)
                _spread(model, groups, together)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=together == 1)
            # A step takes one of as many parts as there are bands.
            count = examples * groups * rounds * bands
            texts = [{"input_ids": torch.randint(0, vocabulary, (length,))} for _ in range(count)]
            config = PrivacyConfig(
                noise_multiplier=1.0,
                sample_rate=1.0 / bands,
                steps=steps,
                seed=7,
                data_are_public=True,
                clipping=Clipping(estimator),  # type: ignore[arg-type]
                noise=BandedNoise(bands) if bands > 1 else IndependentNoise(),
                performance=Performance(engine="bookkeeping"),
            )
            with config.build(count).start(tensor_parallel=together) as run:
                batches = run.loader(texts, steps=steps, physical_batch_size=examples)
                for step, batch in enumerate(batches):
                    gc.collect()
                    if step == steps - 1:
                        sent.clear()
                        held.peaks.clear()
                    run.backward(model, causal_loss, batch)
                    optimizer.step()
    finally:
        restore()
    return held.peak, dict(sent)


def starved(rank: int, *given: Any) -> tuple[int, dict[str, float]]:
    """``stepped``, where all other threads of this process wait until this one has nothing to do,
    as they may where processors are busy.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clip = PrivateRun.clip

    def clipped(*args: Any) -> Any:
        for thread in map(int, os.listdir("/proc/self/task")):
            if thread != threading.get_native_id():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        return clip(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateRun, "clip", clipped)
        return stepped(rank, *given)


def _spread(model: Any, groups: int, together: int) -> None:
    # torch's own, where the outermost module returns what a layer that is cut gathered
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh("cpu", (groups, together), mesh_dim_names=("dp", "tp"))
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    if together > 1:
        tied = bare.lm_head.weight is bare.model.embed_tokens.weight
        parallelize_module(model, mesh["tp"], cut_plan(model))
        if tied:
            bare.lm_head.weight = bare.model.embed_tokens.weight
    if groups > 1:
        for block in bare.model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


class Functional(TorchDispatchMode):
    """Counts what DTensors send each other, where sums and gathers go round in rings."""

    def __init__(self, sent: dict[str, float], together: int) -> None:
        super().__init__()
        self.sent, self.together = sent, together

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "_c10d_functional" or func._opname in SILENT:
            return func(*args, **(kwargs or {}))
        given, *rest = args
        own = given.numel() * given.element_size()
        to_each = {"all_reduce": 2 * own / self.together, "all_gather_into_tensor": own}
        amount = (self.together - 1) * to_each[func._opname]
        self.sent[ACTIVATIONS] = self.sent.get(ACTIVATIONS, 0.0) + amount
        found = _on_copies(lambda given: _waited(func(given, *rest, **(kwargs or {}))), given)
        return torch.empty_like(found).copy_(found)  # met by those who count


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    done: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return done


def _on_copies(work: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """What ``work`` returns for copies that nobody counts.

    A thread of gloo's lets go of an operation's tensors after it has said that the operation is
    done: where processors are busy, long after. What was given to it would be counted until then,
    and not be let go on the thread that counts.
    """
    with _disable_current_modes():
        return work(*(tensor.detach().clone() for tensor in tensors))


def _filled(work: Callable[..., Any], found: torch.Tensor, given: torch.Tensor) -> None:
    """``work(found, given)``, on copies."""

    def done(found: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        work(found, given)
        return found

    made = _on_copies(done, found, given)
    with torch.no_grad(), _disable_current_modes():
        found.copy_(made)


class Done:
    """In place of an operation's ``Work``, which keeps what was given as long as it is kept."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self._kept = kept

    def wait(self) -> None:
        return None


def _tell_of_sizes(held: Held, patch: pytest.MonkeyPatch) -> None:
    """Of the memory of gathered parameters, which comes and goes without an operation."""
    for name in ("alloc_storage", "free_storage"):
        change = getattr(_fsdp_param, name)

        def changed(tensor: torch.Tensor, change: Any = change) -> None:
            change(tensor)
            held.resized(tensor)

        patch.setattr(_fsdp_param, name, changed)


def _count_rings(sent: dict[str, float], size: int, patch: pytest.MonkeyPatch) -> None:
    """Of a model in shards: what each sends where gathers and reductions go round in rings."""

    def counted(name: str, part: int, begin: Any) -> Any:
        def begun(output: Any, given: Any, *args: Any, async_op: bool = False, **more: Any) -> Any:
            amount = given.numel() * given.element_size() * (size - 1) // part
            sent[name] = sent.get(name, 0) + amount
            _filled(lambda found, own: begin(found, own, *args, **more), output, given)
            return Done(output, given) if async_op else None

        return begun

    # Older versions of torch have another name for it.
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    patch.setattr(dist, gather, counted("blocks gathered", 1, getattr(dist, gather)))
    scatter = sharded_company._reduce_scatter
    patch.setattr(sharded_company, "_reduce_scatter", counted("products scattered", size, scatter))


def _counting(sent: dict[str, float], rank: int, size: int) -> Any:
    """Counts what leaves this process for others, by the operations of torch.distributed."""
    first = dist.all_to_all_single, dist.all_gather, dist.broadcast

    def count(name: str, amount: int) -> None:
        sent[name] = sent.get(name, 0) + amount

    def exchange(output: Any, given: Any, to: Any, of: Any, **more: Any) -> Any:
        own = of[dist.get_rank(more["group"])]
        count("exchange", (sum(of) - own) * given.element_size())
        _filled(lambda found, own: first[0](found, own, to, of, **more), output, given)

    def gather(found: Any, mine: Any, **more: Any) -> Any:
        others = dist.get_world_size(more["group"]) - 1
        count("agreement", mine.numel() * mine.element_size() * others)
        return first[1](found, mine, **more)

    def tell(told: Any, source: int, **more: Any) -> Any:
        if rank == source:
            count("word", told.numel() * told.element_size() * (size - 1))
        return first[2](told, source, **more)

    def restore() -> None:
        dist.all_to_all_single, dist.all_gather, dist.broadcast = first

    there: Any = dist
    there.all_to_all_single, there.all_gather, there.broadcast = exchange, gather, tell
    return restore
