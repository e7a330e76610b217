"""Data sets in which a record follows from what was read before it: who else is in the batch would
change what one record adds, and nothing that looks at a batch can see it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from quietgrad import PrivacyConfig
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.loading import loader
from quietgrad.loading.reading import require_records_apart

RECORDS = 24


class Records(Dataset[Any]):
    """Records by themselves."""

    def __init__(self) -> None:
        self.x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Tensor:
        return self.x[i]


class Centred(Records):
    """Less the mean of what was read so far."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = torch.zeros(4), 0

    def __getitem__(self, i: int) -> Tensor:
        self.total, self.count = self.total + self.x[i], self.count + 1
        return self.x[i] - self.total / self.count


class CentredInPlace(Centred):
    def __getitem__(self, i: int) -> Tensor:
        self.total += self.x[i]
        self.count += 1
        return self.x[i] - self.total / self.count


class Differences(Records):
    def __init__(self) -> None:
        super().__init__()
        self.before = np.zeros(4)

    def __getitem__(self, i: int) -> Tensor:
        now = self.x[i].numpy()
        found, self.before = torch.from_numpy(now - self.before), now
        return found


class OneBuffer(Records):
    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(4)

    def __getitem__(self, i: int) -> Tensor:
        return self.buffer.copy_(self.x[i])


class OneDictionary(Records):
    def __init__(self) -> None:
        super().__init__()
        self.record: dict[str, Tensor] = {}

    def __getitem__(self, i: int) -> dict[str, Tensor]:  # type: ignore[override]
        self.record["x"] = self.x[i]
        return self.record


class Augmented(Records):
    """Drawn from the process's generators, a number of draws that depends on the record."""

    def __getitem__(self, i: int) -> Tensor:
        times = 1 + int(self.x[i, 0] > 0)
        return self.x[i] + torch.randn(times, 4)[-1] + float(np.random.rand())


class OwnGenerator(Records):
    """The same from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.numbers = torch.Generator().manual_seed(1), np.random.default_rng(2)

    def __getitem__(self, i: int) -> Tensor:
        times = 1 + int(self.x[i, 0] > 0)
        noise = torch.randn(times, 4, generator=self.source)[-1]
        return self.x[i] + noise + float(self.numbers.random())


class WithObjects(Records):
    """What cannot be pickled beside numbers, for a collate_fn of its own."""

    def __getitem__(self, i: int) -> Any:  # type: ignore[override]
        return {"x": self.x[i], "words": (word for word in "a b")}


class Cached(Records):
    """Reads each record once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Tensor] = {}

    def __getitem__(self, i: int) -> Tensor:
        return self.known.setdefault(i, self.x[i] * 2)


MIXING: dict[str, Callable[[], Any]] = {
    "running mean": Centred,
    "running mean in place": CentredInPlace,
    "differences": Differences,
    "one buffer": OneBuffer,
    "one dictionary": OneDictionary,
    "a part": lambda: Subset(Centred(), range(20)),
    "a union": lambda: ConcatDataset([Records(), Differences()]),
}
APART: dict[str, Callable[[], Any]] = {
    "by themselves": Records,
    "tensors": lambda: TensorDataset(Records().x),
    "a list": lambda: list(Records().x),
    "augmented": Augmented,
    "a generator of its own": OwnGenerator,
    "cached": Cached,
    "with objects": WithObjects,
    "a part": lambda: Subset(Augmented(), range(5, 20)),
    "two records": lambda: Subset(Centred(), range(2)),
}


@pytest.mark.parametrize("kind", MIXING)
def test_records_that_follow_from_others_are_refused(kind: str) -> None:
    dataset = MIXING[kind]()
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=8, steps=2)
    with config.build(len(dataset)).start() as run:
        with pytest.raises(ValueError, match="dataset gives"):
            next(iter(run.loader(dataset)))
        assert run.released == 0


@pytest.mark.parametrize("kind", APART)
def test_others_are_taken(kind: str) -> None:
    dataset = APART[kind]()
    before = torch.get_rng_state(), repr(np.random.get_state())
    require_records_apart(dataset)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state()) == before[1]


def test_what_was_read_for_the_look_leaves_nothing_behind() -> None:
    dataset = OwnGenerator()
    before = dataset.source.get_state()
    require_records_apart(dataset)
    assert torch.equal(dataset.source.get_state(), before)


def test_maps_of_a_file_are_taken(tmp_path: Path) -> None:
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (RECORDS, 4))
    x[:] = Records().x.numpy()
    require_records_apart(np.load(tmp_path / "x.npy", mmap_mode="r"))


@pytest.mark.parametrize("kind", ["running mean", "one buffer"])
def test_they_are_refused_in_an_opacus_script(kind: str) -> None:
    model = nn.Linear(4, 1)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(MIXING[kind](), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(ValueError, match="dataset gives"):
        next(iter(private[2]))


def sum_of(first: float) -> Tensor:
    """The clipped sum, in clipping norms, of all records, the first of which is so large."""
    dataset = Centred()
    dataset.x[0] = first
    model, clip = nn.Linear(4, 1, bias=False), 0.01
    config = PrivacyConfig(
        max_grad_norm=clip, noise_multiplier=1.0, expected_batch_size=RECORDS, steps=1,
        data_are_public=True,
    )  # fmt: skip
    with config.build(RECORDS).start() as run:
        (part,) = next(iter(run.loader(dataset)))
        clipped = run.clip(model, lambda m, x: m(x)[:, 0], part)
        return clipped.gradients["weight"].double() / clip


def test_without_the_look_one_record_moves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing a record may move the sum by 2 C."""
    monkeypatch.setattr(loader, "require_records_apart", lambda dataset: None)
    assert float((sum_of(1e3) - sum_of(-1e3)).norm()) > 4.0


@pytest.mark.parametrize("place", [0, 9])
def test_one_end_alone_that_follows_from_what_was_read_is_refused(place: int) -> None:
    """Mutant: one of the two looks left out."""

    class Follows(Dataset[Tensor]):
        before = 0.0

        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> Tensor:
            found = torch.tensor([i + (self.before if i == place else 0.0)])
            self.before = float(i)
            return found

    with pytest.raises(ValueError, match="another record after one record than after another"):
        require_records_apart(Follows())
