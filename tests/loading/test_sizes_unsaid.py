"""Torch warns of shapes, and with them says how many records a micro-batch holds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig

RECORDS, STEPS = 60, 3
SIZE = re.compile(r"\d+, 3\]|shape \[\d+\]")


class Records(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index / RECORDS), torch.zeros(3)


class Filled(nn.Module):
    """Fills a tensor that is too small for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty(1)
        torch.gt(x[:, 0], 0.5, out=mask)
        return self.layer(x) * mask[:, None]


def towards_zero(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), torch.zeros(3), reduction="none").sum(1)


def of_record(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="none").sum(1)


CASES = [(lambda: nn.Linear(4, 3), towards_zero), (Filled, of_record)]


@pytest.fixture
def said() -> Iterator[list[Any]]:
    """Every warning, as Python shows them by itself or more often."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def sizes_in(said: list[Any]) -> list[str]:
    return [str(one.message) for one in said if SIZE.search(str(one.message))]


@pytest.mark.parametrize(("make", "loss"), CASES, ids=["target", "out"])
def test_the_pattern_is_of_what_torch_writes(
    said: list[Any], make: Callable[[], nn.Module], loss: Any
) -> None:
    loss(make(), (torch.ones(7, 4), torch.zeros(7, 3)))
    assert len(sizes_in(said)) == 1 and "7" in sizes_in(said)[0]


@pytest.mark.parametrize(("make", "loss"), CASES, ids=["target", "out"])
@pytest.mark.parametrize("loads", [True, False], ids=["loader", "batches"])
def test_no_warning_says_how_many_records_came(
    said: list[Any], make: Callable[[], nn.Module], loss: Any, loads: bool
) -> None:
    config = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=STEPS, data_are_public=True)
    model, records = make(), Records()
    with config.build(RECORDS).start() as run:
        if loads:
            for batch in run.loader(records, steps=STEPS):
                run.backward(model, loss, batch)
        else:
            inputs = torch.stack([records[i][0] for i in range(RECORDS)])
            for indices in run.batches():
                batch = (inputs[indices], torch.zeros(len(indices), 3))
                loss(model, batch)  # a loop that looks by itself
                run.backward(model, loss, batch)
    assert sizes_in(said) == []


def test_pillow_does_not_say_how_large_a_picture_is(
    said: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("L", (37, 41)).save(tmp_path / "a.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 37 * 41 - 1)
    image.open(tmp_path / "a.png").close()
    assert "1517" in str(said.pop().message)  # what Pillow writes

    class Pictures(Records):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            image.open(tmp_path / "a.png").close()
            return super().__getitem__(index)

    config = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=1, data_are_public=True)
    with config.build(RECORDS).start() as run:
        for batch in run.loader(Pictures()):
            run.backward(nn.Linear(4, 3), of_record, batch)
    assert not [one for one in said if "1517" in str(one.message)]


def test_no_warning_says_it_in_an_opacus_script(said: list[Any]) -> None:
    from quietgrad.integrations.opacus import PrivacyEngine

    model: Any = nn.Linear(4, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(Records(), batch_size=30)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, _ in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.zeros(3)).backward()
        optimizer.step()
    assert sizes_in(said) == []


class Longer(Records):
    """The first record is longer than all others."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(17 if index == 0 else 4), torch.zeros(3)


def in_lists(rows: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor([x.tolist() for x, _ in rows]), torch.stack([y for _, y in rows])


@pytest.mark.parametrize("collate_fn", [None, in_lists], ids=["torch's", "of lists"])
def test_an_error_does_not_say_how_long_records_are(collate_fn: Any) -> None:
    data = Longer()
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=1).build(len(data))
    with plan.start() as run:
        loader = run.loader(data, collate_fn=collate_fn)
        with pytest.raises(ValueError, match="different sizes") as refused:
            for batch in loader:
                run.backward(nn.Linear(4, 3), lambda model, b: model(b[0]).sum(1), batch)
    assert "17" not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__context__ is None
