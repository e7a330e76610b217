"""LoRA on a parameter itself sets the frozen weight anew at every call: torch counts a write, and
its bits tell whether it was one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.kept import put_again
from quietgrad.clipping.soundness.oracle import (
    oracle_clipped_sum,
    oracle_gradients,
    oracle_norms,
)

peft = pytest.importorskip("peft")

UNGUARDED = 5  # a release at which the guard does not look

Write = Callable[[Tensor, Tensor], None]


class Experts(nn.Module):
    """Each record goes through the expert of its own largest score."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 6))
        self.write: Write | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self.parametrizations.weight.original, x)
        scores = x[:, :3].softmax(1)
        return torch.einsum("bd,ehd,be->bh", x, self.weight, scores)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.experts(x)))


def adapted() -> tuple[nn.Module, Experts]:
    torch.manual_seed(0)
    model = Mixture()
    config = peft.LoraConfig(
        r=2, target_parameters=["experts.weight"], target_modules=[], init_lora_weights=False
    )
    return peft.get_peft_model(model, config), model.experts.base_layer


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def records() -> dict[str, Tensor]:
    return {"x": 3.0 * torch.randn(5, 6), "y": torch.tensor([0, 1, 2, 0, 1])}


def test_adapters_of_a_parameter_are_trained() -> None:
    model, _ = adapted()
    batch = records()
    gradients = oracle_gradients(model, loss, batch)
    clip = float(oracle_norms(gradients).mean())
    bound = Clipper(clip).bind(model, loss)
    for step in (0, UNGUARDED):
        found = bound.clip(batch, step=step).gradients
        for name, wanted in oracle_clipped_sum(gradients, clip).items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6 * clip)


def keep_one_entry(weight: Tensor, x: Tensor) -> None:
    weight[0, 0, 0] = x.mean()


def change_places(weight: Tensor, x: Tensor) -> None:
    weight.copy_(weight[:, :, x.sum(0).argsort()])


def keep_elsewhere(weight: Tensor, x: Tensor) -> None:
    weight.set_((weight + 0.0).contiguous())


WRITES = [keep_one_entry, change_places, keep_elsewhere]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("step", [0, UNGUARDED])
def test_what_is_written_into_it_is_refused(write: Write, step: int) -> None:
    model, experts = adapted()
    bound = Clipper(1.0).bind(model, loss)
    if step:
        bound.clip(records(), step=0)
    experts.write = write
    with pytest.raises(ValueError, match=r"is (rewritten|exchanged)|keeps something"):
        bound.clip(records(), step=step)


def test_without_places_in_the_digest_an_exchange_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ones = torch.ones(put_again.AT_ONCE, dtype=torch.int64)
    monkeypatch.setattr(put_again, "numbers_of_places", lambda count, device: ones[:count])
    model, experts = adapted()
    bound = Clipper(1.0).bind(model, loss)
    bound.clip(records(), step=0)
    experts.write = change_places
    bound.clip(records(), step=UNGUARDED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_a_digest_sees_an_entry_and_its_place(dtype: torch.dtype) -> None:
    weight = (9 * torch.randn(50, 7)).to(dtype)
    digest = put_again.digest_of
    other, moved = weight.clone(), weight.flip(0)
    other[31, 4] += 1
    assert torch.equal(digest(weight), digest(weight.clone()))
    assert not torch.equal(digest(weight), digest(other))
    assert not torch.equal(digest(weight), digest(moved))


def test_a_digest_of_several_blocks_sees_them_change_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(put_again, "AT_ONCE", 8)
    weight = torch.randn(4, 8)
    assert not torch.equal(put_again.digest_of(weight), put_again.digest_of(weight[[1, 0, 2, 3]]))
