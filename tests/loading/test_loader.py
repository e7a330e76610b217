"""The loader of a run: the records of its batches and no others, through torch's DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import changed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon_report
from quietgrad.checks import SettingsWarning
from quietgrad.loading import LoadedBatch, MicroBatch
from quietgrad.plan import PrivateRun

RECORDS, EXPECTED, STEPS = 60, 6, 25
CONFIG = PrivacyConfig(
    noise_multiplier=1.0,
    expected_batch_size=EXPECTED,
    steps=STEPS,
    seed=7,
    data_are_public=True,
)


def records() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    return torch.randn(RECORDS, 5, generator=source), torch.arange(RECORDS) % 3


class Named(Dataset[dict[str, Any]]):
    """Dictionaries, with a word that is no tensor."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = records()
        return {"x": x[index], "y": y[index], "name": f"record {index}"}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return F.cross_entropy(model(x), y, reduction="none")


def start(**changes: object) -> PrivateRun:
    return changed(CONFIG, **changes).build(RECORDS).start()


def trained(run: PrivateRun, batches: Iterator[Any]) -> list[Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        run.backward(model, loss, batch)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def by_hand(**changes: object) -> list[Tensor]:
    run = start(**changes)
    x, y = records()
    return trained(run, ((x[i], y[i]) for i in run.batches()))


def through(run: PrivateRun, dataset: Any, **options: Any) -> list[Tensor]:
    loader = run.loader(dataset, **options)
    return trained(run, (batch for _ in run.epochs() for batch in loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [TensorDataset(*records()), Named()], ids=["tuples", "dicts"])
def test_it_trains_as_a_loop_over_indices_does(dataset: Any, workers: int) -> None:
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    found = through(start(), dataset, physical_batch_size=1000, **options)
    for one, other in zip(found, by_hand(), strict=True):
        assert torch.equal(one, other)


def test_micro_batches_change_rounding_alone() -> None:
    found = through(start(), TensorDataset(*records()), physical_batch_size=2)
    for one, other in zip(found, by_hand(), strict=True):
        torch.testing.assert_close(one, other)


def test_records_sizes_and_marks_are_those_of_the_batches() -> None:
    run, twin = start(), start()
    loader = run.loader(TensorDataset(torch.arange(RECORDS)), physical_batch_size=3)
    for _ in run.epochs():
        for batch, indices in zip(loader, twin.batches(len(loader)), strict=True):
            parts = list(batch)
            rows = [int(i) for part in parts for i in part.take()[0]]
            assert rows == indices.tolist()
            assert all(isinstance(part, MicroBatch) for part in parts)
            assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
            assert max(len(part.records[0]) for part in parts) <= 3
            for one in (run, twin):  # released, that the next may be asked for
                empty = {"w": torch.zeros(len(indices), 2)}
                loaded, one._loader = one._loader, None
                one.release(one.contribution(empty, len(indices)))
                one._loader = loaded
    assert run.released == STEPS


def test_empty_batches_have_the_structure_of_the_others() -> None:
    rare = replace(CONFIG, expected_batch_size=1, seed=1)
    run = rare.build(RECORDS).start()
    sizes = []
    for batch in run.loader(Named(), steps=STEPS):
        parts = list(batch)
        sizes.append(sum(len(part.records["x"]) for part in parts))
        assert parts[-1].is_last
        assert parts[0].records["x"].shape[1:] == (5,)
        assert parts[0].records["y"].dtype == torch.int64
        run.release(run.clip(build(), loss, iter(parts)))
    assert 0 in sizes  # or this shows nothing
    assert max(sizes) > 0


def test_views_of_a_record_lie_side_by_side() -> None:
    run = start(augmentation_multiplicity=3)
    loader = run.loader(TensorDataset(torch.arange(RECORDS)), physical_batch_size=4)
    part = next(iter(next(iter(loader))))
    assert part.records[0].shape[1:] == (3,)
    assert (part.records[0] == part.records[0][:, :1]).all()


def test_views_are_averaged() -> None:
    """Of equal views the mean is the record itself."""
    found = through(start(augmentation_multiplicity=3), TensorDataset(*records()))
    for one, other in zip(found, by_hand(), strict=True):
        torch.testing.assert_close(one, other)


class Stacked(TensorDataset):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return torch.stack([x, x, x]), y


def test_views_that_come_stacked_are_named() -> None:
    """Before: "Expected target size [1, 2], got [1]"."""
    run = start(augmentation_multiplicity=3)
    with pytest.raises(RuntimeError, match=r"views=3.*return one view, without stacking them$"):
        through(run, Stacked(*records()))
    assert run.released == 0


def test_other_errors_of_views_stay_as_they_are() -> None:
    def lost(model: Any, batch: Any) -> Any:
        raise ValueError("of the user's own")

    run = start(augmentation_multiplicity=3)
    for batch in run.loader(TensorDataset(*records())):
        with pytest.raises(ValueError, match=r"^of the user's own$"):
            run.backward(build(), lost, batch)
        break


def test_three_views_of_three_colours_keep_the_error_of_the_loss() -> None:
    """Before: only that the views came stacked, which they did not."""

    def lost(model: Any, batch: Any) -> Any:
        raise ValueError("of the user's own")

    run = start(augmentation_multiplicity=3)
    pictures = TensorDataset(torch.zeros(RECORDS, 3, 2, 2), records()[1])
    for batch in run.loader(pictures):
        with pytest.raises(
            ValueError, match=r"^of the user's own; views=3.*if those are its views"
        ):
            run.backward(build(), lost, batch)
        break


def test_views_of_no_record_have_their_structure() -> None:
    plan = replace(CONFIG, expected_batch_size=1, seed=1, augmentation_multiplicity=2)
    trained(run := plan.build(RECORDS).start(), iter(run.loader(Named(), steps=STEPS)))
    assert run.released == STEPS


def test_a_pass_is_an_epoch_and_the_last_one_is_shorter() -> None:
    run = start()
    loader = run.loader(TensorDataset(*records()))
    model, seen = build(), []
    for epoch in run.epochs():
        seen.append((epoch, len(loader)))
        for batch in loader:
            run.backward(model, loss, batch)
    assert seen == [(0, 10), (1, 10), (2, 5)]
    with pytest.warns(SettingsWarning, match="all 25 releases of the plan are made"):
        assert list(loader) == []


def test_a_resumed_run_goes_on_with_the_epoch_it_was_in(tmp_path) -> None:
    plan = CONFIG.build(RECORDS)
    model = build()
    with plan.start(tmp_path / "ledger.jsonl") as run:
        for batch in run.loader(TensorDataset(*records()), steps=13):
            run.backward(model, loss, batch)
    with plan.start(tmp_path / "ledger.jsonl") as run:
        loader = run.loader(TensorDataset(*records()))
        assert next(iter(run.epochs())) == 1
        steps = []
        for _ in run.epochs():
            steps.append(len(loader))
            trained(run, iter(loader))
        assert steps == [10, 2]


def test_prefetched_batches_of_a_pass_that_was_left_come_again() -> None:
    run, twin = start(), start()
    loader = run.loader(TensorDataset(*records()), num_workers=1, prefetch_factor=4)
    model = build()
    for batch in loader:
        run.backward(model, loss, batch)
        break
    trained(run, iter(loader))
    trained(twin, iter(twin.loader(TensorDataset(*records()), steps=11)))
    assert run.released == twin.released == 11
    assert np.array_equal(next(run.batches()), next(twin.batches()))


# What is refused


def test_other_records_than_the_loaders_are_refused() -> None:
    run = start()
    x, y = records()
    loader = run.loader(TensorDataset(x, y))
    batch = next(iter(loader))
    assert isinstance(batch, LoadedBatch)
    size = sum(
        len(part.records[0]) for part in start().loader(TensorDataset(x, y)).__iter__().__next__()
    )
    with pytest.raises(RuntimeError, match="not from the run's loader"):
        run.backward(build(), loss, (x[:size], y[:size]))  # the right number of wrong records
    with pytest.raises(RuntimeError, match="not from the run's loader"):
        run.contribution({"w": torch.zeros(size, 2)}, size)
    run.backward(build(), loss, batch)


def test_batches_of_another_run_or_loader_or_release_are_refused() -> None:
    run, other = start(), start()
    dataset = TensorDataset(*records())
    foreign = next(iter(other.loader(dataset)))
    before = next(iter(run.loader(dataset)))
    late = iter(run.loader(dataset))
    batch = next(late)
    for wrong in (foreign, before):
        with pytest.raises(RuntimeError, match="not of the batch that is open"):
            run.backward(build(), loss, wrong)
    early = next(parts := iter(batch))
    run.release(sum((run.clip(build(), loss, p) for p in parts), run.clip(build(), loss, early)))
    next(late)
    with pytest.raises(RuntimeError, match="not of the batch that is open"):
        run.clip(build(), loss, early)
    with pytest.raises(RuntimeError, match="not of the batch that is open"):
        start().clip(build(), loss, early)  # a run without a loader


def test_passes_side_by_side_are_refused() -> None:
    """Before: the older pass went on with records of earlier batches."""
    run = start()
    loader = run.loader(TensorDataset(*records()), physical_batch_size=1)
    one, other = iter(loader), iter(loader)
    run.backward(build(), loss, next(one))
    run.backward(build(), loss, next(other))
    with pytest.raises(RuntimeError, match="another loop over this run's batches has gone on"):
        run.backward(build(), loss, next(one))
    batch = next(other)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="another pass over the loader has begun"):
        list(batch)


def test_parts_of_a_pass_that_was_left_do_not_add_up_with_those_of_the_next() -> None:
    """Before: four records at 2 C, and four left out."""
    run = start()
    loader = run.loader(TensorDataset(*records()), physical_batch_size=2)
    parts = list(next(iter(loader)))
    before = run.clip(build(), loss, parts[0])
    again = next(iter(loader))
    with pytest.raises(RuntimeError, match="not of the batch that is open"):
        run.clip(build(), loss, parts[1])
    total = run.clip(build(), loss, iter(again))
    with pytest.raises((RuntimeError, ValueError)):
        run.release(before + total)
    with pytest.raises(RuntimeError, match="not made by this run for the batch that is open"):
        run.release(before)
    run.release(total)


class Unstable(Dataset[int]):
    """Read by a worker that mixes records up."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> int:
        return index


def test_records_that_are_not_those_of_the_batch_are_refused(monkeypatch) -> None:
    run = start()
    loader = run.loader(Unstable(), physical_batch_size=2, num_workers=1)  # reads ahead
    monkeypatch.setattr(type(loader._physical), "rows_of", lambda self, part: [0] * len(part))
    batches = iter(loader)
    batch = next(batches)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="not those of the open batch"):
        list(batch)


def test_nothing_counts_twice() -> None:
    run = start()
    batch = next(iter(run.loader(TensorDataset(*records()), physical_batch_size=2)))
    part = next(iter(batch))
    run.clip(build(), loss, part)
    with pytest.raises(RuntimeError, match="clipped already"):
        run.clip(build(), loss, part)
    with pytest.raises(RuntimeError, match="read already"):
        run.backward(build(), loss, batch)


def test_a_batch_that_was_not_released_is_noticed() -> None:
    run = start()
    batches = iter(run.loader(TensorDataset(*records())))
    next(batches)
    with pytest.raises(RuntimeError, match="not released"):
        next(batches)


def test_a_collate_fn_that_drops_records_is_refused() -> None:
    run = start()
    loader = run.loader(
        TensorDataset(*records()),
        collate_fn=lambda rows: torch.utils.data.default_collate(rows[:1]),
    )
    with pytest.raises(RuntimeError, match="it must keep every record"):
        trained(run, iter(loader))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(RECORDS))


@pytest.mark.parametrize(
    ("dataset", "options", "said"),
    [
        (Stream(), {}, "cannot be asked for a record by its number"),
        ((i for i in range(3)), {}, "cannot be asked for a record by its number"),
        (DataLoader([1, 2]), {}, "dataset is a DataLoader"),
        ([1, 2], {}, "dataset has 2 records, the plan is for dataset_size=60"),
        (range(RECORDS), {"shuffle": True}, "shuffle cannot be set: batches are Poisson"),
        (range(RECORDS), {"batch_size": 8}, "batch_size cannot be set"),
        (range(RECORDS), {"sampler": None}, "sampler cannot be set"),
        (range(RECORDS), {"drop_last": True}, "drop_last cannot be set"),
        (range(RECORDS), {"in_order": False}, "in_order cannot be set"),
        (range(RECORDS), {"physical_batch_size": 0}, "physical_batch_size=0"),
        (range(RECORDS), {"steps": 0}, "steps=0"),
    ],
)
def test_what_the_plan_decides_is_refused(dataset: Any, options: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        start().loader(dataset, **options)


def test_nothing_of_a_batch_is_printed() -> None:
    run = start()
    batch = next(iter(run.loader(TensorDataset(*records()))))
    assert repr(batch) == "LoadedBatch(release=0)"
    assert "tensor" not in repr(next(iter(batch)))


def test_a_batch_that_is_used_as_a_tuple_says_where_it_goes() -> None:
    """Before: 'LoadedBatch' object is not subscriptable."""
    batch = next(iter(start().loader(TensorDataset(*records()), physical_batch_size=2)))
    with pytest.raises(TypeError, match=r"no records of its own.*run.backward\(model, per_example"):
        batch[0]
    part = next(iter(batch))
    with pytest.raises(TypeError, match="a MicroBatch holds no records"):
        part["input_ids"]
    with pytest.raises(TypeError, match="a MicroBatch holds no records"):
        _, _ = part


def test_epsilon_is_that_of_the_releases_so_far() -> None:
    run = start()
    assert run.epsilon() == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(run, iter(run.loader(TensorDataset(*records()), steps=2)))
    after = CONFIG.build(RECORDS).event.after(2)
    assert run.epsilon() == run.epsilon() == epsilon_report(after, run.plan.delta).epsilon


class Drawing(Dataset[Tensor]):
    """Records that are augmented at random."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2)


def test_what_workers_draw_does_not_follow_from_a_seed_that_is_known() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)  # as scripts begin
        loader = start(seed=None, expected_batch_size=30).loader(Drawing(), num_workers=1)
        drawn.append(next(iter(next(iter(loader)))).records[0])
    assert not torch.equal(*drawn)
