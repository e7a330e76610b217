"""What is given for records by their numbers (identities, owners), and a data set in another order;
identities of another rule on a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad import PrivacyConfig, PrivacyPlan, Users
from quietgrad.ledger import read_ledger
from quietgrad.noise import BandedNoise, IndependentNoise
from quietgrad.plan import PrivateRun
from quietgrad.plan.session.places import Places

RECORDS, BANDS, STEPS = 24, 3, 6
FORWARD, BACKWARD = range(RECORDS), range(RECORDS - 1, -1, -1)
# Every record takes part in every step of its part.
CONFIG = PrivacyConfig(
    noise_multiplier=1.0, sample_rate=1 / BANDS, steps=STEPS, noise=BandedNoise(BANDS)
)
OWNED = PrivacyConfig(
    noise_multiplier=1.0,
    sample_rate=0.5,
    steps=STEPS,
    noise=IndependentNoise(),
    users=Users(records_per_user=4),
)
pytestmark = pytest.mark.usefixtures("examined_once")


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch)[:, 0]


def records(order: Sequence[int]) -> list[Tensor]:
    return [torch.full((2,), float(i)) for i in order]


def ids(order: Sequence[int], rule: str = "") -> list[bytes]:
    return [f"{rule}{i}".encode() for i in order]


def by_content(order: Sequence[int] = FORWARD, rule: str = "") -> PrivacyPlan:
    return CONFIG.build(RECORDS, record_ids=ids(order, rule))


def by_owner(order: Sequence[int] = FORWARD, config: PrivacyConfig = OWNED) -> PrivacyPlan:
    return config.build(RECORDS, record_owner=[f"user {i // 4}" for i in order])


def files(folder: Path) -> tuple[Path, Path]:
    return folder / "ledger.jsonl", folder / "secrets.json"


def made(run: PrivateRun, order: Sequence[int], steps: int = 2) -> None:
    model = nn.Linear(2, 1)
    for batch in run.loader(records(order), steps=steps):
        run.backward(model, loss, batch)


def test_identities_of_another_rule_are_refused_on_a_resume(tmp_path: Path) -> None:
    """As of Python's ``hash``, which another process seeds anew."""
    with by_content().start(*files(tmp_path)) as run:
        made(run, FORWARD)
    before = files(tmp_path)[0].read_bytes()
    other = by_content(rule="of another process ")
    with pytest.raises(ValueError, match=r"record_ids holds other identities.*begin a new run"):
        other.start(*files(tmp_path))
    assert files(tmp_path)[0].read_bytes() == before  # what is refused counts no start
    with by_content(BACKWARD).start(*files(tmp_path)) as run:  # another order is none
        made(run, BACKWARD)
    assert read_ledger(tmp_path).releases == 4


def test_a_loop_without_a_loader_is_asked_too(tmp_path: Path) -> None:
    plan = by_content()
    with plan.start(*files(tmp_path)) as run:
        for indices in run.batches(1):
            run.backward(nn.Linear(2, 1), loss, torch.stack(records(FORWARD))[indices])
    with pytest.raises(ValueError, match="record_ids holds other identities"):
        by_content(rule="another ").start(*files(tmp_path))


def test_without_the_look_a_record_takes_part_more_often_than_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Places, "__init__", lambda *_: None)
    monkeypatch.setattr(Places, "require", lambda *_: None)
    took: list[np.ndarray[Any, Any]] = []
    for plan in (by_content(), by_content(rule="another ")):
        with plan.start(*files(tmp_path)) as run:
            for _ in range(STEPS // 2):
                took.append(plan.sampler.parts == run.released % BANDS)
                made(run, FORWARD, 1)
        took = took[: run.released]
    assert plan.mixing is not None
    effect = max(
        float(np.linalg.norm(plan.mixing.matrix[:, [t for t in range(STEPS) if took[t][i]]].sum(1)))
        for i in range(RECORDS)
    )
    assert effect > 1.1 * (STEPS / BANDS) ** 0.5  # a column of norm 1 a round is counted


@pytest.mark.parametrize("build", [by_content, by_owner])
@pytest.mark.parametrize("again", [True, False], ids=["another session", "another loader"])
def test_records_in_another_order_than_what_was_given_for_them_are_refused(
    build: Any, again: bool, tmp_path: Path
) -> None:
    """A data set that is shuffled between two cells of a notebook, by the plan of before."""
    plan = build()
    run = plan.start(*files(tmp_path))
    made(run, FORWARD)
    if again:
        run.close()
        run = plan.start(*files(tmp_path))
    with pytest.raises(ValueError, match=r"in another order, and the plan's record_(ids|owner)"):
        run.loader(records(BACKWARD))
    made(run, FORWARD, 1)
    run.close()
    with build(BACKWARD).start(*files(tmp_path)) as run:  # the remedy
        made(run, BACKWARD, 1)
        with pytest.raises(ValueError, match="in another order"):
            run.loader(records(FORWARD))
    assert read_ledger(tmp_path).releases == 4


@pytest.mark.parametrize("build", [by_content, by_owner, CONFIG.build])
@pytest.mark.parametrize("passes", [0, 1])
def test_records_that_are_shuffled_between_two_passes_are_refused(build: Any, passes: int) -> None:
    """By a script, or by a data set's own ``set_epoch``, under the loader that read them before."""
    plan, given = build(*[RECORDS] * (build == CONFIG.build)), records(FORWARD)
    with plan.start() as run:
        loader, model = run.loader(given, steps=2), nn.Linear(2, 1)
        for _ in range(passes):
            for batch in loader:
                run.backward(model, loss, batch)
        given.reverse()
        with pytest.raises(ValueError, match="in another order"):
            next(iter(loader))
        given.reverse()  # as they lay
        for batch in loader:
            run.backward(model, loss, batch)
        assert run.released == 2 * passes + 2


def test_without_the_look_one_users_records_count_as_many_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Places, "require", lambda *_: None)
    mixed = [*FORWARD[::4], *FORWARD[1::4], *FORWARD[2::4], *FORWARD[3::4]]
    plan, coins = by_owner(), []
    with plan.start(*files(tmp_path)) as run:
        for order in (FORWARD, mixed):
            made(run, order)
            users = plan.sampler.users
            assert users is not None
            held = [users.order[users.offsets[u] : users.offsets[u + 1]] for u in range(6)]
            coins.append(sum(any(order[i] // 4 == 0 for i in own) for own in held))
    assert coins == [1, 4]  # whose fall decides over records of the first user


def test_other_owners_of_correlated_noise_are_other_identities(tmp_path: Path) -> None:
    config = replace(OWNED, noise=BandedNoise(BANDS), sample_rate=1 / BANDS)
    with by_owner(config=config).start(*files(tmp_path)) as run:
        made(run, FORWARD)
    renamed = config.build(RECORDS, record_owner=[f"person {i // 4}" for i in FORWARD])
    with pytest.raises(ValueError, match="record_owner holds other identities"):
        renamed.start(*files(tmp_path))


def test_digests_of_what_was_given_are_shown_nowhere(tmp_path: Path) -> None:
    """Who knows all other records could try the last one."""
    plan = by_content()
    with plan.start(*files(tmp_path)) as run:
        made(run, FORWARD)
    given = plan.assignment
    assert given.order and given.identities
    shown = f"{plan!r} {given!r} {files(tmp_path)[0].read_text()}"
    assert given.order not in shown and given.identities not in shown
    kept = tmp_path / "secrets.json.places"
    assert given.identities in kept.read_text() and kept.stat().st_mode & 0o77 == 0
