"""Noise correlated across steps goes on after a stop, or begins a new block and says so."""

from __future__ import annotations

import json
import shutil
import stat
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from correlated_runs import (
    CLIP,
    ENTRIES,
    KEY,
    MEMORIES,
    PLAN_BANDS,
    PLAN_STEPS,
    SIGMA,
    build,
    data,
    loss,
    mixing,
    of_run,
    plan_of,
    random_mixing,
    rejected,
    releases,
    rows_of,
    run_whole,
    zero_sum,
)
from hypothesis import given
from hypothesis import strategies as st

from quietgrad.keyring import KeyRing, Secrets, read_secrets, write_secrets
from quietgrad.ledger import read_ledger
from quietgrad.noise import GaussianNoise, PrefixSums, mixing_matrix
from quietgrad.noise.correlation.banded import Floats
from quietgrad.plan import PrivateRun
from quietgrad.randomness import RandomKey

pytestmark = pytest.mark.usefixtures("examined_once")

# Going on after a stop


def release(run: PrivateRun, count: int) -> list[torch.Tensor]:
    return [noisy.gradients["w"] for noisy in of_run(run, count, 50)]


def blocks_in(path: Path) -> list[int]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if line["type"] == "noise-block"]


def block_matrix(matrix: Floats, *cuts: int) -> Floats:
    """C with all entries zeroed that refer from a block to an earlier one."""
    out = matrix.copy()
    for cut in cuts:
        out[cut:, :cut] = 0.0
    return out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.mark.grid(5, "places of the stop")
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "stop", [1, PLAN_BANDS - 2, PLAN_BANDS - 1, PLAN_BANDS, PLAN_BANDS + 1, 9, PLAN_STEPS - 1]
)
def test_a_seeded_run_goes_on_as_if_it_had_not_stopped(path: Path, stop: int, memory: str) -> None:
    plan = plan_of(memory=memory)
    uninterrupted = release(plan.start(), PLAN_STEPS)
    with plan.start(path) as run:
        first = release(run, stop)
    with plan.start(path) as run:
        rest = release(run, PLAN_STEPS - stop)
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, first + rest, strict=True))
    assert blocks_in(path) == [0]
    assert read_ledger(path).releases == PLAN_STEPS


def test_a_seeded_run_goes_on_after_many_stops_and_with_the_other_memory(path: Path) -> None:
    uninterrupted = release(plan_of().start(), PLAN_STEPS)
    made = []
    for start in range(0, PLAN_STEPS, 3):
        with plan_of(memory=MEMORIES[start % 2]).start(path) as run:
            made += release(run, 3)
    for a, b in zip(uninterrupted, made, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_whole_training_goes_on_after_a_stop(path: Path) -> None:
    # With batches and clipping: whoever stops before a release makes that release, not the next
    # one, after the stop.
    uninterrupted = run_whole(plan_of().start())
    model, (x, y), made = build(), data(), []
    for _ in range(3):
        with plan_of().start(path) as run:
            for indices, _ in zip(run.batches(), range(4)):
                made.append(run.step(model, loss, (x[indices], y[indices])))
    for one, two in zip(uninterrupted, made, strict=True):
        assert all(torch.equal(g, two.gradients[name]) for name, g in one.gradients.items())


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("memory", MEMORIES)
def test_another_dtype_begins_a_new_block_and_says_so(
    path: Path, tmp_path: Path, seed: int | None, memory: str
) -> None:
    # The same keys give other numbers in double precision: noise "correlated" with those would be
    # correlated with nothing, and mixing_row and noise_std would be wrong.
    plan, keys, inverse = plan_of(memory=memory, seed=seed), tmp_path / "keys", None
    with plan.start(path, keys) as run:
        of_run(run, 4)
    for start, dtype in ((4, torch.float64), (7, torch.float32)):
        with plan.start(path, keys) as run:
            with pytest.warns(UserWarning, match=f"not correlated with the steps before {start}"):
                first = of_run(run, 1, dtype=dtype)
            made = first + of_run(run, 1, dtype=dtype)
        with (
            plan.start(path, keys) as run,
            warnings.catch_warnings(),
        ):  # a further session of the same kind goes on
            warnings.simplefilter("error")
            made += of_run(run, 1, dtype=dtype)
        inverse = np.linalg.inv(block_matrix(plan.mixing.matrix, start))
        for t, noisy in enumerate(made, start=start):
            np.testing.assert_allclose(noisy.mixing_row, inverse[t, : t + 1], rtol=0, atol=1e-12)
            assert noisy.noise_std == pytest.approx(SIGMA * CLIP * np.linalg.norm(inverse[t]))
    assert blocks_in(path) == [0, 4, 7]
    contents = read_ledger(path)
    assert contents.releases == 10 and contents.noise_drawn is not None
    assert contents.noise_drawn.startswith("float32 by numpy")
    assert [session.step for session in contents.sessions] == [0, 4, 6, 7, 9]


@pytest.mark.statistical
def test_noise_after_a_change_of_dtype_has_the_covariance_of_its_block(
    path: Path, entropy: None
) -> None:
    plan, entries, keys = plan_of(seed=None), 40_000, path.with_suffix(".keys")
    with plan.start(path, keys) as run:
        before = of_run(run, 5, entries)
    with plan.start(path, keys) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after = of_run(run, PLAN_STEPS - 5, entries, torch.float64)
    rows = rows_of(before + after)
    assert not rejected(rows, block_matrix(plan.mixing.matrix, 5))
    assert rejected(rows, plan.mixing.matrix)


@pytest.fixture
def entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh roots in a fixed order: statistical tests are the same each time."""
    seeds = iter(range(100))
    monkeypatch.setattr(
        RandomKey, "from_entropy", classmethod(lambda cls: RandomKey.from_seed(next(seeds)))
    )


@pytest.mark.parametrize("stop", [1, 3, 4, 9])
def test_without_seed_and_keys_a_new_block_begins(path: Path, stop: int) -> None:
    plan = plan_of(seed=None)
    with plan.start(path) as run:
        of_run(run, stop)
    assert read_ledger(path).noise_block == (0, plan.noise.digest)
    with plan.start(path) as run:
        made = of_run(run, PLAN_STEPS - stop)
    assert blocks_in(path) == [0, stop]
    assert read_ledger(path).noise_block == (stop, plan.noise.digest)
    inverse = np.linalg.inv(block_matrix(plan.mixing.matrix, stop))
    for t, noisy in enumerate(made, start=stop):
        assert not noisy.mixing_row[:stop].any()
        np.testing.assert_allclose(noisy.mixing_row, inverse[t, : t + 1], rtol=0, atol=1e-12)
        assert noisy.noise_std == pytest.approx(SIGMA * CLIP * np.linalg.norm(inverse[t]))


@pytest.mark.statistical
@pytest.mark.parametrize("memory", MEMORIES)
def test_covariance_after_a_new_block_is_that_of_the_cut_matrix(
    path: Path, memory: str, entropy: None
) -> None:
    plan, cut, made = plan_of(seed=None, memory=memory), 6, []
    for count in (cut, PLAN_STEPS - cut):
        with plan.start(path) as run:
            made += of_run(run, count, ENTRIES)
    rows = rows_of(made)
    assert not rejected(rows, block_matrix(plan.mixing.matrix, cut))
    assert rejected(rows, plan.mixing.matrix)
    assert rejected(rows, block_matrix(plan.mixing.matrix, cut - 1))


@pytest.mark.statistical
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    "counts", [(1, 11), (3, 1, 8), (6, 6), (2, 2, 2, 2, 4), (5, 0, 7)], ids=str
)
def test_with_its_keys_a_run_goes_on_in_the_same_block(
    path: Path, counts: tuple[int, ...], memory: str, entropy: None
) -> None:
    # Every session draws with a root of its own, so the noise is another than without a stop: its
    # covariance is the same.
    plan, keys, made = plan_of(seed=None, memory=memory), path.with_name("keys"), []
    for count in counts:
        with plan.start(path, keys) as run:
            made += of_run(run, count, ENTRIES)
    assert blocks_in(path) == [0]
    rows = rows_of(made)
    assert not rejected(rows, plan.mixing.matrix)
    assert rejected(rows, block_matrix(plan.mixing.matrix, counts[0]))


def test_a_restored_copy_of_a_run_draws_other_noise(tmp_path: Path) -> None:
    # Two sums with the same noise would give away their difference.
    plan = plan_of(seed=None)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with plan.start(tmp_path / "one" / "ledger.jsonl", tmp_path / "one" / "keys") as run:
        of_run(run, 5)
    for file in (tmp_path / "one").iterdir():
        shutil.copy(
            file, tmp_path / "other"
        )  # with its mode: keys that others may read are refused
    gone_on = []
    for name in ("one", "other"):
        with plan.start(tmp_path / name / "ledger.jsonl", tmp_path / name / "keys") as run:
            gone_on.append(rows_of(of_run(run, 4)))
    assert (gone_on[0] != gone_on[1]).all()


def test_keys_are_for_their_owner_alone_one_a_session(path: Path) -> None:
    plan, keys = plan_of(seed=None), path.with_name("keys")
    for count, firsts in ((2, [0]), (0, [0, 2]), (3, [0, 2]), (1, [0, 2, 5])):
        with plan.start(path, keys) as run:
            of_run(run, count)
        assert stat.S_IMODE(keys.stat().st_mode) == 0o600
        ring = read_secrets(keys).ring
        assert [session.step for session in ring.sessions] == firsts
        assert len({session.root.root for session in ring.sessions}) == len(firsts)
    assert [ring.key_of(t) for t in range(7)] == [
        ring.sessions[i].root for i in (0, 0, 1, 1, 1, 2, 2)
    ]
    for text in (path.read_text(), *(repr(x) for x in (run, ring))):
        assert not any(
            s.root.root.hex() in text or repr(s.root.root) in text for s in ring.sessions
        )


def test_keys_are_written_only_where_they_are_of_use(path: Path) -> None:
    keys = path.with_name("keys")
    for changes in ({"seed": 5}, {"seed": None, "bands": 1}):
        with plan_of(**changes).start(path.with_name(f"{changes['seed']}.jsonl"), keys) as run:
            of_run(run, 1)
        assert not keys.exists()


def test_keys_of_another_run_are_not_taken_for_this_ones(path: Path) -> None:
    plan, keys = plan_of(seed=None), path.with_name("keys")
    with plan.start(path.with_name("another.jsonl"), keys) as run:
        of_run(run, 4)
    kept = keys.read_bytes()
    # Or they are this run's, and its ledger is lost: that cannot be told.
    with pytest.raises(ValueError, match=r"keys=.* is there, but no ledger of its run"):
        plan.start(path, keys)
    assert keys.read_bytes() == kept and not path.exists()


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{}\n",
        '{"seed": null}\n',
        '{"seed": null, "sessions": [{"step": 0, "root": "xyz"}]}',
        '{"seed": 0.5, "sessions": []}',
        "[1]\n",
        "no json\n",
    ],
)
def test_damaged_keys_are_refused_or_begin_a_new_block(path: Path, damage: str) -> None:
    plan, keys = plan_of(seed=None), path.with_name("keys")
    with plan.start(path, keys) as run:
        of_run(run, 4)
    keys.write_text(damage)
    with pytest.raises(
        ValueError, match=r"keys=.* is damaged .*; remove it: the noise then begins a new block"
    ):
        plan.start(path, keys)
    keys.unlink()
    with plan.start(path, keys) as run:  # the refusal left the ledger free
        noisy = of_run(run, 1)[0]
    assert blocks_in(path) == [0, 4]
    assert not noisy.mixing_row[:4].any()


@pytest.mark.statistical
@pytest.mark.parametrize(
    "sessions",
    [
        [(5, False), (5, False)],
        [(None, True), (None, True), (None, True)],
        [(None, False), (None, False)],
        [(5, False), (None, True), (None, True)],
        [(None, True), (6, True)],
        [(None, True), (None, False), (None, True)],
    ],
    ids=str,
)
def test_what_releases_say_of_their_noise_holds_after_stops(
    path: Path, sessions: list[tuple[int | None, bool]], entropy: None
) -> None:
    """Sessions are (seed, whether the file of keys is passed). "Otherwise it begins anew": also
    where the seed or the keys are not those of the block.
    """
    made = []
    for seed, kept in sessions:
        with plan_of(seed=seed).start(path, path.with_name("keys") if kept else None) as run:
            made += of_run(run, PLAN_STEPS // len(sessions), ENTRIES)
    said = np.stack(
        [np.pad(noisy.mixing_row, (0, PLAN_STEPS - noisy.mixing_row.size)) for noisy in made]
    )
    assert not rejected(rows_of(made), np.linalg.inv(said))


@pytest.mark.statistical
def test_an_older_copy_of_the_keys_begins_a_new_block(path: Path, entropy: None) -> None:
    # Restored from a backup, say. Replaying a session's steps with draws that were never released
    # would show earlier draws a second time: squared columns up to 1.1.
    plan, keys, made = plan_of(seed=None), path.with_name("keys"), []
    for count in (5, 3, 4):
        with plan.start(path, keys) as run:
            made += of_run(run, count, ENTRIES)
        kept = read_secrets(keys)
        write_secrets(Secrets(kept.seed, KeyRing(kept.ring.sessions[:1])), keys)
    said = np.stack(
        [np.pad(noisy.mixing_row, (0, PLAN_STEPS - noisy.mixing_row.size)) for noisy in made]
    )
    assert not rejected(rows_of(made), np.linalg.inv(said))


def test_another_matrix_begins_a_new_block(path: Path) -> None:
    # Its rows would refer to rows that were made by the first matrix.
    one, other = (
        mixing_matrix(w, PLAN_BANDS) for w in (PrefixSums(PLAN_STEPS), PrefixSums(PLAN_STEPS, 0.9))
    )
    with plan_of(mixing=one).start(path) as run:
        of_run(run, 5)
    with plan_of(mixing=other).start(path) as run:
        noisy = of_run(run, 1)[0]
    assert blocks_in(path) == [0, 5]
    assert not noisy.mixing_row[:5].any() and noisy.mixing_row[5] == pytest.approx(
        1 / other.matrix[5, 5]
    )
    with plan_of(mixing=other).start(path) as run:  # and goes on with that one
        noisy = of_run(run, 1)[0]
    assert blocks_in(path) == [0, 5]
    assert noisy.mixing_row[5] != 0


def test_a_release_whose_line_was_cut_off_is_counted_and_the_noise_goes_on(path: Path) -> None:
    expected = release(plan_of().start(), PLAN_STEPS)
    with plan_of().start(path) as run:
        release(run, 5)
    path.write_bytes(path.read_bytes()[:-3])
    with plan_of().start(path) as run:
        assert run.released == 5
        rest = release(run, PLAN_STEPS - 5)
    assert all(torch.equal(a, b) for a, b in zip(expected[5:], rest, strict=True))


def test_a_run_goes_on_after_a_draw_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    # As independent noise does (tests/test_ledger.py): the failed release is counted, its noise is
    # skipped.
    expected = release(plan_of().start(), 6)
    run = plan_of().start()
    release(run, 3)

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(GaussianNoise, "update", out_of_memory)
        with pytest.raises(MemoryError):
            release(run, 1)
    assert run.released == 4
    assert all(torch.equal(a, b) for a, b in zip(expected[4:], release(run, 2), strict=True))


# Soundness of blocks


@given(
    steps=st.integers(1, 25),
    bands=st.integers(1, 25),
    cuts=st.lists(st.integers(1, 24), max_size=4),
    seed=st.integers(0, 10**6),
)
def test_whatever_the_cuts_the_noise_is_that_of_a_banded_matrix_with_columns_of_norm_at_most_one(
    steps: int, bands: int, cuts: list[int], seed: int
) -> None:
    bands = min(bands, steps)
    matrix = random_mixing(steps, bands, seed)
    starts = [0, *sorted({c for c in cuts if c < steps}), steps]
    rows = np.zeros((steps, steps))
    for since, stop in pairwise(starts):
        for t, noisy in enumerate(
            releases(GaussianNoise(1.0, matrix), zero_sum(), range(since, stop), since=since), since
        ):
            rows[t, : t + 1] = noisy.mixing_row
    run = np.linalg.inv(rows)  # the matrix that the released noise has been solved with
    np.testing.assert_allclose(run, block_matrix(matrix.dense(), *starts[1:-1]), rtol=0, atol=1e-7)
    assert (np.linalg.norm(run, axis=0) <= 1 + 1e-7).all()
    np.testing.assert_allclose(np.tril(run, -bands), 0, rtol=0, atol=1e-7)


def test_a_replayed_history_is_the_one_that_was_lost() -> None:
    for memory in MEMORIES:
        noise = GaussianNoise(SIGMA, mixing(), memory)
        for since in (0, 3):
            history = noise.init(since)
            for t in range(since, 20):
                again = noise.replay(zero_sum().gradients, lambda _: KEY, since, t)
                assert (again.step, again.since) == (history.step, history.since)
                assert len(again.rows) == len(history.rows)
                assert all(torch.equal(a["w"], b["w"]) for a, b in zip(again.rows, history.rows))
                for a, b in zip(again.coefficients, history.coefficients, strict=True):
                    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
                _, history = noise.update(zero_sum(), lambda _: KEY, history)


@pytest.mark.parametrize("memory", MEMORIES)
def test_noise_of_other_parameters_is_not_carried_over(memory: str) -> None:
    """Before: the one row of a layer that grew from one class to five was in all five."""
    run = plan_of(memory=memory).start()
    shapes = [(1, 40), (5, 40), (5, 40), (1, 40)]
    made = []
    for indices, shape in zip(run.batches(), shapes):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gradients = {"w": torch.zeros(len(indices), *shape)}
            made.append(run.release(run.contribution(gradients, len(indices))))
        assert [("not correlated with the steps before" in str(w.message)) for w in caught] == (
            [True] if len(made) in (2, 4) else []
        )
    rows = [noisy.mixing_row for noisy in made]
    assert [int(np.count_nonzero(row)) for row in rows] == [1, 1, 2, 1]


@pytest.mark.parametrize("memory", MEMORIES)
def test_another_parameter_of_the_same_shape_begins_a_new_block(memory: str) -> None:
    """Mutant: its noise was said to be correlated with rows that were never released."""
    run, made = plan_of(memory=memory).start(), []
    for indices, name in zip(run.batches(), ("a", "b", "b")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = torch.zeros(len(indices), 3)
            made.append(run.release(run.contribution({name: rows}, len(indices))))
    assert [int(np.count_nonzero(noisy.mixing_row)) for noisy in made] == [1, 1, 2]


def test_parameters_that_are_frozen_for_a_step_begin_a_new_block(tmp_path) -> None:
    """Before: KeyError, after the release was counted."""
    run = plan_of().start(tmp_path / "ledger.jsonl")
    for names in (("a", "b"), ("b",), ("a", "b"), ("a", "b")):
        indices = next(run.batches())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gradients = {name: torch.zeros(len(indices), 3) for name in names}
            run.release(run.contribution(gradients, len(indices)))
    assert run.released == 4
