"""No noise is drawn twice, whatever was restored, and secret roots stay secret."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from plans import changed

from attacks.ledgers import BANDED, CONFIG, LARGE, SEED, made, plan_of, release
from quietgrad import PrivacyConfig
from quietgrad.checks import SettingsWarning
from quietgrad.keyring import Session, forget_secrets, read_secrets, rows_path
from quietgrad.ledger import read_ledger
from quietgrad.ledger.chain import count_path
from quietgrad.noise import GaussianNoise
from quietgrad.plan import seeds, starting
from quietgrad.randomness import RandomKey

# Seeds


def rolled_back(path: Path, tmp_path: Path) -> Path:
    """A copy of the ledger and its count as they are now."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in (path, count_path(path)):
        shutil.copy(file, folder / file.name)
    return folder / path.name


def differences(
    path: Path, tmp_path: Path, forget: Callable[[], None], seed: str | None
) -> tuple[float, float]:
    """What two releases of one step from one state of the ledger say of the data: their difference
    in an entry that differs by 0.5, and in one that does not.
    """
    made(path, 3, LARGE, seed=seed)
    copy = rolled_back(path, tmp_path)
    found = []
    for where, value in ((path, 0.5), (copy, 0.0)):
        forget()
        with plan_of(LARGE, seed=seed).start(where) as run:
            found.append(release(run, value))
    gap = found[0] - found[1]
    return float(gap[0]), float(gap[1])


@pytest.mark.parametrize("seed", [None, SEED], ids=["no seed", "seed"])
def test_no_resume_draws_the_noise_of_another(
    seed: str | None, path: Path, tmp_path: Path, another_process: Callable[[], None]
) -> None:
    # Before: with a seed, a run that was rolled back, copied or resumed twice drew the same noise
    # on other data, and the difference of its releases was the data.
    with_data, without = differences(path, tmp_path, another_process, seed)
    assert without != 0.0 and abs(with_data - 0.5) > 1e-5


def test_with_one_root_for_all_sessions_the_difference_is_the_data(
    path: Path, tmp_path: Path, another_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def same(step: int, seed: str, public: bool) -> Session:
        return Session(step, "same", seeds.key_of_seed(seed), "seed")

    monkeypatch.setattr(starting, "new_session", same)
    with_data, without = differences(path, tmp_path, another_process, SEED)
    assert without == 0.0 and with_data == pytest.approx(0.5, abs=1e-6)


def test_two_starts_with_one_seed_draw_different_noise(
    tmp_path: Path, another_process: Callable[[], None]
) -> None:
    # In one process the second is refused. What cannot be seen, another process or another machine,
    # is harmless: the root follows from the seed and the start's random name.
    found = []
    for name in ("one", "two"):
        another_process()
        found.append(torch.cat(made(tmp_path / name / "ledger.jsonl", seed=SEED)))
    assert not (found[0] == found[1]).any()
    with pytest.raises(ValueError, match="this seed has started a run already"):
        made(tmp_path / "three" / "ledger.jsonl", seed=SEED)
    another_process()
    with plan_of(seed=SEED).start() as run:  # nor without a ledger
        assert not (release(run) == found[0][:3]).any()


def test_public_data_and_a_seed_reproduce(tmp_path: Path) -> None:
    found = [made(tmp_path / f"{i}.jsonl", seed=3, data_are_public=True) for i in range(2)]
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_seed_and_ledger_make_all_draws_again(path: Path) -> None:
    # What a seed on private data is for: an auditor who has both can check the noise.
    noisy = made(path, 2, seed=SEED)
    (start,) = read_ledger(path).sessions
    assert (
        start.source == "seed" and read_ledger(path).seeded and read_ledger(path).header["seeded"]
    )
    key = seeds.key_of_seed(SEED, start.name)
    assert key.seal() == start.seal
    for step, released in enumerate(noisy):
        again = key.generator("noise", step, "w").standard_normal(3, dtype="float32") * 1.1
        torch.testing.assert_close(released, torch.as_tensor(again).float(), rtol=0, atol=1e-6)


def test_a_seal_says_nothing_of_its_root_but_which_it_is() -> None:
    key, other = RandomKey.from_entropy(), RandomKey.from_entropy()
    assert key.seal() == RandomKey(key.root, False).seal() != other.seal()
    assert key.root.hex() not in key.seal() and len(key.seal()) == 32


def test_a_seed_is_in_the_secret_file_alone(tmp_path: Path) -> None:
    path, keys = tmp_path / "ledger.jsonl", tmp_path / "secrets.json"
    with plan_of(seed=SEED).start(path, keys) as run:
        release(run)
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600 and read_secrets(keys).seed == SEED
    for file in (path, count_path(path)):
        text = file.read_text()
        assert SEED not in text and str(int(SEED, 16)) not in text
    assert SEED not in repr(read_secrets(keys))


def test_another_seed_or_older_keys_are_noticed(
    path: Path, another_process: Callable[[], None]
) -> None:
    # Before: with another seed the noise was "correlated" with draws that were never made, and
    # mixing_row did not say so.
    with plan_of(BANDED, seed=SEED).start(path) as run:
        release(run)
        release(run)
    another_process()
    with plan_of(BANDED, seed=SEED[::-1]).start(path) as run:
        release(run)
    assert read_ledger(path).noise_block == (2, plan_of(BANDED).noise.digest)


# The last rows of correlated noise


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Steps of which rows are made."""
    found: list[int] = []
    right = GaussianNoise._next_row

    def noting(self: GaussianNoise, like: object, key: RandomKey, history: object) -> object:
        found.append(history.step)  # type: ignore[attr-defined]
        return right(self, like, key, history)  # type: ignore[arg-type]

    monkeypatch.setattr(GaussianNoise, "_next_row", noting)
    yield found


def stopped(
    folder: Path, at: int = 5, after: int = 2, config: PrivacyConfig = BANDED
) -> tuple[Path, Path]:
    """A banded run whose rows were kept at a step, and that released more before it was killed."""
    path, keys = folder / "ledger.jsonl", folder / "secrets.json"
    with plan_of(config).start(path, keys) as run:
        for _ in range(at):
            release(run)
        run.keep_noise()
        for _ in range(after):
            release(run)
    return path, keys


@pytest.mark.parametrize("source", ["keyed", "secure"])
def test_a_resume_draws_only_the_steps_after_the_kept_rows(
    source: str, tmp_path: Path, draws: list[int]
) -> None:
    config = changed(BANDED, source=source)
    path, keys = stopped(tmp_path, config=config)
    assert stat.S_IMODE(rows_path(keys).stat().st_mode) == 0o600
    rows = []
    for kept in (True, False):
        folder = tmp_path / str(kept)
        shutil.copytree(
            tmp_path,
            folder,
            ignore=lambda where, names: [n for n in names if n in ("True", "False")],
        )
        if not kept:
            rows_path(folder / keys.name).unlink()
        draws.clear()
        with plan_of(config).start(folder / path.name, folder / keys.name) as run:
            release(run)
            assert draws == ([5, 6, 7] if kept else [0, 1, 2, 3, 4, 5, 6, 7])
            rows.append(
                run._session._history.rows[1]
            )  # of the step before: drawn by the session that was killed
    assert torch.equal(rows[0]["w"], rows[1]["w"])
    forget_secrets(keys)
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "ledger.jsonl",
        "ledger.jsonl.count",
    }


@pytest.mark.parametrize(
    "wrong",
    ["damaged", "empty", "another run's", "another matrix", "another shape", "beyond the ledger"],
)
def test_rows_that_are_not_of_this_ledger_are_not_used(
    wrong: str, tmp_path: Path, draws: list[int]
) -> None:
    path, keys = stopped(tmp_path)
    rows = rows_path(keys)
    record = torch.load(rows, weights_only=True)
    if wrong == "damaged":
        rows.write_bytes(rows.read_bytes()[:-100])
    elif wrong == "empty":
        rows.write_bytes(b"")
    elif wrong == "another run's":
        (tmp_path / "other").mkdir()
        shutil.copy(rows_path(stopped(tmp_path / "other")[1]), rows)
    else:
        change: dict[str, object] = {
            "another matrix": {"mixing": "x"},
            "another shape": {"rows": [{"w": torch.zeros(4)}] * 2},
            "beyond the ledger": {"step": 11},
        }[wrong]
        torch.save(record | change, rows)
    draws.clear()
    with plan_of(BANDED).start(path, keys) as run:
        release(run)
    assert draws == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_copy_that_went_on_by_itself_does_not_lend_its_rows(
    tmp_path: Path, draws: list[int]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    stopped(one)
    shutil.copytree(one, two)
    for folder in (one, two):
        with plan_of(BANDED).start(folder / "ledger.jsonl", folder / "secrets.json") as run:
            release(run)
            release(run)
            run.keep_noise()
    shutil.copy(rows_path(two / "secrets.json"), rows_path(one / "secrets.json"))
    draws.clear()
    with plan_of(BANDED).start(one / "ledger.jsonl", one / "secrets.json") as run:
        release(run)
    assert draws == list(range(10))


def test_nothing_is_kept_where_nothing_is_needed(tmp_path: Path) -> None:
    for name, config, keys in (
        ("independent", CONFIG, tmp_path / "keys"),
        ("regenerated", changed(BANDED, memory="regenerate"), tmp_path / "keys"),
        ("no keys", BANDED, None),
    ):
        with plan_of(config).start(tmp_path / f"{name}.jsonl", keys) as run:
            release(run)
            run.keep_noise()
        assert not list(tmp_path.glob("*.rows"))
        forget_secrets(tmp_path / "keys")


def test_a_run_that_is_over_writes_no_secret(tmp_path: Path) -> None:
    path, keys = tmp_path / "ledger.jsonl", tmp_path / "keys"
    with plan_of(BANDED).start(path, keys) as run:
        for _ in range(12):
            release(run)
    forget_secrets(keys)
    before = path.read_bytes()
    with (
        plan_of(BANDED).start(path, keys) as run,
        pytest.warns(SettingsWarning, match="made before this start"),
    ):
        assert list(run.batches()) == []
    assert path.read_bytes() == before and not keys.exists()


def test_what_the_model_draws_is_keyed_by_session_and_step(path: Path) -> None:
    # Before: checkpoints held torch's generator state, which gives away dropout masks and how many
    # records were in the batches.
    found = []
    for _ in range(2):
        with plan_of().start(path) as run:
            for _ in range(3):
                found.append(run.model_seed())
                assert run.model_seed() == found[-1] and 0 <= found[-1] < 2**63
                release(run)
    assert len(set(found)) == 6


@pytest.mark.parametrize("config", [CONFIG, BANDED], ids=["independent", "correlated"])
def test_two_copies_that_go_on_draw_other_batches_and_numbers(
    config: PrivacyConfig, tmp_path: Path
) -> None:
    """Mutant: where earlier roots are kept, coins and dropout were those of the first start."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    with plan_of(config).start(one / "ledger.jsonl", one / "keys") as run:
        release(run)
    shutil.copytree(one, two)
    drawn = []
    for folder in (one, two):
        with plan_of(config).start(folder / "ledger.jsonl", folder / "keys") as run:
            drawn.append((run.model_seed(), next(run.batches()).tolist()))
    assert drawn[0][0] != drawn[1][0] and drawn[0][1] != drawn[1][1]
