"""``quietgrad train`` on several processes: as torchrun starts them, stopped, and gone on with by
another number.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing

from quietgrad import cli
from quietgrad.cli import training
from quietgrad.cli.beside import launch
from quietgrad.distributed.together import Together
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.distributed
STEPS = 6


def table(path: Path) -> Path:
    """A table whose last column follows from its first."""
    draws = np.random.default_rng(1)
    lines = ["age,hours,income"]
    for i in range(400):
        age = draws.integers(18, 80)
        lines.append(f"{age},{draws.integers(10, 60)}.{i},{'high' if age > 45 else 'low'}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def command(folder: Path, *more: str, **changes: object) -> list[str]:
    settings: dict[str, object] = {
        "model.name": "table:mlp",
        "model.tune": "full",
        "data.source": str(folder / "people.csv"),
        "data.label": "income",
        "data.public": True,
        "privacy.noise_multiplier": 0.6,
        "training.expected_batch_size": 60,
        "training.steps": STEPS,
        "training.eval_every": 0,
        "training.checkpoint_every": 1,
        "training.seed": 5,
        "training.precision": "float32",
        "training.averaging": 0.9,
        "training.run_dir": str(folder / "run"),
        "optimizer.learning_rate": 2e-2,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    sets = [f"{name}={value if value is not True else 'true'}" for name, value in settings.items()]
    return ["train", *(word for one in sets for word in ("--set", one)), *more]


def run_command(rank: int, size: int, port: int, words: list[str], stop_at: int | None) -> None:
    """One process of torchrun's, in its environment; ``stop_at``: Ctrl-C after that step, on the
    last rank alone.
    """
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    from quietgrad.cli import main
    from quietgrad.training import runner

    if stop_at is not None and rank == size - 1:
        step = runner._Loop.step

        def stopping(self: object, number: int, *arguments: object) -> None:
            step(self, number, *arguments)  # type: ignore[arg-type]
            if number + 1 == stop_at:
                os.kill(os.getpid(), 2)

        runner._Loop.step = stopping  # type: ignore[method-assign,assignment]
    log = open(Path(words[words.index("--log") + 1]).with_suffix(f".{rank}"), "w")  # noqa: SIM115
    sys.stdout = sys.stderr = log
    sys.argv = ["quietgrad", *words[: words.index("--log")]]
    code: object = 1
    try:
        main()
    except SystemExit as left:
        code = left.code
    log.write(f"\nleft with {code}\n")
    log.close()
    os._exit(0)


def on_processes(
    folder: Path, size: int, *more: str, stop_at: int | None = None, **changes: object
) -> list[str]:
    """What each process has written."""
    return started(folder, size, command(folder, *more, **changes), stop_at)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def started(folder: Path, size: int, words: list[str], stop_at: int | None = None) -> list[str]:
    """The same of the words of a command."""
    port = free_port()
    log = folder / f"log of {size}"
    words = [*words, "--log", str(log)]
    multiprocessing.start_processes(
        run_command, (size, port, words, stop_at), nprocs=size, start_method="fork"
    )
    return [log.with_suffix(f".{rank}").read_text() for rank in range(size)]


def test_a_run_of_two_processes_stops_and_goes_on_with_one(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    first, second = on_processes(tmp_path, 2, stop_at=2)
    assert "stopped after step 2" in first and "left with 130" in first, first
    assert "left with" in second and "step" not in second, second
    run = tmp_path / "run"
    assert read_ledger(run / "ledger.jsonl").releases == 2
    (alone,) = on_processes(tmp_path, 1, "--resume")
    assert "left with 0" in alone, alone
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == STEPS and read_ledger(run / "ledger.jsonl").releases == STEPS


def test_two_processes_end_with_one_run_directory_and_one_result(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    first, second = on_processes(tmp_path, 2, "--json")
    assert "left with 0" in first and "left with 0" in second, (first, second)
    assert "epsilon" in first and "epsilon" not in second
    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == STEPS
    (tmp_path / "alone").mkdir()
    table(tmp_path / "alone" / "people.csv")
    on_processes(tmp_path / "alone", 1)
    # The seed is public: the same batches and noise, and sums that differ by rounding.
    torch.testing.assert_close(
        _weights(run), _weights(tmp_path / "alone" / "run"), rtol=0, atol=1e-4
    )


def _weights(run: Path) -> torch.Tensor:
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    return torch.cat([value.reshape(-1) for value in state["trainable"].values()])


def test_weights_that_begin_at_random_begin_alike_without_a_seed(tmp_path: Path) -> None:
    """Every process would draw its own from the operating system, and the first release would find
    that they differ.
    """
    table(tmp_path / "people.csv")
    words = command(tmp_path)
    at = words.index("training.seed=5")
    left = words[: at - 1] + words[at + 1 :]
    for told in started(tmp_path, 2, left):
        assert "left with 0" in told, told
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").releases == STEPS


def test_what_several_processes_do_not_do_is_refused(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    for changes, text in (
        ({"privacy__enabled": "false"}, "privacy.enabled=false on several processes"),
        ({"training__run_dir": ""}, "training.run_dir is not set"),
    ):
        for told in on_processes(tmp_path, 2, **changes):
            assert text in told and "left with 2" in told, told


@pytest.fixture
def ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that fails is not ended before its log is written."""
    monkeypatch.setattr(cli, "_leave_others", lambda error: None)


@pytest.mark.usefixtures("ends_in_words")
def test_what_the_first_process_alone_sees_is_told_by_all(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    (tmp_path / "file").write_text("no directory")
    first, second = on_processes(tmp_path, 2, training__run_dir=tmp_path / "file")
    for told in (first, second):
        assert "training.run_dir" in told and "left with 2" in told, told
        assert "gloo" not in told and "lost" not in told


@pytest.mark.usefixtures("ends_in_words")
def test_what_another_process_alone_sees_is_told_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "people.csv")
    prepare = training.prepare_shown

    def prepared(*given: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise ValueError("data.source is not on this machine")
        return prepare(*given)

    monkeypatch.setattr(training, "prepare_shown", prepared)
    first, second = on_processes(tmp_path, 2)
    assert "rank 1 could not prepare the run: data.source is not on this machine" in first
    assert "data.source is not on this machine" in second and "rank 1" not in second
    assert "left with 2" in first and "left with 2" in second
    assert not (tmp_path / "run").exists()  # as it was


@pytest.mark.usefixtures("ends_in_words")
def test_a_process_that_ends_between_two_steps_is_missed_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(tmp_path / "people.csv")
    asked = Together.any_of

    def ended(self: Together, flag: bool) -> bool:
        if self.rank == 1:
            os._exit(0)
        return asked(self, flag)

    monkeypatch.setattr(Together, "any_of", ended)
    monkeypatch.setattr(training, "_resumes", lambda *_: False)  # asks too
    port = free_port()
    log = tmp_path / "log"
    words = [*command(tmp_path), "--log", str(log)]
    multiprocessing.start_processes(
        run_command, (2, port, words, None), nprocs=2, start_method="fork"
    )
    *_, last, _, left = log.with_suffix(".0").read_text().splitlines()
    assert left == "left with 1" and last.startswith("error: another process failed, ended"), last
    assert "gloo" not in last and last.endswith("(a private run goes on from its ledger)")


def other_settings(rank: int, size: int, port: int, words: list[str]) -> None:
    """The second process reads another learning rate."""
    own = ["optimizer.learning_rate=0.03" if "learning_rate" in w else w for w in words]
    run_command(rank, size, port, own if rank else words, None)


@pytest.mark.usefixtures("ends_in_words")
def test_processes_with_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    table(tmp_path / "people.csv")
    log = tmp_path / "log"
    words = [*command(tmp_path), "--log", str(log)]
    multiprocessing.start_processes(
        other_settings, (2, free_port(), words), nprocs=2, start_method="fork"
    )
    for rank in range(2):
        told = log.with_suffix(f".{rank}").read_text()
        assert "ranks 0 and 1 differ in optimizer.learning_rate: start every process" in told, told
        assert "left with 1" in told
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_the_launcher_gets_the_command_without_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(launch.os, "execv", lambda program, words: started.append(words))
    for given in (["train", "--nproc", "2", "a.toml"], ["train", "--nproc=2", "a.toml"]):
        launch.start_processes(2, given)
    for words in started:
        where = words.index("quietgrad")
        assert words[where + 1 : where + 3] == ["train", "a.toml"]
        assert words[-2] == "--set" and words[-1].startswith("training.run_dir=runs/")
        assert "--nproc-per-node=2" in words[:where] and "--standalone" in words
    with pytest.raises(ValueError, match="--nproc=0"):
        launch.start_processes(0, ["train"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="in a process that a launcher started"):
        launch.start_processes(2, ["train"])
