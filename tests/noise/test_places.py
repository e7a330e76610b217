"""Correlated noise and records that are known by their numbers: a shuffle without a seed gives them
other parts in another session, or for another epoch.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.keyring import forget_secrets, places_path
from quietgrad.noise import BandedNoise, IndependentNoise
from quietgrad.plan import PrivateRun
from quietgrad.plan.session.places import Places

RECORDS, BANDS, STEPS = 24, 3, 6
# Every record takes part in every step of its part.
CONFIG = PrivacyConfig(
    noise_multiplier=1.0, sample_rate=1 / BANDS, steps=STEPS, noise=BandedNoise(3)
)
REFUSED = r"in another order.*shuffle by its seed.*record_ids="
FORWARD, BACKWARD = range(RECORDS), range(RECORDS - 1, -1, -1)
pytestmark = pytest.mark.usefixtures("examined_once")


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch)[:, 0]


def records(order: Sequence[int]) -> list[Tensor]:
    return [torch.full((2,), float(i)) for i in order]


def made(run: PrivateRun, data: Any, steps: int = 2) -> list[set[int]]:
    """Which records took part in so many steps: all of the part whose turn it was."""
    model, took = nn.Linear(2, 1), []
    for batch in run.loader(data, steps=steps):
        turn = np.flatnonzero(run.plan.sampler.parts == run.released % BANDS)
        took.append({int(data[int(place)][0]) for place in turn})
        run.backward(model, loss, batch)
    return took


def files(folder: Path) -> tuple[Path, Path]:
    return folder / "ledger.jsonl", folder / "secrets.json"


def plan_of(config: PrivacyConfig = CONFIG, **given: Any) -> PrivacyPlan:
    return config.build(RECORDS, **given)


@pytest.mark.parametrize("kept", [True, False], ids=["another session", "another loader"])
def test_records_in_another_order_are_refused(kept: bool, tmp_path: Path) -> None:
    ledger, keys = files(tmp_path)
    run = plan_of().start(ledger, keys)
    made(run, records(FORWARD))
    if kept:
        run.close()
        run = plan_of().start(ledger, keys)
    with pytest.raises(ValueError, match=REFUSED):
        run.loader(records(BACKWARD))
    assert run.released == 2
    made(run, records(FORWARD), STEPS - 2)
    run.close()


def test_a_run_that_goes_on_without_its_keys_is_refused(tmp_path: Path) -> None:
    # Before: no file, nothing to compare with: another order at each resume, and one more step of
    # a record's in each session than epsilon counts.
    ledger, keys = files(tmp_path)
    with plan_of().start(ledger) as run:
        made(run, records(FORWARD))
        with pytest.raises(ValueError, match=REFUSED):
            run.loader(records(BACKWARD))
    with plan_of().start(ledger) as run:
        for order in (BACKWARD, FORWARD):
            with pytest.raises(ValueError, match=r"keys=None: this run goes on.*record_ids="):
                run.loader(records(order))
    with plan_of().start(ledger, keys) as run:  # who says so by giving them
        made(run, records(FORWARD))
    with plan_of().start(ledger, keys) as run, pytest.raises(ValueError, match=REFUSED):
        run.loader(records(BACKWARD))


def test_without_the_check_one_record_takes_part_twice_within_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Places, "require", lambda *_: None)
    plan, took = plan_of(), []
    for order in (FORWARD, BACKWARD):
        with plan.start(*files(tmp_path)) as run:
            took += made(run, records(order), STEPS // 2)
    assert plan.mixing is not None
    rounds = -(-STEPS // BANDS)
    # The record's whole effect, in units of what is accounted for: a column of norm 1 a round.
    effect = max(
        float(
            np.linalg.norm(plan.mixing.matrix[:, [t for t in range(STEPS) if i in took[t]]].sum(1))
        )
        for i in range(RECORDS)
    )
    assert effect > 1.1 * rounds**0.5


def test_the_same_order_and_what_may_have_another_go_on(tmp_path: Path) -> None:
    ids = [str(i).encode() for i in FORWARD]
    independent = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.3, steps=STEPS)
    assert independent.noise == IndependentNoise()
    cases = {
        "same": (plan_of(), FORWARD, None),
        "content": (plan_of(record_ids=ids), BACKWARD, [ids[i] for i in BACKWARD]),
        "independent": (plan_of(independent), BACKWARD, None),
    }
    for name, (plan, order, again) in cases.items():
        place = files(tmp_path / name)
        with plan.start(*place) as run:
            made(run, records(FORWARD))
        later = plan if again is None else plan_of(record_ids=again)
        with later.start(*place) as run:
            made(run, records(order))
        assert places_path(place[1]).exists() == (name != "independent")


class Augmented:
    """Crops that torch draws, and a counter, which nothing puts back."""

    def __init__(self, counts: bool) -> None:
        self.counts, self.read = counts, 0

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Tensor:
        self.read += self.counts
        return torch.full((2,), float(i)) + torch.rand(2) / 9 + self.read % 2 / 9


def test_records_that_are_augmented_go_on(tmp_path: Path) -> None:
    for _ in range(2):
        with plan_of().start(*files(tmp_path)) as run:
            made(run, Augmented(False))
    assert places_path(tmp_path / "secrets.json").exists()


class Held:
    """What a script makes of a record: a row of a table, and names."""

    def __init__(self, row: Tensor, names: set[int]) -> None:
        self.row, self.names = row, names


def held(order: Sequence[int], names: Sequence[int]) -> list[Any]:
    table = torch.cat([torch.rand(1, 2), torch.stack(records(FORWARD))])
    return [Held(table[1 + i], set(names)) for i in order]


def test_records_that_a_process_holds_in_its_own_way_are_the_same(tmp_path: Path) -> None:
    # Before: a resume refused rows of a table in objects, and sets, whose order is a process's.
    assert list({0, 8}) != list({8, 0})
    rows: dict[str, Any] = {"collate_fn": lambda held: torch.stack([one.row for one in held])}
    model = nn.Linear(2, 1)
    for names in ((0, 8), (8, 0)):
        with plan_of().start(*files(tmp_path)) as run:
            for batch in run.loader(held(FORWARD, names), steps=2, **rows):
                run.backward(model, loss, batch)
    with plan_of().start(*files(tmp_path)) as run:
        for other in (held(BACKWARD, (0, 8)), held(FORWARD, (0, 9))):
            with pytest.raises(ValueError, match=REFUSED):
                run.loader(other, **rows)


def sparse(order: Sequence[int]) -> list[Tensor]:
    return [record.to_sparse() for record in records(order)]


def turned(order: Sequence[int]) -> list[Tensor]:
    return [torch.complex(record, 1 + record).conj() for record in records(order)]


def plain(found: list[Tensor]) -> Tensor:
    return torch.stack([one.to_dense() for one in found]).real.float()


@pytest.mark.parametrize("form", [sparse, turned])
def test_tensors_that_are_not_laid_out_are_read(form: Any, tmp_path: Path) -> None:
    # Before: an error of torch's at every loader, of independent noise too.
    model = nn.Linear(2, 1)
    with plan_of().start(*files(tmp_path)) as run:
        for batch in run.loader(form(FORWARD), steps=2, collate_fn=plain):
            run.backward(model, loss, batch)
        with pytest.raises(ValueError, match=REFUSED):
            run.loader(form(BACKWARD))


def test_files_of_another_run_or_of_none_decide_nothing(tmp_path: Path) -> None:
    ledger, keys = files(tmp_path)
    with plan_of().start(ledger, keys) as run:
        made(run, records(FORWARD))
    places = places_path(keys)
    if hasattr(stat, "S_IMODE"):
        assert stat.S_IMODE(places.stat().st_mode) == 0o600
    kept = places.read_text()
    other = files(tmp_path / "other")
    with plan_of().start(*other) as run:
        run.loader(records(BACKWARD))  # before the first release, as records lie then
        made(run, records(BACKWARD))
    places_path(other[1]).write_text(kept)
    with plan_of().start(*other) as run:
        made(run, records(BACKWARD))
    places.write_text("{")
    with plan_of().start(ledger, keys) as run:
        made(run, records(FORWARD))
    forget_secrets(keys)
    assert not places.exists()
