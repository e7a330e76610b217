"""What is drawn while records are read (random crops, noise), and by a loop of the Opacus kind:
known to who knows the script's seeds, unless it is from the run's secret.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from quietgrad.generators import KeyedByStep, KeyedWorker
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.plan import PrivacyConfig

CONFIG = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=12, steps=2, data_are_public=True)
N, SEED = 12, 4


class Augmented(Dataset[Tensor]):
    """Records with a number from each of three generators."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())])


def seeded(_: int = 0) -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def by_run(workers: int) -> Tensor:
    """[records, 3] of a run's first batch, all of them."""
    own: dict[str, Any] = {"num_workers": workers}
    if workers:
        own |= {"worker_init_fn": seeded, "generator": torch.Generator().manual_seed(SEED)}
    with CONFIG.build(N).start() as run:
        seeded()
        batch = next(iter(run.loader(Augmented(), **own)))
        return torch.cat([part.records for part in batch])


def private(workers: int, **settings: Any) -> Any:
    own = {"worker_init_fn": seeded} if workers else {}
    loader = DataLoader(Augmented(), batch_size=N, num_workers=workers, **own)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, **settings,
    )  # fmt: skip


def by_opacus(workers: int) -> Tensor:
    """The same of a loop of the Opacus kind."""
    _, _, loader = private(workers)
    seeded()
    for batch in loader:
        return torch.tensor(batch.tolist())
    raise AssertionError("no batch")


def by_the_loop(_: int) -> Tensor:
    """What such a loop itself draws for its records."""
    _, _, loader = private(0)
    seeded()
    for _batch in loader:
        return torch.tensor([float(torch.rand(())), random.random(), float(np.random.rand())])
    raise AssertionError("no batch")


def unkeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken mechanism: reading draws from what the script seeded."""
    monkeypatch.setattr(KeyedByStep, "of", lambda *_, **__: nullcontext())
    monkeypatch.setattr(KeyedWorker, "__call__", lambda self, worker: self._own(worker))


WAYS = [(by_run, 0), (by_run, 1), (by_opacus, 0), (by_opacus, 1), (by_the_loop, 0)]


@pytest.mark.parametrize(("way", "workers"), WAYS)
def test_the_scripts_seeds_do_not_say_what_is_drawn_for_records(way: Any, workers: int) -> None:
    one, other = way(workers), way(workers)
    assert (
        one.shape == other.shape and bool(one.isfinite().all()) and not bool((one == other).any())
    )


@pytest.mark.parametrize(("way", "workers"), WAYS)
def test_unkeyed_the_scripts_seeds_say_what_is_drawn(
    way: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unkeyed(monkeypatch)
    one = way(workers)
    assert bool(one.isfinite().all()) and torch.equal(one, way(workers))


def kept_inputs() -> list[Tensor]:
    """Which inputs dropout let through, of three steps whose loop begins with the script's seed."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    ones = DataLoader(cast(Any, list(torch.ones(2, 64))), batch_size=2)
    made, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=ones,
        noise_multiplier=1e-4,
        max_grad_norm=1.0,
    )
    found = []
    for _ in range(3):
        for records in loader:
            seeded()
            made(records).mean().backward()
            optimizer.step()
            found.append(made._module[1].weight.grad.flatten().abs() > 1e-3)
            optimizer.zero_grad()
    return found


def test_a_seed_in_the_loop_does_not_say_what_records_meet() -> None:
    """It lay in the keyed block of the loop, within which nothing was keyed again."""
    first, second, third = kept_inputs()
    assert 0 < int(first.sum()) < 64 and not torch.equal(first, second)
    assert not torch.equal(second, third) and not torch.equal(first, third)


def test_unkeyed_a_seed_in_the_loop_says_what_records_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broken mechanism: a loop's block passes for one in which only the library draws."""
    whole = KeyedByStep.of
    monkeypatch.setattr(KeyedByStep, "of", lambda *given, **_: whole(*given))
    first, second, third = kept_inputs()
    assert torch.equal(first, second) and torch.equal(second, third)


@pytest.mark.parametrize("broken_off", [True, False])
def test_the_scripts_own_generators_go_on_after_the_loop(broken_off: bool) -> None:
    model, optimizer, loader = private(0)
    seeded()
    states = torch.get_rng_state(), random.getstate()
    for records in loader:
        model(records).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if broken_off:
            break
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
