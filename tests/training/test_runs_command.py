"""The list of runs: what each directory says of its run, unfinished and damaged ones too."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from somebody_else import kept_from, needs_users
from tiny_runs import interrupt_at, train

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon_report
from quietgrad.cli.beside.runs import Run as Listed
from quietgrad.cli.beside.runs import _cells, print_runs, run_of, runs_in
from quietgrad.ledger import read_ledger

Run = Callable[..., tuple[int, str, str]]


def listed(quietgrad: Run, folder: Path) -> dict[str, dict]:
    code, out, err = quietgrad("runs", folder, "--json")
    assert (code, err) == (0, "")
    return {run["name"]: run for run in json.loads(out)["runs"]}


def test_runs_and_what_they_have_spent(quietgrad: Run, settings, tmp_path: Path) -> None:
    def there(name: str) -> dict:
        return settings | {"training.run_dir": str(tmp_path / name), "model.tune": "head"}

    _, done, _ = train(there("done"))
    train(there("deeper/stopped"), report=interrupt_at(4))
    train(there("plain") | {"privacy.enabled": False})
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.toml").write_text("")
    found = listed(quietgrad, tmp_path)
    assert set(found) == {"done", "deeper/stopped", "plain"}
    first, stopped, plain = found["done"], found["deeper/stopped"], found["plain"]
    assert (first["status"], first["steps"], first["planned"]) == ("finished", 6, 6)
    assert first["task"] == "texts" and first["epsilon"] == done.result["epsilon"]
    assert first["score"] == done.result["metrics"]["accuracy"]
    assert (stopped["status"], stopped["steps"], stopped["planned"]) == ("unfinished", 4, 6)
    contents = read_ledger(tmp_path / "deeper" / "stopped")
    assert contents.event is not None
    spent = epsilon_report(contents.event, stopped["delta"]).epsilon
    assert stopped["epsilon"] == spent < first["epsilon"]
    assert stopped["metric"] == "validation accuracy" and 0 <= stopped["score"] <= 1
    assert not plain["private"] and plain["epsilon"] is None and plain["status"] == "finished"
    code, out, _ = quietgrad("runs", tmp_path)
    assert code == 0 and "no privacy" in out and "4/6" in out and "--resume" in out

    # A finished run with more releases than its result says is counted by its ledger.
    result = tmp_path / "done" / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"steps": 3, "epsilon": 0.1}))
    assert listed(quietgrad, tmp_path)["done"]["epsilon"] == done.result["epsilon"]
    ledger = tmp_path / "done" / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-200])
    damaged = listed(quietgrad, tmp_path)["done"]
    assert damaged["status"] == "ledger damaged" and damaged["epsilon"] is None
    # One run by itself.
    assert list(listed(quietgrad, tmp_path / "plain")) == ["plain"]


def test_a_name_is_read_where_the_table_is_narrow() -> None:
    """Before: beside columns that may not wrap it was cut to nothing, in 80 letters of a pipe."""
    row = Listed("runs/stopped", "tables", "unfinished", 53, 400, True, 0.3319, 2e-3, "add-remove",
              False, False, 0.727, "validation accuracy", 0.0)  # fmt: skip
    long = replace(row, name="deeper/" + "a-name-of-letters-" * 3, data_declared_public=True)
    for width in (80, 100):
        narrow = Console(width=width, file=io.StringIO())
        print_runs(narrow, [row, long])
        out = narrow.file.getvalue()
        assert "stopped" in out and "deeper" in out and "0.3319" in out and "0.727 val." in out
        assert all(len(line) <= width for line in out.splitlines())
    dated = replace(row, name="20261127-064343", neighbouring="add-remove-user")
    narrow = Console(width=80, file=io.StringIO())
    print_runs(narrow, [dated, row])  # the name that a run has by itself stays whole, to be copied
    assert "20261127-064343" in narrow.file.getvalue()
    wide = Console(width=200, file=io.StringIO())
    print_runs(wide, [row])
    assert "runs/stopped" in wide.file.getvalue() and "written" in wide.file.getvalue()


def test_an_epsilon_of_the_list_says_what_it_is_of(
    quietgrad: Run, settings, tmp_path: Path
) -> None:
    """Before: a number for users, one for declared data and one that adds to another's looked like
    any.
    """
    run_dir = tmp_path / "one"
    train(settings | {"training.run_dir": str(run_dir), "model.tune": "head"})
    one = listed(quietgrad, run_dir)["one"]
    assert one["neighbouring"] == "add-remove" and not one["started_from_runs"]
    public = one["data_declared_public"]
    result = run_dir / "result.json"
    kept = json.loads(result.read_text())
    result.write_text(json.dumps(kept | {"started_from": [{"private": True}]}))
    assert listed(quietgrad, run_dir)["one"]["started_from_runs"]
    row = replace(run_of(run_dir, tmp_path), neighbouring="add-remove-user")
    (told,) = [cell for cell in _cells(row) if " per user" in cell]
    assert told.endswith(" + that of its start") and ("(data public)" in told) == public
    quiet = replace(row, data_declared_public=not public, started_from_runs=False)
    assert any(("(data public)" in cell) != public for cell in _cells(quiet) if "user" in cell)


def test_no_runs(quietgrad: Run, tmp_path: Path) -> None:
    assert listed(quietgrad, tmp_path) == {}
    code, out, _ = quietgrad("runs", tmp_path)
    assert code == 0 and "no runs" in out
    code, _, err = quietgrad("runs", tmp_path / "none")
    assert code == 2 and err.startswith("error: DIR=") and err.count("\n") == 1


@pytest.mark.parametrize("module", ["runs", "check", "init"])
def test_commands_beside_runs_do_without_torch(module: str) -> None:
    code = f"import sys, quietgrad.cli.beside.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@needs_users
@pytest.mark.parametrize("what", ["", "ledger.jsonl", "config.toml", "result.json"])
def test_what_may_not_be_read_is_said(what: str, tmp_path: Path) -> None:
    # Before: a folder was left out in silence, so that the list told less than was spent; of a file
    # in it, the whole list was refused.
    plan = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.5, steps=2).build(10)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("[model]\n")
        (tmp_path / name / "result.json").write_text("{}")
        plan.start(tmp_path / name / "ledger.jsonl").close()
    assert [run.name for run in runs_in(tmp_path)[0]] == ["mine", "theirs"]
    theirs = tmp_path / "theirs"
    with kept_from(theirs / what):
        found, unread = runs_in(tmp_path)
        if what in ("", "ledger.jsonl"):
            with pytest.raises(ValueError, match=r"ledger=.*cannot be read"):
                read_ledger(theirs / "ledger.jsonl")
    assert [run.name for run in found] == ["mine"] and unread == [str(theirs)]
