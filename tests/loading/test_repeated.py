"""Data sets that give one record at several numbers, as scripts do that draw rare classes more
often: the record has as many coins, and adds as many times the clipping norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from quietgrad import PrivacyConfig, Users
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.loading import loader
from quietgrad.loading.repeated import require_each_once

DATA = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
OVERSAMPLED = [*range(20), *[1, 3, 5] * 10]
CONFIG = PrivacyConfig(noise_multiplier=1.0, sample_rate=1.0, steps=1, max_grad_norm=0.5)
REPEATED: dict[str, Callable[[], Any]] = {
    "a subset": lambda: Subset(DATA, OVERSAMPLED),
    "drawn with replacement": lambda: Subset(DATA, torch.tensor([0, 1, 1])),  # type: ignore[arg-type]
    "from the end": lambda: Subset(DATA, [0, -20]),
    "itself twice": lambda: ConcatDataset([DATA, DATA]),
    "a part again": lambda: ConcatDataset([DATA, Subset(DATA, [4])]),
    "a part of both": lambda: Subset(ConcatDataset([DATA, Subset(DATA, [3, 4])]), [0, 4, 21]),
}
ONCE: dict[str, Callable[[], Any]] = {
    "parts": lambda: ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, range(3, 9))]),
    "of two": lambda: Subset(ConcatDataset([DATA, Subset(DATA, [3, 4])]), [0, 3, -1]),
    "equal records": lambda: [DATA[0]] * 20,
    "none": lambda: Subset(DATA, []),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("made", REPEATED.values(), ids=REPEATED)
def test_one_record_at_several_numbers_is_refused(made: Callable[[], Any]) -> None:
    given = made()
    with (
        CONFIG.build(len(given)).start() as run,
        pytest.raises(ValueError, match=r"one record at several numbers.*record_owner="),
    ):
        run.loader(given)


@pytest.mark.parametrize("made", ONCE.values(), ids=ONCE)
def test_each_once_is_taken(made: Callable[[], Any]) -> None:
    require_each_once(made())


def test_selections_of_hugging_faces_data_sets_are_asked_too() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"a": list(range(20))})
    rare, part = table.filter(lambda record: record["a"] % 7 == 0), table.select(range(4, 9))
    join = datasets.concatenate_datasets
    others = datasets.Dataset.from_dict({"a": list(range(20))})
    for once in (
        table,
        table.shuffle(seed=0),
        table.select([3, 5]),
        join([table, others]),
        join([table.select(range(4)), table.select(range(4, 20))]),
        join([part, rare.select([0, 2])]),
        ConcatDataset([part, table.select([9, 10]), others]),
        datasets.interleave_datasets([table, others]),
        table.add_column("b", [[i] for i in range(20)]).train_test_split(0.3, seed=0)["train"],
        datasets.Dataset.from_dict({"a": [None] * 3, "b": [1, 1, 1]}),
    ):
        require_each_once(once)
    for twice in (
        table.select([3, 5, 3]),
        Subset(table.select([3, 5]), [1, 1]),
        join([table, rare, rare]),
        join([table, part]).shuffle(seed=0),
        join([part, table.select(range(8, 12))]).with_format("numpy"),
        ConcatDataset([table.select(range(5)), table.select(range(4, 6))]),
        ConcatDataset([table, table.remove_columns([])]),
        datasets.interleave_datasets([table, rare], stopping_strategy="all_exhausted"),
    ):
        with pytest.raises(ValueError, match="one record at several numbers"):
            require_each_once(twice)


def test_an_opacus_script_is_refused_too() -> None:
    model = nn.Linear(3, 2)
    model, _, given = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(Subset(DATA, OVERSAMPLED), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(ValueError, match="one record at several numbers"):
        next(iter(given))


def test_with_an_owner_for_all_of_a_record_it_is_taken() -> None:
    config = PrivacyConfig(
        noise_multiplier=1.0, sample_rate=1.0, steps=1, users=Users(records_per_user=11)
    )
    given, model = Subset(DATA, OVERSAMPLED), nn.Linear(3, 2)
    with config.build(len(given), record_owner=OVERSAMPLED).start() as run:
        for batch in run.loader(given):
            run.backward(model, loss, batch)
        assert run.released == 1


def test_without_the_look_it_adds_several_times_the_clipping_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "require_each_once", lambda _: None)
    torch.manual_seed(0)
    model, sums = nn.Linear(3, 2), []
    for label in (0, 1):
        given = Subset(
            [*[DATA[i] for i in range(20)], (torch.ones(3), torch.tensor(label))],
            [*range(20), *[20] * 9],
        )
        with CONFIG.build(len(given)).start() as run:
            sums.append(run.clip(model, loss, next(iter(run.loader(given)))).gradients)
    moved = sum(float((sums[0][n] - sums[1][n]).square().sum()) for n in sums[0]) ** 0.5
    assert moved > 8 * 0.5


def test_windows_of_texts_are_no_records() -> None:
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"text": ["a b c d", "e"], "person": [0, 1]})

    def cut(batch: dict[str, Any]) -> dict[str, list[Any]]:
        """What a tokenizer makes with return_overflowing_tokens, and a script of it."""
        rows = [(i, w) for i, text in enumerate(batch["text"]) for w in text.split()]
        person = [batch["person"][i] for i, _ in rows]
        kept = {"x": [[float(ord(w))] for _, w in rows], "person": person}
        return {**kept, "overflow_to_sample_mapping": [i for i, _ in rows]}

    windows = texts.map(cut, batched=True, remove_columns=["text", "person"])
    with (
        CONFIG.build(len(windows)).start() as run,
        pytest.raises(ValueError, match=r"cut texts into several rows.*record_owner="),
    ):
        run.loader(windows)
    require_each_once(windows.remove_columns("overflow_to_sample_mapping"))
    plan = CONFIG.build(len(windows), record_owner=windows["person"])
    with plan.start() as run:
        run.loader(windows)
