"""What ``collate_fn`` brings to one size, and the model does not mask: one longer or shorter record
changes what all others of its micro-batch add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.loading.collating import Collating
from quietgrad.loading.padding import PaddingLooks
from quietgrad.plan import PrivacyConfig

RECORDS, USUAL = 24, 10
Record = tuple[Tensor, int]
Collate = Callable[[list[Record]], Any]
REFUSED = "how long the records beside it are|cuts records to a size"


class Series(nn.Module):
    """A mean over positions, of those that a mask has where there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        if mask is None:
            found: Tensor = self.head(h.mean(1))
            return found
        masked: Tensor = self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        return masked


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells, self.head = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.head(self.cells(x)[0][:, -1])
        return found


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maps, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.head(torch.relu(self.maps(x)).mean((2, 3)))
        return found


def labels(some: list[Record]) -> Tensor:
    return torch.tensor([y for _, y in some])


def padded(some: list[Record]) -> tuple[Tensor, ...]:
    return pad_sequence([x for x, _ in some], batch_first=True), labels(some)


def padded_in_front(some: list[Record]) -> tuple[Tensor, ...]:
    rows = [x for x, _ in some]
    return pad_sequence(rows, batch_first=True, padding_side="left"), labels(some)


def cut_to_the_shortest(some: list[Record]) -> tuple[Tensor, ...]:
    shortest = min(len(x) for x, _ in some)
    return torch.stack([x[:shortest] for x, _ in some]), labels(some)


def images(some: list[Record]) -> tuple[Tensor, ...]:
    height, width = (max(x.shape[i] for x, _ in some) for i in (1, 2))
    rows = [F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x, _ in some]
    return torch.stack(rows), labels(some)


def masked(some: list[Record]) -> tuple[Tensor, ...]:
    mask = pad_sequence([torch.ones(len(x)) for x, _ in some], batch_first=True)
    return (*padded(some), mask)


def by_the_longest(some: list[Record]) -> tuple[Tensor, ...]:
    """Masked, but that times are shares of the longest record's."""
    x, y, mask = masked(some)
    return x + torch.arange(x.shape[1])[:, None] / x.shape[1], y, mask


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0], *batch[2:]), batch[1], reduction="none")


class Records:
    """All of the usual size but the last one."""

    def __init__(self, last: int = USUAL, image: bool = False) -> None:
        self.last, self.image = last, image

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Record:
        size = self.last if index == RECORDS - 1 else USUAL
        source = torch.Generator().manual_seed(index)
        shape = (1, size, size) if self.image else (size, 2)
        slope = torch.linspace(0.0, 2.0, size)[:, None]
        return torch.randn(shape, generator=source) + 1.0 + slope, int(index == 0)


def released(model: nn.Module, collate: Collate, data: Any, **options: Any) -> dict[str, Tensor]:
    """The clipped sum of the first batch, which holds all records, and is released."""
    found: list[ClippedSum] = []
    config = PrivacyConfig(
        noise_multiplier=1.0,
        target_delta=1e-5,
        expected_batch_size=RECORDS,
        steps=8,
        max_grad_norm=0.05,
    )
    with config.build(RECORDS).start() as run:
        loader = run.loader(
            data, steps=1, physical_batch_size=RECORDS, collate_fn=collate, **options
        )
        for batch in loader:
            found.append(run.clip(model, loss, batch))
            run.release(found[0])
    return found[0].gradients


CASES: dict[str, tuple[type[nn.Module], Collate, int]] = {
    "series": (Series, padded, 300),
    "last-state": (LastState, padded, 300),
    "in-front": (Series, padded_in_front, 60),
    "shortest": (Series, cut_to_the_shortest, 1),
    "by-the-longest": (Series, by_the_longest, 60),
    "images": (Image, images, 30),
}


@pytest.mark.parametrize("case", CASES)
def test_padding_that_changes_losses_is_refused(case: str) -> None:
    model, collate, last = CASES[case]
    with pytest.raises(ValueError, match=REFUSED):
        released(model(), collate, Records(last, image=case == "images"))


def test_what_cuts_to_the_shortest_is_refused_in_an_opacus_script() -> None:
    """There, and wherever a collate_fn is examined without a model."""
    model = Series()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = Records(1)
    reader: DataLoader[Any] = DataLoader(data, RECORDS, collate_fn=cut_to_the_shortest)
    _, _, private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=reader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(ValueError, match="cuts records to a size that follows from the others"):
        next(iter(private))


def test_it_is_refused_where_workers_read() -> None:
    with pytest.raises(ValueError, match=REFUSED):
        released(Series(), padded, Records(60), num_workers=1)


@pytest.mark.parametrize("last", [1, USUAL, 60])
def test_padding_that_the_model_masks_is_taken(last: int) -> None:
    assert released(Series(), masked, Records(last))


class WithoutEvaluation(Series):
    """It returns something else in evaluation mode, as models that detect objects do."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        found = super().forward(x, mask)
        return found if self.training else [found]


def test_models_without_a_loss_in_evaluation_mode_are_looked_at_as_they_are() -> None:
    assert released(WithoutEvaluation(), masked, Records(60))
    with pytest.raises(ValueError, match=REFUSED):
        released(WithoutEvaluation(), padded, Records(60))


def test_records_of_one_size_are_taken_without_a_mask_and_refused_when_another_comes() -> None:
    """Between the guard's releases, too, and before anything of that batch is released."""
    data, model = Records(), Series().train()
    config = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-5, expected_batch_size=RECORDS, steps=8
    )
    with config.build(RECORDS).start() as run:
        with pytest.raises(ValueError, match=REFUSED):
            for number, batch in enumerate(run.loader(data, steps=8, collate_fn=padded)):
                run.backward(model, loss, batch)
                data.last = USUAL if number == 0 else 60  # the third release is no guarded one
        assert run.released == 2
    assert model.training


@pytest.mark.parametrize("case", ["series", "shortest", "last-state"])
def test_without_the_look_one_record_moves_the_sum_by_more_than_replacing_it_may(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PaddingLooks, "look", lambda *_: None)
    monkeypatch.setattr(Collating, "_require_not_cut", lambda *_: None)
    model, collate, last = CASES[case]
    one, other = (released(model(), collate, Records(size)) for size in (USUAL, last))
    moved = sum(float((one[name] - other[name]).double().pow(2).sum()) for name in one)
    assert moved**0.5 > 2.5 * 0.05  # of another record in its place 2 C at most
