"""Mixtures of experts that have room for so many tokens of a batch: who comes later is dropped. On
ordinary records no expert is full, and nothing of it shows. Those without such a limit are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness import guard, mixing
from quietgrad.clipping.soundness.company.experts import FirstOnes

EXPERTS, FEATURES, UNGUARDED = 4, 8, 2
Room = Callable[[int], float]


class Experts(nn.Module):
    """Each token goes to one of four experts, the first ``room(tokens)`` of them; or none of them
    goes to an expert whom more ask for.
    """

    def __init__(self, room: Room, choice: str = "topk", all_or_none: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(EXPERTS))
        self.head = nn.Linear(FEATURES, 3)
        self.room, self.choice, self.all_or_none = room, choice, all_or_none

    def chosen(self, tokens: Tensor) -> Tensor:
        scores = tokens[:, :EXPERTS]
        if self.choice == "topk":
            return scores.topk(1, dim=-1).indices[:, 0]
        if self.choice == "argmax":
            return scores.argmax(-1)
        if self.choice == "max":
            return scores.max(dim=1)[1]
        return (scores * 1000).long().sum(1) % EXPERTS  # by a hash

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.detach().reshape(-1, FEATURES)
        to = F.one_hot(self.chosen(tokens), EXPERTS)
        asked = to.sum(0) if self.all_or_none else to.cumsum(0)
        kept = to * (asked <= self.room(len(tokens)))
        weights = kept.view(*x.shape[:-1], EXPERTS).float()
        parts = torch.stack([expert(x) for expert in self.experts], dim=-1)
        h = x + (parts * weights.unsqueeze(-2)).sum(-1)
        found: Tensor = self.head(h.flatten(1, -2).mean(1) if x.dim() > 2 else h)
        return found


def twice_the_share(tokens: int) -> float:
    return math.ceil(2.0 * tokens / EXPERTS)


def of_a_thousandth(tokens: int) -> float:
    return math.ceil(1.25 * tokens / EXPERTS)


def sixty_four(tokens: int) -> float:
    return 64


def endless(tokens: int) -> float:
    return math.inf


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def tokens(positions: int, crowded: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens in turn to each of the experts; those of the last records all to the first."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, max(positions, 1), FEATURES, generator=source)
    number = torch.arange(x[..., 0].numel()).view(x.shape[:2]) % EXPERTS
    number[RECORDS - crowded :] = 0
    x[..., :EXPERTS] = x[..., :EXPERTS].tanh() + 4.0 * F.one_hot(number, EXPERTS)
    return (x if positions else x[:, 0]), torch.arange(RECORDS) % 3


ROOMS = {"factor-2": twice_the_share, "factor-1.25": of_a_thousandth, "constant": sixty_four}


@pytest.mark.parametrize("choice", ["topk", "argmax", "max"])
@pytest.mark.parametrize("positions", [0, 4, 40])
@pytest.mark.parametrize("room", list(ROOMS))
def test_it_is_refused_on_records_that_fill_no_expert(
    room: str, positions: int, choice: str
) -> None:
    if room == "constant" and positions < 4:
        pytest.skip("no batch of this size fills it")
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=RECORDS).clip(
            Experts(ROOMS[room], choice), loss, tokens(positions)
        )


def test_experts_that_get_a_limit_later_are_refused_at_the_next_look() -> None:
    model = Experts(endless)
    bound = Clipper(1.0, physical_batch_size=RECORDS).bind(model, loss)
    bound.clip(tokens(4), step=0)
    model.room = sixty_four  # of 96 tokens, in turn to each of four experts
    with pytest.raises(ValueError, match="as to one expert of limited capacity"):
        bound.clip(tokens(4), step=1)


def test_one_record_many_times_shows_what_no_choice_of_the_largest_does() -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        Clipper(1.0, physical_batch_size=RECORDS).clip(
            Experts(twice_the_share, "hash"), loss, tokens(0)
        )


def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant: all else of the guard stays. One record more is one too many for an expert."""
    monkeypatch.setattr(mixing, "require_room_for_all", lambda *arguments, copies: None)
    model = Experts(lambda tokens: 8.0 * (RECORDS - 1), all_or_none=True)
    clipper = Clipper(0.1, engine="bookkeeping", physical_batch_size=RECORDS)
    bound = clipper.bind(model, loss)
    bound.clip(tokens(8), step=0)
    crowded = tokens(8, crowded=RECORDS)
    rest = tuple(t[1:] for t in crowded)
    one, other = (bound.clip(b, step=UNGUARDED).gradients for b in (crowded, rest))
    moved = sum(float((g - other[name]).double().pow(2).sum()) for name, g in one.items()) ** 0.5
    assert moved > 1.5 * 0.1


def crowds(positions: int) -> list[tuple[Tensor, Tensor]]:
    """A batch whose tokens all ask for one expert, and all of it but its first record."""
    whole = tokens(positions, crowded=RECORDS)
    return [whole, tuple(t[1:] for t in whole)]  # type: ignore[list-item]


def filled_by_longer() -> Any:
    """Clips short texts first, which cannot fill an expert of constant room."""
    model = Experts(lambda tokens: 8.0 * (RECORDS - 1), all_or_none=True)
    clipper = Clipper(0.1, engine="bookkeeping", physical_batch_size=RECORDS)
    bound = clipper.bind(model, loss)
    bound.clip(tokens(2), step=0)
    return bound


def test_longer_records_are_looked_at_when_they_come() -> None:
    bound = filled_by_longer()
    bound.clip(tokens(2), step=UNGUARDED)
    with pytest.raises(ValueError, match="depends on other examples"):
        bound.clip(tokens(8, crowded=RECORDS), step=UNGUARDED)


def test_it_is_seen_in_many_longer_records_that_do_not_fill_it() -> None:
    bound = filled_by_longer()
    with pytest.raises(ValueError, match="as to one expert of limited capacity"):
        bound.clip(tokens(8), step=UNGUARDED)  # 48 of 192 tokens to each


def test_without_the_look_at_longer_ones_one_record_moves_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "LONGER", math.inf)
    bound = filled_by_longer()
    one, other = (bound.clip(b, step=UNGUARDED).gradients for b in crowds(8))
    moved = sum(float((g - other[name]).double().pow(2).sum()) for name, g in one.items()) ** 0.5
    assert moved > 1.5 * 0.1


def test_records_of_usual_lengths_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS).bind(
        Experts(endless), loss
    )
    bound.clip(tokens(20), step=0)
    examine, looks = guard.Guard.examine, 0

    def counted(*given: Any) -> bool:
        nonlocal looks
        looks += 1
        return examine(*given)

    monkeypatch.setattr(guard.Guard, "examine", counted)
    for positions in (20, 39, 3, 41, 40, 80):
        bound.clip(tokens(positions), step=UNGUARDED)
    assert looks == 1  # at 41


@pytest.mark.parametrize("choice", ["topk", "argmax", "max", "hash"])
@pytest.mark.parametrize("positions", [0, 4, 40])
def test_experts_without_a_limit_are_taken(positions: int, choice: str) -> None:
    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=RECORDS).bind(
        Experts(endless, choice), loss
    )
    bound.clip(tokens(positions, crowded=8))
    assert next(iter(bound._guard._verdicts.values())).together == RECORDS


TEXT: dict[str, Any] = {
    "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1,
    },
    "Qwen3Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4,
        "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(MODELS))
def test_transformers_experts_are_taken(name: str) -> None:
    """Their attention trained, so that records run together; the experts frozen."""
    hf = pytest.importorskip("transformers")
    config = getattr(hf, f"{name}Config")(**(TEXT | MODELS[name]))
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("o_proj" in key)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30, (8, 10), generator=source)
    lengths = torch.tensor([10, 10, 7, 10, 4, 10, 9, 10])
    mask = (torch.arange(10) < lengths.unsqueeze(1)).long()

    def language(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
        each = F.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none"
        )
        shown = batch["mask"][:, 1:].float()
        return (each * shown).sum(1) / shown.sum(1).clamp(min=1)

    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=8).bind(model, language)
    bound.clip({"ids": ids * mask, "mask": mask})
    assert next(iter(bound._guard._verdicts.values())).together == 8


def test_every_choice_is_of_the_first() -> None:
    x = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 9.0]])
    with FirstOnes() as first:
        values, index = x.topk(2)
        along, rows = x.max(0, keepdim=True)
        assert x.argmax(1).tolist() == [0, 0] and x.topk(1, dim=0).indices.tolist() == [[0, 0, 0]]
        assert first.used
    with FirstOnes() as other:
        assert float(x.max()) == 9.0 and int(x.argmax()) == 5 and float(x.amax(1)[0]) == 3.0
        assert torch.equal(torch.max(x, x), x)
    assert not other.used
    assert index.tolist() == [[0, 1], [0, 1]] and torch.equal(values, x[:, :2])
    assert rows.tolist() == [[0, 0, 0]] and torch.equal(along, x[:1])
