"""Collation takes the keys of the first record for those of all: one that lacks a mask or a weight
takes it away from the others of its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from quietgrad import PrivacyConfig
from quietgrad.loading.collating import Collating

N, C = 24, 0.2
MASK = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
KEYS = "records are dictionaries with different keys"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.layer(x if mask is None else x * mask)
        return found


def records(lacking: int | None = None) -> list[dict[str, Any]]:
    x = 4 * torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    found = [{"x": x[i], "mask": MASK, "label": torch.tensor(i % 2)} for i in range(N)]
    if lacking is not None:
        del found[lacking]["mask"]
    return found


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch.get("mask")), batch["label"], reduction="none")


def clipped(given: list[Any], collate_fn: Any = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Masked()
    config = PrivacyConfig(
        noise_multiplier=1.0,
        sample_rate=1.0,
        steps=1,
        max_grad_norm=C,
        seed=7,
        data_are_public=True,
    )
    with config.build(N).start() as run:
        batch = next(iter(run.loader(given, collate_fn=collate_fn)))
        return {name: g.clone() for name, g in run.clip(model, loss, batch).gradients.items()}


@pytest.mark.parametrize("lacking", [0, 5])
def test_one_record_that_lacks_a_key_is_refused(lacking: int) -> None:
    with pytest.raises(ValueError, match=KEYS) as refused:
        clipped(records(lacking))
    assert "'mask'" not in str(refused.value)  # a key may be one record's alone


def test_without_the_look_it_takes_the_mask_from_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quietgrad.loading.collating.collate_one_type", default_collate)
    sums = [clipped(records(lacking)) for lacking in (None, 0)]
    moved = sum(float((g - sums[1][name]).square().sum()) for name, g in sums[0].items()) ** 0.5
    assert moved > 4 * C  # 2 C are the record's own


def of_the_firsts_keys(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {key: torch.stack([row.get(key, MASK) for row in rows]) for key in rows[0]}


def test_a_collate_fn_of_ones_own_is_refused_where_it_is_looked_at() -> None:
    """Before: another number of tensors was taken for padding, and the look passed it over."""
    with pytest.raises(ValueError, match="another number of tensors"):
        clipped(records(0), of_the_firsts_keys)


NESTED: list[Callable[[dict[str, Any]], Any]] = [
    lambda row: {"inner": row},
    lambda row: (row, 1),
    lambda row: {"inner": [row, row]},
]


@pytest.mark.parametrize("nested", NESTED)
def test_dictionaries_within_records_are_looked_at(nested: Callable[[dict[str, Any]], Any]) -> None:
    collating = Collating(default_collate)
    assert collating([nested(row) for row in records()]) is not None
    with pytest.raises(ValueError, match=KEYS):
        collating([nested(row) for row in records(0)])


def test_collators_of_transformers_take_the_first_records_keys_too() -> None:
    found = pytest.importorskip("transformers")
    rows = [{"x": [1.0, 2.0], "mask": [1, 0], "label": i} for i in range(4)]
    odd = {"x": [1.0, 2.0], "label": 4}
    for collate in (found.default_data_collator, found.DefaultDataCollator()):
        assert len(Collating(collate)(rows)["mask"]) == 4
        for mixed in ([odd, *rows], [*rows, odd]):
            with pytest.raises(ValueError, match=KEYS):
                Collating(collate)(mixed)
        text = rows[0] | {"text": "left out of all"}
        assert "text" not in Collating(collate)([text, *rows])
