"""Training records as records to evaluate on, rebuilt: other memory, another order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, Value
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from quietgrad.integrations import contents
from quietgrad.integrations.contents import contents_shared
from quietgrad.integrations.public import refuse_private_evaluation

SOURCE = torch.Generator().manual_seed(3)
X = torch.randn(100, 4, generator=SOURCE)
FEW = torch.randint(0, 2, (100, 4), generator=SOURCE)
IDS = torch.randint(5, 4000, (100, 12), generator=SOURCE).tolist()
OTHERS = torch.randint(5, 4000, (20, 12), generator=SOURCE).tolist()


def tokens(rows: list[list[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": i % 2} for i, row in enumerate(rows)]


TABLE = Dataset.from_list(tokens(IDS))
TEXTS = [{"text": f"the {i}th of some hundred sentences", "label": i % 3} for i in range(100)]


def shuffled(rows: Any, begin: int = 0) -> list[Any]:
    order = torch.randperm(len(rows) - begin, generator=torch.Generator().manual_seed(1)) + begin
    return [rows[int(i)] for i in order]


@dataclass
class Row:
    x: torch.Tensor
    label: int


ROWS = [Row(x, 0) for x in X]

# name -> trained on, evaluated on, refused
KINDS: dict[str, tuple[Any, Any, bool]] = {
    "tensors": (TensorDataset(X), TensorDataset(torch.stack(shuffled(X))), True),
    "the end of them": (TensorDataset(X), TensorDataset(torch.stack(shuffled(X, 60))), True),
    "in double precision": (
        TensorDataset(X),
        TensorDataset(torch.stack(shuffled(X)).double()),
        True,
    ),
    "a table": (TABLE, Dataset.from_list(shuffled(tokens(IDS), 80)), True),
    "a table and a list": (TABLE, shuffled(tokens(IDS), 80), True),
    "a table and tensors": (
        TABLE,
        Dataset.from_list(shuffled(tokens(IDS))).with_format("torch"),
        True,
    ),
    "texts": (TEXTS, shuffled([dict(reversed(list(row.items()))) for row in TEXTS]), True),
    "a dataclass": (ROWS, shuffled([Row(row.x.clone(), 0) for row in ROWS]), True),
    "a part of a part": (
        Subset(ConcatDataset([TABLE]), range(50)),
        Dataset.from_list(shuffled(tokens(IDS[:50]))),
        True,
    ),
    "most of it others'": (
        TABLE,
        Dataset.from_list([*tokens(OTHERS), *shuffled(tokens(IDS))[:5]]),
        False,
    ),
    "others": (TABLE, Dataset.from_list(tokens(OTHERS)), False),
    "what is not trained on": (
        Subset(TABLE, range(50)),
        Dataset.from_list(shuffled(tokens(IDS), 50)),
        False,
    ),
    "rows that are alike by chance": (
        TensorDataset(FEW),
        TensorDataset(FEW.flip(0).clone()),
        False,
    ),
    "nothing": (TABLE, [], False),
}


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_known_by_what_they_hold(name: str) -> None:
    private, public, refused = KINDS[name]
    with pytest.raises(ValueError, match="holds records of it") if refused else nullcontext():
        refuse_private_evaluation({"a": public}, (private,))


class Computed(torch.utils.data.Dataset[Any]):
    """Whose records cost something: they are not read beforehand."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("read")


def test_records_that_are_computed_are_not_read() -> None:
    assert not contents_shared(Computed(), TABLE) and not contents_shared(TABLE, Computed())
    pictures = Features({"image": Image(), "n": Value("int64")})
    assert not contents_shared(TABLE, Dataset.from_dict({"image": [], "n": []}, features=pictures))


def test_reading_ends_where_the_answer_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    own = contents._contents

    def counted(data: Any) -> Iterator[Any]:
        nonlocal read
        for content in own(data):
            read += 1
            yield content

    monkeypatch.setattr(contents, "_contents", counted)
    assert contents_shared(shuffled(tokens(IDS)), TABLE) and read < 80
    monkeypatch.setattr(contents, "MOST_READ", 99)
    read = 0
    assert not contents_shared(shuffled(tokens(IDS)), TABLE) and not read


def test_records_of_an_unknown_kind_are_no_reason_to_stop() -> None:
    refuse_private_evaluation([object()], ([object(), object()],))
