"""The contract of a run under attack: what a careless user did, and what happens now. Each attack
that a protection stops is also run with the protection off, where it has to succeed.
"""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import os
import pickle
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quietgrad import PrivacyConfig, PrivacyPlan
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.clipping import ClippedSum, Clipper, clipped_gradients
from quietgrad.clipping import bound as clipping_engine
from quietgrad.clipping.soundness.processes import refuse_launcher
from quietgrad.ledger import LedgerWriter
from quietgrad.plan import PrivateRun, plan, run
from quietgrad.plan.process import BoundToProcess
from quietgrad.plan.seeds import require_secret_seed

RECORDS = 60
CONFIG = PrivacyConfig(noise_multiplier=1.2, expected_batch_size=12, steps=8)


def plan_of(**changes: Any) -> PrivacyPlan:
    return replace(CONFIG, **changes).build(RECORDS)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(RECORDS, 5, generator=generator), torch.randint(
        0, 3, (RECORDS,), generator=generator
    )


def at(indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data()
    return x[indices], y[indices]


def opened(**changes: Any) -> tuple[PrivateRun, np.ndarray]:
    """A run with an open batch of at least two records."""
    while True:
        started = plan_of(**changes).start()
        indices = next(started.batches())
        if len(indices) > 1:
            return started, indices


# The sum of the wrong records


def three_times(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    one = private.clip(model_of(), loss, at(indices))
    return one + one + one


def a_part_twice(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    one, other = (private.clip(model_of(), loss, at(part)) for part in np.array_split(indices, 2))
    return (one + other) + one


def everybody(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.clip(model_of(), loss, data())


def four_copies(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.clip(model_of(), loss, at(np.tile(indices, 4)))


def a_part_left_out(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.clip(model_of(), loss, at(indices[1:]))


def of_another_run(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return plan_of().start().clip(model_of(), loss, at(indices))


def of_a_bare_clipper(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return private.plan.clipper.clip(model_of(), loss, at(indices))


def of_the_function(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return clipped_gradients(model_of(), loss, at(indices), 1.0)


def put_together(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    return ClippedSum(
        {"weight": torch.full((3, 5), 100.0), "bias": torch.zeros(3)}, private.plan.clipper.claim
    )


def scaled_in_place(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    for gradient in clipped.gradients.values():
        gradient *= 100
    return clipped


def replaced(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    clipped.gradients["weight"] = 100 * clipped.gradients["weight"]
    return clipped


def scaled_before_adding(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    one, other = (private.clip(model_of(), loss, at(part)) for part in np.array_split(indices, 2))
    one.gradients["weight"].mul_(100)
    return one + other


def scaled_behind_autograd(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    clipped.gradients["weight"].data.mul_(100)  # no version counts this
    return clipped


def scaled_by_numpy(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    clipped = private.clip(model_of(), loss, at(indices))
    clipped.gradients["weight"].numpy()[...] *= 100
    return clipped


def a_number_for_a_matrix(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    rest = private.clip(model_of(), loss, at(indices[1:]))
    return rest + private.contribution({name: torch.tensor(1.0) for name in rest.gradients})


def with_one_of_another_run(private: PrivateRun, indices: np.ndarray) -> ClippedSum:
    first, rest = indices[:1], indices[1:]
    return private.clip(model_of(), loss, at(first)) + plan_of().start().clip(
        model_of(), loss, at(rest)
    )


WRONG_SUMS: list[tuple[Callable[[PrivateRun, np.ndarray], ClippedSum], str]] = [
    (three_times, "cannot add a clipped sum twice"),
    (a_part_twice, "cannot add a clipped sum twice"),
    (everybody, "does not hold as many records as the open batch"),
    (four_copies, "does not hold as many records as the open batch"),
    (a_part_left_out, "does not hold as many records as the open batch"),
    (of_another_run, "was not made by this run"),
    (of_a_bare_clipper, "was not made by this run"),
    (of_the_function, "was not made by this run"),
    (put_together, "was not made by this run"),
    (scaled_in_place, "was changed after it was clipped"),
    (replaced, "was changed after it was clipped"),
    (scaled_before_adding, "was changed after it was clipped"),
    (scaled_behind_autograd, "was changed after it was clipped"),
    (scaled_by_numpy, "was changed after it was clipped"),
    (with_one_of_another_run, "of different runs or releases"),
]


@pytest.mark.parametrize(
    ("wrong", "message"), WRONG_SUMS, ids=[wrong.__name__ for wrong, _ in WRONG_SUMS]
)
def test_a_sum_of_the_wrong_records_is_not_released(
    wrong: Callable[[PrivateRun, np.ndarray], ClippedSum], message: str, tmp_path: Path
) -> None:
    private, indices = opened()
    with pytest.raises((RuntimeError, ValueError), match=message) as refused:
        private.release(wrong(private, indices))
    assert private.released == 0 and private.epsilon() == 0
    # The sizes of the batch are private, and the message could go into a log.
    assert not any(character.isdigit() for character in str(refused.value))
    private.release(private.clip(model_of(), loss, at(indices)))  # the right one still is


def test_a_contribution_of_another_shape_is_not_spread_over_a_parameter() -> None:
    # Before: a record given as a number contributed 10 C.
    private, indices = opened()
    with pytest.raises(ValueError, match=r"different shapes or types.*'weight'"):
        a_number_for_a_matrix(private, indices)


def test_a_closed_run_releases_nothing() -> None:
    private, indices = opened()
    clipped = private.clip(model_of(), loss, at(indices))
    private.close()
    with pytest.raises(RuntimeError, match="is closed"):
        private.release(clipped)
    assert private.released == 0


def test_two_threads_release_one_batch_once() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            private, indices = opened()
            sums = [private.clip(model_of(), loss, at(indices)) for _ in range(2)]
            outcomes: list[bool] = []

            def release(
                clipped: ClippedSum, private: PrivateRun = private, outcomes: list[bool] = outcomes
            ) -> None:
                with contextlib.suppress(RuntimeError):
                    private.release(clipped)
                    outcomes.append(True)

            threads = [threading.Thread(target=release, args=(s,)) for s in sums]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert outcomes == [True] and private.released == 1
    finally:
        sys.setswitchinterval(before)


def test_a_sum_of_an_earlier_release_is_not_released_again() -> None:
    private = plan_of(
        sample_rate=1.0, expected_batch_size=None
    ).start()  # every batch holds everybody: the count alone would not tell
    first = private.clip(model_of(), loss, at(next(private.batches())))
    private.release(first)
    next(private.batches())
    with pytest.raises(RuntimeError, match="was not made by this run for the batch that is open"):
        private.release(first)
    late = private.clip(model_of(), loss, data())
    with pytest.raises(ValueError, match="of different runs or releases"):
        _ = first + late


def test_a_shuffled_loader_without_batches_is_refused() -> None:
    # True epsilon 24 at a printed 1.17: every record took part in every epoch.
    private, x = plan_of().start(), torch.randperm(RECORDS)
    for step in (private.step, lambda *batch: private.release(private.clip(*batch))):
        with pytest.raises(
            RuntimeError, match=r"there is no open batch.*loop over run\.batches\(\)"
        ):
            step(model_of(), loss, at(x[:12]))
    assert private.released == 0


def test_parts_of_the_open_batch_add_up_in_any_grouping() -> None:
    private, indices = opened()
    parts = [private.clip(model_of(), loss, at(part)) for part in np.array_split(indices, 3)]
    private.release(parts[2] + (parts[0] + parts[1]))
    assert private.released == 1


def test_an_empty_batch_takes_an_empty_sum_only() -> None:
    private = plan_of(expected_batch_size=None, sample_rate=1e-9).start()
    for indices in private.batches():
        assert not len(indices)
        with pytest.raises(RuntimeError, match="as many records"):
            private.release(private.clip(model_of(), loss, at(np.arange(3))))
        private.step(model_of(), loss, at(indices))


@pytest.mark.parametrize(
    "wrong", [everybody, four_copies, scaled_in_place], ids=lambda wrong: wrong.__name__
)
def test_without_the_check_the_wrong_sum_goes_out(
    wrong: Callable[[PrivateRun, np.ndarray], ClippedSum], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mutant: what is released then moves by far more than C for one record, at an unchanged
    # epsilon.
    monkeypatch.setattr(PrivateRun, "_require_sum_of", lambda *_: None)
    private, indices = opened()
    private.release(wrong(private, indices))
    assert private.released == 1


def test_without_stamps_one_sum_is_added_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClippedSum, "_joined", lambda self, *_: self.stamp)
    private, indices = opened()
    assert float(three_times(private, indices).gradients["weight"].norm()) == pytest.approx(
        3 * float(private.clip(model_of(), loss, at(indices)).gradients["weight"].norm())
    )


# Gradients made otherwise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-42, 1e-3, 1.0, 1e4, 1e30, 3e38])
def test_contributions_are_shortened_to_c_and_never_lengthened(
    dtype: torch.dtype, size: float
) -> None:
    private, _ = opened(max_grad_norm=0.7)
    generator = torch.Generator().manual_seed(1)
    given = {
        "weight": (torch.randn(3, 5, generator=generator, dtype=torch.float64) * size).to(dtype),
        "bias": (torch.randn(3, generator=generator, dtype=torch.float64) * size).to(dtype),
        "scalar": torch.tensor(size).to(dtype),
    }
    clipped = private.contribution(given)
    length = math.sqrt(sum(float(g.double().square().sum()) for g in clipped.gradients.values()))
    assert length <= 0.7
    finite = all(bool(torch.isfinite(g).all()) for g in given.values())
    true = math.hypot(*(float(v) for g in given.values() for v in g.double().flatten()))
    assert length == pytest.approx(min(true, 0.7) if finite else 0.0, rel=2e-6, abs=1e-44)
    assert all(g.dtype in (torch.float32, torch.float64) for g in clipped.gradients.values())


def test_contributions_count_and_add_up_with_clipped_sums() -> None:
    private, indices = opened()
    canary = {"weight": torch.full((3, 5), 9.0), "bias": torch.zeros(3)}
    rest = private.clip(model_of(), loss, at(indices[1:]))
    with pytest.raises(RuntimeError, match="as many records"):
        private.release(private.clip(model_of(), loss, at(indices)) + private.contribution(canary))
    private.release(rest + private.contribution(canary))
    indices = next(private.batches())
    several = {"weight": torch.ones(len(indices), 3, 5), "bias": torch.zeros(len(indices), 3)}
    clipped = private.contribution(several, len(indices))
    assert float(clipped.gradients["weight"].norm()) == pytest.approx(len(indices), rel=1e-5)
    private.release(clipped)
    with pytest.raises(ValueError, match="does not have the number of records as first dimension"):
        private.contribution(several, len(indices) + 1)
    with pytest.raises(ValueError, match="gradients is empty"):
        private.contribution({})


def test_a_contribution_that_is_not_finite_counts_and_contributes_nothing() -> None:
    private, _ = opened()
    rows = torch.ones(4, 3)
    rows[1, 0], rows[2, 1] = math.nan, math.inf
    clipped = private.contribution({"w": rows}, 4)
    assert clipped.private.examples == 4
    torch.testing.assert_close(
        clipped.gradients["w"], 2 * torch.ones(3) / math.sqrt(3), rtol=1e-5, atol=0
    )


# Settings that contradict each other


def config_of(tmp_path: Path, text: str, *overrides: str) -> Any:
    from quietgrad.training.settings.config import load_config

    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(path, overrides)


ONE_OF = {
    ("privacy", "target_epsilon", "noise_multiplier"): (3.0, 0.05),
    ("training", "steps", "epochs"): (100, 3.0),
}


@pytest.mark.parametrize(("names", "values"), ONE_OF.items(), ids=[names[1] for names in ONE_OF])
def test_two_alternatives_are_refused_wherever_they_stand(
    names: tuple[str, str, str], values: tuple[float, float], tmp_path: Path
) -> None:
    # `--set target_epsilon=3 --set noise_multiplier=0.05` ran at epsilon 476.
    table, one, other = names
    both = rf"{table}\.{one}={values[0]} and {table}\.{other}={values[1]} are both given"
    for order in (1, -1):
        with pytest.raises(ValueError, match=both + " with --set"):
            config_of(
                tmp_path, "", *[f"{one}={values[0]}", f"{table}.{other}={values[1]}"][::order]
            )
    file = f"[{table}]\n{one} = {values[0]}\n{other} = {values[1]}\n"
    for overrides in (
        (),
        (f"{one}=7",),
        ("training.eval_every=3",),
    ):  # an override does not settle what a file says twice
        with pytest.raises(ValueError, match=both + " in the file"):
            config_of(tmp_path, file, *overrides)


@pytest.mark.parametrize(("names", "values"), ONE_OF.items(), ids=[names[1] for names in ONE_OF])
def test_an_override_takes_the_place_of_the_files_alternative(
    names: tuple[str, str, str], values: tuple[float, float], tmp_path: Path
) -> None:
    table, one, other = names
    for given, value, wanted in ((one, values[0], other), (other, values[1], one)):
        found = config_of(tmp_path, f"[{table}]\n{given} = {value}\n", f"{wanted}=5")
        assert (
            getattr(getattr(found, table), wanted) == 5
            and getattr(getattr(found, table), given) is None
        )


def test_one_setting_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--set gives training\.steps twice, as 3 and as 9"):
        config_of(tmp_path, "", "steps=3", "training.steps=9")
    assert config_of(tmp_path, "", "steps=3", "training.steps=3").training.steps == 3


def test_tables_built_by_hand_are_checked_too() -> None:
    from quietgrad.training.settings.config import TrainConfig
    from quietgrad.training.settings.tables import PrivacyTable

    with pytest.raises(ValueError, match="both given"):
        TrainConfig(privacy=PrivacyTable(target_epsilon=3.0, noise_multiplier=0.05))


@pytest.mark.parametrize("delta", [1 / RECORDS, 0.5, 0.9])
def test_no_epsilon_is_shown_for_a_delta_that_admits_publishing_records(
    delta: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quietgrad.cli import main

    with pytest.raises(ValueError, match=rf"target_delta={delta} is not below"):
        plan_of(target_delta=delta)
    ledger = tmp_path / "ledger.jsonl"
    plan_of().start(ledger).close()
    sizes = [
        "--dataset-size",
        str(RECORDS),
        "--batch-size",
        "12",
        "--steps",
        "8",
        "--delta",
        str(delta),
    ]
    for arguments in (
        ["calibrate", "--epsilon", "3", *sizes],
        ["epsilon", "--noise-multiplier", "1.2", *sizes],
        ["epsilon", "--ledger", str(ledger), "--delta", str(delta)],
    ):
        monkeypatch.setattr("sys.argv", ["quietgrad", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == 2 and not shown.out
        assert f"delta={delta} is not below 1/{RECORDS}" in shown.err


# Several processes


def meet(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    refused = []

    def attempt(what: Callable[[], Any]) -> None:
        try:
            what()
            refused.append("")
        except RuntimeError as error:
            refused.append(str(error))

    started = plan_of().start()  # before the group is there
    indices = next(started.batches())
    clipped = started.clip(model_of(), loss, at(indices))
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        attempt(lambda: plan_of().start())
        attempt(lambda: started.clip(model_of(), loss, at(indices)))
        attempt(lambda: started.contribution({"w": torch.ones(2)}))
        attempt(lambda: started.release(clipped))
        attempt(lambda: started.step(model_of(), loss, at(indices)))
        attempt(lambda: Clipper(1.0).clip(model_of(), loss, data()))
        attempt(lambda: clipped_gradients(model_of(), loss, data(), 1.0))
        wrapped = nn.parallel.DistributedDataParallel(model_of())
    finally:
        torch.distributed.destroy_process_group()
    try:
        started.clip(wrapped, loss, at(indices))
    except ValueError as error:
        refused.append(str(error))
    Path(folder, f"rank{rank}.txt").write_text("\n".join(refused) + f"\n{started.released}")


@pytest.mark.distributed
def test_every_door_is_shut_under_a_group_of_two(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(meet, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        *refused, wrapped, released = (tmp_path / f"rank{rank}.txt").read_text().splitlines()
        assert len(refused) == 7
        assert all(
            "process group of 2 ranks" in message and "one process" in message
            for message in refused
        )
        assert "DistributedDataParallel" in wrapped and released == "0"


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_is_one_process() -> None:
    private, indices = opened()
    private.step(model_of(), loss, at(indices))
    assert private.released == 1


@pytest.mark.usefixtures("group_of_one")
def test_without_the_check_two_ranks_would_both_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(RuntimeError, match="process group of 2 ranks"):
        plan_of().start()
    for module in (plan, run, clipping_engine):
        monkeypatch.setattr(module, "refuse_process_group", lambda: None)
    private, indices = opened()
    private.step(model_of(), loss, at(indices))
    assert private.released == 1


@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_one_of_several_processes_of_a_launcher_starts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun without init_process_group: every rank would train alone, on the same records.
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        RuntimeError, match=rf"{name}=2 says .*their epsilons add: run it in one process"
    ):
        plan_of().start()
    for alone in ("1", "", "many"):
        refuse_launcher({name: alone})


def test_models_spread_over_devices_are_refused() -> None:
    private, indices = opened()
    for wrapped in (nn.DataParallel(model_of()), nn.Sequential(nn.DataParallel(model_of()))):
        with pytest.raises(ValueError, match=r"is wrapped in DataParallel, .*\.module"):
            private.clip(wrapped, loss, at(indices))


# Copies of a run


def as_child(what: Callable[[], Any]) -> str:
    """What ``what`` does in a fork: the message of what it raised, or "done"."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        said = b"done"
        try:
            what()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode()
        os.write(writer, said)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        message = said.read().decode()
    os.waitpid(child, 0)
    return message


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
# torch's own threads are idle in these tests; Python warns of any thread since 3.12.
quiet_fork = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@forks
@quiet_fork
def test_a_fork_of_a_run_draws_nothing(tmp_path: Path) -> None:
    # The difference of the parent's and the child's release was the data, exactly.
    with plan_of().start(tmp_path / "ledger.jsonl") as private:
        batches = private.batches()
        indices = next(batches)
        while len(indices) < 2:
            private.step(model_of(), loss, at(indices))
            indices = next(batches)
        clipped = private.clip(model_of(), loss, at(indices))
        before = (tmp_path / "ledger.jsonl").read_bytes()
        for attempt in (
            lambda: private.release(clipped),
            lambda: private.clip(model_of(), loss, at(indices)),
            lambda: private.step(model_of(), loss, at(indices)),
            lambda: private.contribution({"w": torch.ones(2)}),
            lambda: next(private.batches()),
            lambda: private.give_up_privacy("in the child"),
        ):
            assert "RuntimeError: this run was started in another process" in as_child(attempt)
        assert (tmp_path / "ledger.jsonl").read_bytes() == before
        private.release(clipped)


@forks
@quiet_fork
def test_without_the_process_check_parent_and_child_share_their_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(BoundToProcess, "_require_own_process", lambda self: None)
    private, indices = opened()
    clipped, file = private.clip(model_of(), loss, at(indices)), tmp_path / "child.pt"
    nothing = private.contribution(
        {"weight": torch.zeros(len(indices), 3, 5), "bias": torch.zeros(len(indices), 3)},
        len(indices),
    )
    assert as_child(lambda: torch.save(private.release(nothing).gradients, file)) == "done"
    ours = private.release(clipped).gradients
    theirs = torch.load(file)
    for name, gradient in clipped.gradients.items():
        torch.testing.assert_close(
            ours[name] - theirs[name], gradient, rtol=1e-4, atol=1e-5
        )  # the data, exactly


@forks
@quiet_fork
def test_workers_that_load_records_may_be_forked_while_a_run_is_open() -> None:
    private, indices = opened()
    x, y = data()
    records = torch.utils.data.Subset(torch.utils.data.TensorDataset(x, y), indices.tolist())
    loader = torch.utils.data.DataLoader(
        records,
        batch_size=4,
        num_workers=1,
        multiprocessing_context=multiprocessing.get_context("fork"),
    )
    parts = [private.clip(model_of(), loss, (part[0], part[1])) for part in loader]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    private.release(total)
    assert private.released == 1


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "deepcopy of what holds it": lambda private: copy.deepcopy({"trainer": [private]}),
    "pickle": pickle.dumps,
    "old pickle": lambda private: pickle.dumps(private, protocol=0),
    "torch.save": lambda private: torch.save(private, os.devnull),
    "spawned process": lambda private: (
        multiprocessing.get_context("spawn").Process(target=print, args=(private,)).start()
    ),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_run_is_not_copied(way: str) -> None:
    private, indices = opened()
    with pytest.raises(
        TypeError,
        match="PrivateRun cannot be copied or pickled: the copy would draw the same noise",
    ):
        COPIES[way](private)
    private.step(model_of(), loss, at(indices))


def test_without_the_refusal_a_copy_repeats_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__copy__", "__deepcopy__", "__reduce_ex__", "__getstate__"):
        monkeypatch.delattr(BoundToProcess, name)
    private, indices = opened()
    other = copy.copy(private)
    clipped = private.clip(model_of(), loss, at(indices))
    nothing = private.contribution(
        {"weight": torch.zeros(len(indices), 3, 5), "bias": torch.zeros(len(indices), 3)},
        len(indices),
    )
    ours, theirs = private.release(clipped).gradients, other.release(nothing).gradients
    for name, gradient in clipped.gradients.items():
        torch.testing.assert_close(ours[name] - theirs[name], gradient, rtol=1e-4, atol=1e-5)


def test_secret_roots_are_not_pickled_or_copied_by_accident() -> None:
    private, _ = opened()
    for secret in (private._session.key, private._session._ring):
        with pytest.raises(TypeError, match="secret"):
            pickle.dumps(secret)
        with pytest.raises(TypeError, match="secret"):
            copy.deepcopy(secret)


def test_an_open_ledger_is_not_copied(tmp_path: Path) -> None:
    with LedgerWriter(tmp_path / "ledger.jsonl") as writer:
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                way(writer)


# Seeds


# drawn once: names of tests must not change from process to process
LONG = "4f1d8e03b7a62c95d0e4718a3bc9f256"


@pytest.mark.parametrize(
    "seed",
    [
        0,
        42,
        2**31,
        2**64,
        2**127 - 1,
        2**127,
        "2a",
        "0" * 32,
        "a" * 32,
        "deadbeef" * 3,
        f"{7:032x}",
    ],
)
def test_short_and_typed_seeds_are_refused_where_data_are_private(seed: int | str) -> None:
    with pytest.raises(
        ValueError, match=r"so it could be guessed.*secrets\.token_hex\(16\).*data_are_public"
    ) as refused:
        plan_of(seed=seed)
    assert (
        str(seed) not in str(refused.value).replace("128", "").replace("16", "")
        or len(str(seed)) < 2
    )
    plan_of(seed=seed, data_are_public=True)


@pytest.mark.parametrize(
    "seed",
    [LONG, LONG.upper(), LONG + LONG[::-1], int("9" + LONG[1:], 16), int("c" + LONG[:0:-1], 16)],
)
def test_drawn_seeds_of_128_bits_are_taken(seed: int | str) -> None:
    require_secret_seed(seed)
    assert str(seed) not in repr(plan_of(seed=seed))  # and stay out of what is printed


@pytest.mark.parametrize(
    ("seed", "error"),
    [
        ("x" * 32, ValueError),
        ("", ValueError),
        (-1, ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (b"1" * 32, TypeError),
    ],
)
def test_what_is_no_seed_is_refused(seed: Any, error: type[Exception]) -> None:
    for public in (False, True):
        with pytest.raises(error, match="seed"):
            plan_of(seed=seed, data_are_public=public)


def test_a_string_is_the_number_that_it_writes() -> None:
    number = int(LONG, 16) | 1 << 127
    first = plan_of(seed=number, data_are_public=True).start()
    second = plan_of(seed=f"{number:x}", data_are_public=True).start()
    assert np.array_equal(next(first.batches()), next(second.batches()))


def test_two_starts_with_one_seed_are_refused() -> None:
    seed = secrets.token_hex(16)
    plan_of(seed=seed).start()
    for again in (seed, seed.upper(), int(seed, 16)):
        other = {"seed": again, "noise_multiplier": 9.0}
        if isinstance(again, int) and again < 2**127:
            continue  # the number of a seed that begins with small digits is refused by itself
        with pytest.raises(ValueError, match="this seed has started a run already"):
            plan_of(**other).start()
    plan_of(seed=secrets.token_hex(16)).start()


def test_a_seeds_run_goes_on_with_its_own_ledger_only(tmp_path: Path) -> None:
    seed, ledger = secrets.token_hex(16), tmp_path / "ledger.jsonl"
    with plan_of(seed=seed).start(ledger) as private:
        private.step(model_of(), loss, at(next(private.batches())))
    with plan_of(seed=seed).start(ledger) as private:
        assert private.released == 1
        private.step(model_of(), loss, at(next(private.batches())))
    for other in (None, tmp_path / "other.jsonl"):
        with pytest.raises(ValueError, match="this seed has started a run already"):
            plan_of(seed=seed).start(other)
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(ValueError):  # the ledger's own checks may see it first
        plan_of(seed=seed).start(ledger)
    ledger.unlink()
    with pytest.raises(ValueError):
        plan_of(seed=seed).start(ledger)


def test_public_data_may_use_a_seed_again_and_the_ledger_says_so(tmp_path: Path) -> None:
    from quietgrad.ledger import read_ledger

    drawn = []
    for i in range(2):
        with plan_of(seed=1, data_are_public=True).start(tmp_path / f"{i}.jsonl") as private:
            drawn.append(next(private.batches()))
    assert np.array_equal(*drawn)
    assert read_ledger(tmp_path / "0.jsonl").header["data_declared_public"] is True
    plan_of().start(tmp_path / "2.jsonl").close()
    assert read_ledger(tmp_path / "2.jsonl").header["data_declared_public"] is False
    with pytest.raises(ValueError, match="data_declared_public"):  # a declaration is not taken back
        plan_of(seed=secrets.token_hex(16)).start(tmp_path / "0.jsonl")


# What is printed


@pytest.mark.parametrize(
    "value", [0.0, 1e-9, 0.12345, 1.00001, 1.0, 2.0, 4.99999999, 476.0312, 1e6 + 1e-7, math.inf]
)
@pytest.mark.parametrize("digits", [0, 2, 3, 4])
def test_printed_epsilons_are_never_below_the_computed_ones(value: float, digits: int) -> None:
    shown = float(round_up(value, digits))
    assert shown >= value
    assert math.isinf(value) or shown - value < 10.0**-digits * 1.0001
    assert float(round_up_to(value, 3)) >= value
    # Rounding to nearest would not do.
    assert value != 1.00001 or float(f"{value:.{digits}f}") < value


def test_a_delta_that_has_few_digits_is_printed_as_it_is() -> None:
    assert [round_up_to(v, 6) for v in (1e-5, 0.001, 0.01)] == ["1e-5", "0.001", "0.01"]
