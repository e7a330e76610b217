"""Data sets that make something of several records when asked for several at once: a transform of
a Hugging Face data set, ``__getitems__`` of one's own. Each record is asked for by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from quietgrad import PrivacyConfig
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus import data_loader as opacus_loader
from quietgrad.loading import loader
from quietgrad.loading.reading import OneByOne, has_gaps, one_by_one

RECORDS = 24


def numbers(first: float = 0.0) -> Tensor:
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    x[0] += first
    return x


def centred(rows: dict[str, Any]) -> dict[str, Any]:
    """Less the mean of what is asked for at once."""
    x = torch.stack([torch.as_tensor(row) for row in rows["x"]])
    return {"x": list(x - x.mean(0))}


def transformed(first: float = 0.0) -> Any:
    dataset = datasets.Dataset.from_dict({"x": numbers(first).tolist()})
    dataset.set_transform(centred)
    return dataset


class Own(Dataset[Any]):
    def __init__(self, first: float = 0.0) -> None:
        self.x = numbers(first)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return {"x": self.x[index]}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        x = self.x[indices]
        return [{"x": row} for row in x - x.mean(0)]


def part(first: float = 0.0) -> Any:
    return Subset(Own(first), range(RECORDS))


TOGETHER = {"transform": transformed, "own": Own, "part": part}


def sum_of(dataset: Any, workers: int = 0) -> Tensor:
    """The clipped sum, in clipping norms, of all records."""
    model, clip = nn.Linear(4, 1, bias=False), 0.01
    config = PrivacyConfig(
        max_grad_norm=clip, noise_multiplier=1.0, expected_batch_size=RECORDS, steps=1,
        data_are_public=True,
    )  # fmt: skip
    with config.build(RECORDS).start() as run:
        parts = next(iter(run.loader(dataset, num_workers=workers)))
        clipped = run.clip(model, lambda m, batch: m(batch["x"])[:, 0], parts)
        return clipped.gradients["weight"].double() / clip


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", TOGETHER)
def test_one_record_moves_its_own_contribution_alone(kind: str, workers: int) -> None:
    """Replacing a record may move the sum by 2 C."""
    made = TOGETHER[kind]
    assert float((sum_of(made(50.0), workers) - sum_of(made(), workers)).norm()) < 2.001


@pytest.mark.parametrize("kind", TOGETHER)
def test_asked_for_several_at_once_one_record_moves_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "one_by_one", lambda dataset: dataset)
    made = TOGETHER[kind]
    assert float((sum_of(made(50.0)) - sum_of(made())).norm()) > 4.0


def opacus_batch(dataset: Any, workers: int) -> Tensor:
    model = nn.Linear(4, 1)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=RECORDS, num_workers=workers),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert private[2].dataset is dataset
    found: Tensor = next(iter(private[2]))["x"]
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", TOGETHER)
def test_an_opacus_script_asks_for_each_record_by_itself(kind: str, workers: int) -> None:
    dataset = TOGETHER[kind]()
    alone = torch.stack([dataset[i]["x"] for i in range(RECORDS)])
    assert torch.equal(opacus_batch(dataset, workers).sort(0).values, alone.sort(0).values)


def test_asked_for_several_the_script_would_get_mixed_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opacus_loader, "one_by_one", lambda dataset: dataset)
    assert float((opacus_batch(Own(), 0).sort(0).values - numbers().sort(0).values).norm()) > 0.1


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_plain_forms_are_read_together(form: str | None) -> None:
    dataset = datasets.Dataset.from_dict({"x": numbers().tolist()}).with_format(form)
    assert one_by_one(dataset) is dataset
    part = Subset(dataset, range(3))
    assert one_by_one(part) is part
    rows = dataset.__getitems__([3, 5])
    assert torch.equal(torch.as_tensor(rows[1]["x"]), torch.as_tensor(dataset[5]["x"]))


def test_what_stands_for_a_data_set_tells_what_it_tells() -> None:
    made: Callable[[Any], Any] = one_by_one
    stands = made(Own())
    assert isinstance(stands, OneByOne) and len(stands) == RECORDS
    assert torch.equal(stands.x, numbers())
    with pytest.raises(AttributeError):
        _ = stands.nothing


def test_a_package_of_the_scripts_own_is_not_taken_for_hugging_faces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Own, "__module__", "datasets.own")
    assert isinstance(one_by_one(Own()), OneByOne)
    assert float((sum_of(Own()) - sum_of(Own(9.0))).norm()) <= 2.002


SECONDS = [1_700_000_000 + i for i in range(RECORDS)]  # float32 holds multiples of 128 of these


def stamped(first: int | None, form: str, within: bool) -> Any:
    """Whole numbers, the first of which may be missing."""
    table = {"t": [first, *SECONDS[1:]], "b": [i % 200 for i in range(RECORDS)]}
    kinds = datasets.Features({"t": datasets.Value("int64"), "b": datasets.Value("uint8")})
    dataset = datasets.Dataset.from_dict(table, features=kinds).with_format(form)
    return Subset(dataset, range(RECORDS)) if within else dataset


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_an_empty_cell_of_one_record_changes_no_number_of_others(form: str, within: bool) -> None:
    """Before: a column with one became float32 in its micro-batch."""
    places = list(range(RECORDS))
    whole = stamped(SECONDS[0], form, within)
    assert one_by_one(whole) is whole  # as fast as ever
    usual = whole.__getitems__(places)
    alone = one_by_one(stamped(None, form, within))
    assert isinstance(alone, OneByOne)
    for i in places[1:]:
        for name, value in usual[i].items():
            found = alone[i][name]
            assert found == value and found.dtype == value.dtype
    mixed = stamped(None, form, within).__getitems__(places)
    assert int(mixed[1]["t"]) != SECONDS[1]  # what it was before


@pytest.mark.parametrize(
    ("cells", "gaps"),
    [
        ([1, None], True), ([[1], [2, None]], True), ([{"a": 1}, {"a": None}], True),
        ([[[1, None]]], True), ([{"a": [1, None]}], True), (["x", None], True),
        ([1, 2], False), ([[1], []], False), ([{"a": 1}], False), ([1.0, float("nan")], False),
    ],
)  # fmt: skip
def test_empty_cells_are_seen_wherever_they_are(cells: list[Any], gaps: bool) -> None:
    assert has_gaps(datasets.Dataset.from_dict({"c": cells})) is gaps
