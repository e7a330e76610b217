"""Models whose layers are cut over the ranks of a test, by ``parallelize_module`` or by
transformers' own plan, and the same models whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.sharding import LENGTH, WIDTH, WORDS
from distributed.world import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint


class Bottleneck(nn.Module):
    """Two layers that are cut, with biases, between layers that are not."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.before = nn.LayerNorm(6)
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 8)
        self.after = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.before(x)))
        found: Tensor = self.head(self.after(self.down(hidden)))
        return found


class Adapter(nn.Module):
    """A frozen layer and two trained factors beside it, as LoRA has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, 2, bias=False)
        self.b = nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.b(self.a(x))
        return found


class Adapted(nn.Module):
    """The factor that meets whole features is whole on every rank, the other one is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapter(6, 6), Adapter(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.up(x)))
        return found


class Words(nn.Module):
    """A table that is read, a block over positions that is cut, and a head over the words."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.checkpointed = name == "checkpointed"
        padding = 0 if name == "padded" else None
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 6, bias=False)
        self.down = nn.Linear(6, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if name == "tied":
            self.head.weight = self.words.weight

    def _block(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.tanh(self.up(self.norm(x).cumsum(1))))
        return found

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]).unsqueeze(0))
        x = checkpoint(self._block, x, use_reentrant=False) if self.checkpointed else self._block(x)
        found: Tensor = self.head(x)
        return found


def by_columns() -> ColwiseParallel:
    return ColwiseParallel(output_layouts=Replicate())


PLANS: dict[str, dict[str, Any]] = {
    "bottleneck": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "adapted": {
        "up.base": ColwiseParallel(),
        "up.b": ColwiseParallel(),
        "down.base": RowwiseParallel(),
        "down.a": RowwiseParallel(),
    },
    "words": {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "places": by_columns(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": by_columns(),
    },
}
PLANS["tied"] = PLANS["padded"] = PLANS["checkpointed"] = PLANS["words"]


def model_named(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    if PLANS[name] is PLANS["words"]:
        model: nn.Module = Words(name)
    else:
        model = {"bottleneck": Bottleneck, "adapted": Adapted}[name]()
    return model.to(dtype)


def cut(
    model: nn.Module,
    plan: dict[str, Any],
    together: int | None = None,
    sharded: bool = False,
    **options: Any,
) -> nn.Module:
    """The model, its layers cut over groups of so many neighbours, or over all ranks; tied weights
    are tied again. Where asked, its rows are sharded over the groups.
    """
    size = dist.get_world_size()
    together = size if together is None else together
    mesh = mesh_of((size // together, together), ("dp", "tp"))
    tied = isinstance(model, Words) and model.head.weight is model.words.weight
    found: nn.Module = parallelize_module(model, mesh["tp"], plan)
    if tied:
        found.head.weight = found.words.weight  # type: ignore[union-attr]
    if sharded:
        for part in () if tied else found.children():
            if any(True for _ in part.parameters()):
                fully_shard(part, mesh=mesh["dp"], **options)
        fully_shard(found, mesh=mesh["dp"], **options)
    return found


def llama(
    folder: Path, ranks: int, adapters: bool = False, tied: bool = False, groups: int = 1
) -> nn.Module:
    """transformers' Llama in miniature, cut by its own plan where there are several ranks, and
    sharded over groups of so many; with LoRA where asked. One process writes the weights that all
    read.
    """
    hf = pytest.importorskip("transformers")
    path = folder / f"llama{tied}"
    if ranks == 1:
        torch.manual_seed(5)
        config = hf.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=tied,
        )
        model = hf.LlamaForCausalLM(config).double()
        model.save_pretrained(path)
    else:
        plan = hf.distributed.DistributedConfig(tp_size=ranks, fsdp_size=groups)
        model = hf.LlamaForCausalLM.from_pretrained(
            path, distributed_config=plan, dtype=torch.float64
        )
    if adapters:
        model = _with_adapters(model)
    found: nn.Module = model.double().train()
    return found


def _with_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    wanted = ["q_proj", "v_proj", "gate_proj"]
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=wanted))
    source = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "lora_" in name:
                full = torch.randn(p.shape, generator=source)
                spread = isinstance(p, DTensor)
                p.copy_(distribute_tensor(full, p.device_mesh, p.placements) if spread else full)
    return found
