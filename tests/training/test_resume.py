"""Stops and resumes: a stop costs nothing but time, every release is counted once, and no resume
gets round the ledger.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import crash_at, interrupt_at, train, weights

from quietgrad.ledger import LedgerWriter, read_ledger
from quietgrad.ledger.chain import count_path
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.runner import Progress


@pytest.mark.grid(2, "ways to train that share the resume")
@pytest.mark.parametrize(("optimizer", "averaging"), [("sgd", 0.0), ("adamw", 0.0), ("sgd", 0.9)])
def test_interrupted_and_resumed_equals_uninterrupted(
    optimizer: str, averaging: float, settings
) -> None:
    values = settings | {
        "training.seed": 3, "data.public": True, "optimizer.name": optimizer,
        "training.steps": 7, "model.dropout": 0.1, "training.averaging": averaging,
        **({"optimizer.momentum": 0.9} if optimizer == "sgd" else {}),
    }  # fmt: skip
    whole, _, _ = train(values | {"training.run_dir": settings["training.run_dir"] + "-whole"})
    _, first, run_dir = train(values, report=interrupt_at(3))
    assert first.interrupted and first.result["steps"] == 3
    assert read_ledger(run_dir.path).releases == 3
    assert first.result["epsilon"] < whole.plan.epsilon
    prepared, second, _ = train(values, resume=True)
    assert not second.interrupted and second.result["steps"] == 7
    assert second.result["epsilon"] == whole.plan.epsilon <= 4.0
    assert read_ledger(run_dir.path).releases == 7
    expected = weights(whole)
    assert all(torch.equal(p, expected[name]) for name, p in weights(prepared).items())
    assert [m["step"] for m in run_dir.read_metrics()] == [3, 6, 7]


def test_signal_handlers_are_put_back(settings) -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    train(settings | {"training.steps": 2}, report=interrupt_at(1))
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_releases_beyond_the_checkpoint_are_spent_and_not_made_up_for(settings) -> None:
    values = settings | {"training.steps": 8, "training.checkpoint_every": 3}
    with pytest.raises(OSError, match="went away"):
        train(values, report=crash_at(5))  # checkpoint at 3, ledger at 5
    run_dir = RunDir(Path(settings["training.run_dir"]))
    assert read_ledger(run_dir.path).releases == 5
    seen: list[int] = []
    said: list[str] = []
    _, outcome, _ = train(
        values, True, report=lambda progress: seen.append(progress.step), say=said.append
    )
    assert seen == [6, 7, 8]
    assert said == [
        "the checkpoint is of step 3: the updates of 2 releases after it are lost, and stay spent"
    ]
    assert read_ledger(run_dir.path).releases == 8
    assert outcome.result["epsilon"] <= 4.0


def test_crash_before_the_first_checkpoint(settings) -> None:
    with pytest.raises(OSError, match="went away"):
        train(settings, report=crash_at(2))
    said: list[str] = []
    _, outcome, run_dir = train(settings, resume=True, say=said.append)
    assert said[0].startswith("there is no checkpoint: the updates of 2 releases")
    assert read_ledger(run_dir.path).releases == 6
    assert outcome.result["epsilon"] <= 4.0


def test_finished_run_resumes_to_its_own_result(settings) -> None:
    _, first, run_dir = train(settings)
    _, second, _ = train(settings, resume=True)
    assert (
        second.result["epsilon"] == first.result["epsilon"]
        and second.result["metrics"] == first.result["metrics"]
    )
    assert read_ledger(run_dir.path).releases == 6


def test_a_resume_with_other_labels_is_refused(settings) -> None:
    _, _, run_dir = train(settings, report=interrupt_at(3))
    file = Path(settings["data.source"])
    texts = file.read_text(encoding="utf-8")
    file.write_text(texts.replace(",good", ",fine"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"other labels by now.*put the data back as they were"):
        train(settings, resume=True)
    assert read_ledger(run_dir.path).releases == 3
    file.write_text(texts, encoding="utf-8")
    assert train(settings, resume=True)[1].result["steps"] == 6


@pytest.mark.parametrize("first", [True, False], ids=["private-then-not", "not-then-private"])
def test_privacy_is_not_switched_on_a_resume(first: bool, settings) -> None:
    # Otherwise the ledger's epsilon would stand beside weights that saw the data without noise.
    _, outcome, _ = train(settings | {"privacy.enabled": first}, report=interrupt_at(3))
    assert outcome.interrupted
    with pytest.raises(ValueError, match="resume"):
        train(settings | {"privacy.enabled": not first}, resume=True)


@pytest.mark.parametrize("left", [0, 1, 3], ids=["no-ledger", "no-releases", "fewer-releases"])
def test_resume_without_the_ledger_of_its_checkpoint_is_refused(left: int, settings) -> None:
    # The checkpoint says that five noisy sums were used; a ledger that says less would undercount.
    _, outcome, run_dir = train(settings, report=interrupt_at(5))
    assert outcome.interrupted
    lines = run_dir.ledger.read_bytes().splitlines(keepends=True)
    if left:
        run_dir.ledger.write_bytes(b"".join(lines[:left]))
    else:
        run_dir.ledger.unlink()
    with pytest.raises(ValueError, match="ledger"):
        train(settings, resume=True)


@pytest.mark.parametrize("older", [4, 1])
def test_a_ledger_and_its_count_of_before_the_checkpoint_are_refused(older: int, settings) -> None:
    """Nothing of the two files shows it: the releases since would be made once more, uncounted."""
    private = settings | {"model.tune": "head", "training.eval_every": 0}
    run_dir, held = RunDir(Path(settings["training.run_dir"])), {}

    def report(progress: Progress) -> None:
        if progress.step == older:
            for file in (run_dir.ledger, count_path(run_dir.ledger)):
                held[file] = file.read_bytes()
        interrupt_at(5)(progress)

    train(private, report=report)
    for file, contents in held.items():
        file.write_bytes(contents)
    with pytest.raises(ValueError, match=f"is at step 5, but the ledger counts {older} releases"):
        train(private, resume=True)
    assert read_ledger(run_dir.path).releases == older


def test_a_checkpoint_of_a_copy_that_went_on_by_itself_is_refused(settings) -> None:
    # Its weights saw releases that the other copy's ledger does not count.
    _, _, run_dir = train(settings, report=interrupt_at(2))
    copy = Path(settings["training.run_dir"] + "-copy")
    shutil.copytree(run_dir.path, copy)
    train(settings, resume=True, report=interrupt_at(4))
    of_copy = settings | {"training.run_dir": str(copy)}
    _, _, other = train(of_copy, resume=True, report=interrupt_at(4))
    own = other.checkpoint.read_bytes()
    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        shutil.copy(run_dir.path / name, copy / name)
    ledger = other.ledger.read_bytes()
    with pytest.raises(ValueError, match="other releases than the ledger counts"):
        train(of_copy, resume=True)
    assert other.ledger.read_bytes() == ledger
    other.checkpoint.write_bytes(own)
    assert train(of_copy, resume=True)[1].result["steps"] == 6


def test_without_the_starts_its_releases_go_uncounted(settings) -> None:
    _, _, run_dir = train(settings, report=interrupt_at(2))
    copy = Path(settings["training.run_dir"] + "-copy")
    shutil.copytree(run_dir.path, copy)
    train(settings, resume=True, report=interrupt_at(4))
    of_copy = settings | {"training.run_dir": str(copy)}
    _, _, other = train(of_copy, resume=True, report=interrupt_at(4))
    state = torch.load(run_dir.checkpoint, weights_only=True)
    del state["starts"]
    torch.save(state, other.checkpoint)
    seen: list[int] = []
    train(of_copy, resume=True, report=lambda progress: seen.append(progress.step))
    # Two common ones, two of the first, and these two; the two of the copy's own are not in them.
    assert seen == [5, 6] and read_ledger(copy).releases == 6


def test_a_run_that_gave_up_its_privacy_is_not_gone_on_with(settings) -> None:
    """Before: its result, and its saved model and card, said the plan's epsilon."""
    private = settings | {"model.tune": "head", "training.eval_every": 0}
    _, outcome, run_dir = train(private, report=interrupt_at(3))
    with LedgerWriter(run_dir.ledger, resume=True) as ledger:
        ledger.not_private("a look inside")
    before = run_dir.ledger.read_bytes()
    with pytest.raises(
        ValueError, match=r"gave up its privacy \(a look inside\).*new run directory"
    ):
        train(private, resume=True)
    assert outcome.interrupted and run_dir.ledger.read_bytes() == before
    assert not run_dir.result.exists() and not run_dir.model.exists()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from quietgrad.cli import main; main()", *map(str, arguments)]


def test_a_resume_that_is_refused_counts_no_start(settings) -> None:
    values = settings | {"training.checkpoint_every": 2}
    _, _, run_dir = train(values, report=interrupt_at(3))
    kept, ledger = run_dir.checkpoint.read_bytes(), run_dir.ledger.read_bytes()
    state = torch.load(run_dir.checkpoint, weights_only=True)
    other = {name: value[..., :1] for name, value in state["trainable"].items()}
    for changes, refused in (
        ({"trainable": other}, "resume with a changed model"),
        ({"step": 4}, "is at step 4, but the ledger counts 3 releases"),
    ):
        torch.save({**state, **changes}, run_dir.checkpoint)
        with pytest.raises(ValueError, match=refused):
            train(values, resume=True)
        assert run_dir.ledger.read_bytes() == ledger
    run_dir.checkpoint.write_bytes(kept)
    assert train(values, resume=True)[1].result["steps"] == 6


def test_ctrl_c_on_the_command_line_and_resume(settings, write_config, quietgrad) -> None:
    values = settings | {
        "training.steps": 120,
        "training.eval_every": 0,
        "training.checkpoint_every": 1000,
        "model.tune": "head",
    }
    config, folder = write_config(values), Path(settings["training.run_dir"])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command("train", config, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 240  # a busy machine imports torch for a minute
    try:
        while (
            not (folder / "ledger.jsonl").exists()
            or (folder / "ledger.jsonl").read_bytes().count(b"\n") < 5
        ):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=240)
    finally:
        child.kill()  # nothing, where it has ended
    assert child.returncode == 130, err
    stopped = json.loads(out)
    assert stopped["interrupted"] and stopped["epsilon"] < 4.0
    assert read_ledger(folder).releases == stopped["steps"] < 120
    assert "--resume" in err.splitlines()[-1]

    # As the message says: without CONFIG, from the run directory's own.
    code, out, _ = quietgrad("train", "--resume", "--set", f"training.run_dir={folder}", "--json")
    result = json.loads(out)
    assert code == 0 and result["steps"] == 120
    assert read_ledger(folder).releases == 120
    assert result["epsilon"] <= 4.0
    code, out, _ = quietgrad("epsilon", "--ledger", folder, "--json")
    assert math.isclose(json.loads(out)["epsilon"], result["epsilon"], rel_tol=1e-12)
