"""The last rows of correlated noise in their secret file: who goes on from them draws what who
draws the whole block again does, and a file of anything else is not used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from correlated_runs import (
    BANDS,
    KEY,
    PLAN_STEPS,
    SIGMA,
    STEPS,
    mixing,
    of_run,
    plan_of,
    random_mixing,
)
from torch import Tensor

from quietgrad.keyring import Session, rows_path
from quietgrad.noise import GaussianNoise, NoiseHistory
from quietgrad.plan.session.kept_rows import load_rows, save_rows
from quietgrad.randomness import RandomKey

SINCE, KEPT, NEXT = 2, 14, 20
NOISE = GaussianNoise(SIGMA, mixing())
LIKE = {"w": torch.zeros(3, 5), "b": torch.zeros(2)}
OTHER = RandomKey.from_seed(12)
SESSIONS = (Session(0, "one", KEY), Session(9, "two", OTHER))


def key_of(step: int) -> RandomKey:
    return KEY if step < 9 else OTHER


def history(step: int) -> NoiseHistory:
    return NOISE.replay(LIKE, key_of, SINCE, step)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.json.rows"
    save_rows(path, NOISE, history(KEPT), "as told", SESSIONS)
    return path


def same(one: NoiseHistory, other: NoiseHistory) -> bool:
    pairs = zip(one.rows, other.rows, strict=True)
    alike = all(torch.equal(a[name], b[name]) for a, b in pairs for name in LIKE)
    return alike and (one.step, one.since) == (other.step, other.since)


def test_rows_that_were_kept_go_on_as_rows_that_are_drawn_again(file: Path) -> None:
    kept = load_rows(file, NOISE, LIKE, "as told", SESSIONS, SINCE, NEXT)
    assert kept is not None and kept.step == KEPT and len(kept.rows) == BANDS - 1
    asked: list[int] = []

    def noted(step: int) -> RandomKey:
        asked.append(step)
        return key_of(step)

    assert same(NOISE.replay(LIKE, noted, SINCE, NEXT, kept), history(NEXT))
    assert asked == list(range(KEPT, NEXT))


Load = Callable[[Path], NoiseHistory | None]


def load(
    noise: GaussianNoise = NOISE,
    like: dict[str, Tensor] = LIKE,
    how: str = "as told",
    sessions: tuple[Session, ...] = SESSIONS,
    since: int = SINCE,
    step: int = NEXT,
) -> Load:
    return lambda path: load_rows(path, noise, like, how, sessions, since, step)


MISFITS: dict[str, Load] = {
    "drawn otherwise": load(how="in another dtype"),
    "another matrix": load(GaussianNoise(SIGMA, random_mixing(STEPS, BANDS, 0))),
    "no rows": load(GaussianNoise(SIGMA, mixing(), "regenerate")),
    "another block": load(since=SINCE + 1),
    "a copy that stopped before": load(step=KEPT - 1),
    "another root of the last session": load(
        sessions=(SESSIONS[0], replace(SESSIONS[1], root=KEY))
    ),
    "another root of the first": load(sessions=(replace(SESSIONS[0], root=OTHER), SESSIONS[1])),
    "another name": load(sessions=(SESSIONS[0], replace(SESSIONS[1], name="three"))),
    "a session more": load(sessions=(*SESSIONS, Session(12, "three", KEY))),
    "a session less": load(sessions=SESSIONS[:1]),
    "a session from elsewhere on": load(sessions=(SESSIONS[0], replace(SESSIONS[1], step=8))),
    "other parameters": load(like={"w": LIKE["w"]}),
    "another shape": load(like=LIKE | {"w": torch.zeros(5, 3)}),
    "another dtype": load(like={name: t.double() for name, t in LIKE.items()}),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_rows_of_other_draws_are_not_gone_on_from(misfit: str, file: Path) -> None:
    assert load()(file) is not None
    assert MISFITS[misfit](file) is None


@pytest.mark.parametrize("kept", [0, BANDS - 2, BANDS])
def test_a_file_with_more_or_fewer_rows_is_not_gone_on_from(kept: int, file: Path) -> None:
    record = torch.load(file, weights_only=True)
    rows = (record["rows"] * 2)[:kept]
    torch.save(record | {"rows": rows}, file)
    assert load()(file) is None


@pytest.mark.parametrize("row", [0, BANDS - 2])
def test_a_damaged_file_is_not_gone_on_from(row: int, file: Path) -> None:
    told = bytearray(file.read_bytes())
    told[told.index(history(KEPT).rows[row]["w"].numpy().tobytes()) + 3] ^= 1
    file.write_bytes(told)
    assert load()(file) is None


@pytest.mark.parametrize("kept_at", [4, 7])
def test_a_run_goes_on_alike_with_its_kept_rows_and_without(
    kept_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rooted(first: int) -> None:
        seeds = iter(range(first, first + 10))
        monkeypatch.setattr(
            RandomKey, "from_entropy", classmethod(lambda cls: RandomKey.from_seed(next(seeds)))
        )

    plan, stop = plan_of(seed=None), 9
    first = tmp_path / "first"
    first.mkdir()
    rooted(0)
    with plan.start(first / "ledger.jsonl", first / "keys") as run:
        of_run(run, kept_at)
        run.keep_noise()
        of_run(run, stop - kept_at)
    shutil.copytree(first, tmp_path / "second")
    rows_path(tmp_path / "second" / "keys").unlink()
    made, drawn = {}, {}
    for name in ("first", "second"):
        rooted(100)
        counted: list[int] = []
        right = GaussianNoise._next_row

        def next_row(
            self: GaussianNoise,
            like: dict[str, Tensor],
            key: RandomKey,
            history: NoiseHistory,
            counted: list[int] = counted,
            right: Callable[..., dict[str, Tensor]] = right,
        ) -> dict[str, Tensor]:
            counted.append(history.step)
            return right(self, like, key, history)

        with monkeypatch.context() as patch:
            patch.setattr(GaussianNoise, "_next_row", next_row)
            with plan.start(tmp_path / name / "ledger.jsonl", tmp_path / name / "keys") as run:
                made[name] = [noisy.gradients["w"] for noisy in of_run(run, PLAN_STEPS - stop)]
        drawn[name] = counted
    assert all(map(torch.equal, made["first"], made["second"]))
    assert drawn["first"] == list(range(kept_at, PLAN_STEPS))
    assert drawn["second"] == list(range(PLAN_STEPS))


def test_what_noise_depends_on_is_not_shown() -> None:
    """It can be subtracted from what was released; a log of what a script holds would tell it."""
    shown = repr(NoiseHistory(3, 0, ({"w": torch.full((2,), 0.125)},)))
    assert "step=3" in shown and "0.125" not in shown and "tensor" not in shown
