"""Models that ``fully_shard`` spreads over the ranks of a test, and what they look like whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed.world import mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, LENGTH = 12, 8, 5


class Block(nn.Module):
    """Attention without a fused routine, and a layer after it; with a bare parameter, which the
    generic fallback takes.
    """

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.checkpointed = checkpointed

    def _run(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.before(x)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            found: Tensor = checkpoint(self._run, x, use_reentrant=False)
            return found
        return self._run(x)


class Language(nn.Module):
    """A small decoder whose output layer is its embedding."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def language(checkpointed: bool = False) -> Language:
    torch.manual_seed(3)
    return Language(checkpointed).double()


def llama(adapters: bool = False) -> nn.Module:
    """transformers' Llama in miniature, its output layer tied to its embedding; with LoRA where
    asked, the rest frozen.
    """
    hf = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model: nn.Module = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=not adapters,
        )
    )
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        )
        for name, p in model.named_parameters():
            if "lora_B" in name:  # zero at the start: the other factor would have no gradient
                nn.init.normal_(p)
    return model.double().train()


def texts(count: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(4)
    return [{"ids": torch.randint(0, WORDS, (LENGTH + 1,), generator=source)} for _ in range(count)]


def next_words(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    found = model(ids[:, :-1])
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(dim=1)


def sharded(model: nn.Module, blocks_alone: bool = False, **options: Any) -> nn.Module:
    """The model, each of its blocks or layers with parameters sharded by itself, over all ranks;
    and what is left of it, where that is not to be a replica.
    """
    mesh = mesh_of((dist.get_world_size(),))
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    for part in lists[0] if lists else model.children():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh, **options)
    if not blocks_alone:
        fully_shard(model, mesh=mesh, **options)
    return model


def whole(tensors: Any) -> Tensor:
    """All entries of named tensors, gathered from all ranks where they are spread."""
    parts = []
    for t in dict(tensors).values():
        full = t.full_tensor() if isinstance(t, DTensor) else t
        parts.append(full.detach().reshape(-1))
    return torch.cat(parts)
