"""``quietgrad compare --accounted``: the choice is paid for, and nothing else comes out."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quietgrad.accounting import RunCount, epsilon, selected_epsilon
from quietgrad.cli.progress import still
from quietgrad.cli.progress.lines import Lines
from quietgrad.comparing import accounted
from quietgrad.comparing.accounted import candidates_of, folder_of
from quietgrad.comparing.runner import ComparisonRunner
from quietgrad.comparing.table import load_comparison
from quietgrad.comparing.trials import Trials
from quietgrad.tensors import trainable_parameters
from quietgrad.training.files.provenance import EPSILONS_ADD, FILE, KEY, provenance
from quietgrad.training.files.run_dir import RunDir

Write = Callable[..., Path]
LONG_VARIANT = '[variants.long]\ntraining.steps = 6\nnoise.method = "banded"\nnoise.bands = 2'


@pytest.fixture
def write(tiny_bert: Path, csv_file: Path, tmp_path: Path) -> Write:
    """A comparison on private records: two variants of other steps and noise, two rates."""

    def written(extra: str = "", accounted: dict[str, Any] | None = None, **changed: Any) -> Path:
        tables: dict[str, dict[str, Any]] = {
            "comparison": {
                "epsilons": [6.0], "learning_rates": [1e-3, 1e-2], "protocol_rate": 1e-3,
                "seeds": 1, "tuning_seeds": 1, "reference": "baseline",
            } | changed,
            "accounted": {"mean": 4.0} | (accounted or {}),
            "variants.baseline": {},
            "model": {"name": str(tiny_bert), "lora_rank": 2, "max_length": 16},
            "data": {
                "source": str(csv_file), "validation_fraction": 0.2, "test_fraction": 0.2,
            },
            "training": {"expected_batch_size": 24, "steps": 4, "precision": "float32"},
        }  # fmt: skip
        lines = []
        for name, table in tables.items():
            lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        path = tmp_path / "comparison.toml"
        path.write_text("\n".join([*lines, LONG_VARIANT, extra]) + "\n")
        return path

    return written


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three runs are drawn; the plans that run are noted."""
    made: list[Any] = []
    fit = ComparisonRunner.fit

    def noted(self: ComparisonRunner, config: Any, plan: Any, *rest: Any, **more: Any) -> Any:
        made.append(plan)
        return fit(self, config, plan, *rest, **more)

    monkeypatch.setattr(RunCount, "draw", lambda self: 3)
    monkeypatch.setattr(ComparisonRunner, "fit", noted)
    return made


def test_the_best_run_is_released_and_nothing_else(
    quietgrad: Any, write: Write, of_three: list[Any], csv_file: Path
) -> None:
    path = write()
    code, out, err = quietgrad("compare", path, "--accounted", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert len(of_three) == 3
    assert result["epsilon"] <= 6.0 and result["epsilon"] > 5.98
    assert result["selected"]["variant"] in ("baseline", "long")
    assert result["selection"]["candidates"] == 4 and result["selection"]["mean_runs"] == 4.0
    folder = folder_of(load_comparison(path, accounted=True))
    assert {p.name for p in folder.iterdir()} == {".lock", "config.toml", "model", "result.json"}
    assert json.loads((folder / "result.json").read_text()) == result
    card = (folder / "model" / "README.md").read_text()
    assert "The best of a random number of runs (geometric, 4 on average)" in card
    assert "= (6.0" in card or "= (5.99" in card
    assert "one of 4 settings drawn at random" in card
    # A run's folder, as far as one is needed.
    assert quietgrad("predict", folder, csv_file, "--output", folder / "out.csv")[0] == 0
    code, out, _ = quietgrad("runs", folder, "--json")
    (run,) = json.loads(out)["runs"]
    assert (run["status"], run["private"], run["epsilon"]) == ("finished", True, result["epsilon"])
    # The release stands: asking again runs nothing and draws nothing.
    assert json.loads(quietgrad("compare", path, "--accounted", "--json")[1]) == result
    code, out, _ = quietgrad("compare", path, "--accounted", "--report")
    assert code == 0 and len(of_three) == 3
    assert "best setting" in out and "those that lost" in out


def test_nothing_tells_how_many_runs_there_are(
    quietgrad: Any, write: Write, of_three: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress would, and so would lines that say how long they last."""
    monkeypatch.setattr(Lines, "EVERY", 0.0)
    monkeypatch.setattr(still, "EVERY", 0.1)
    fit = ComparisonRunner.fit

    def slow(self: ComparisonRunner, *given: Any, **more: Any) -> Any:
        time.sleep(0.3)
        return fit(self, *given, **more)

    monkeypatch.setattr(ComparisonRunner, "fit", slow)
    code, out, _ = quietgrad("compare", write(), "--accounted")
    lines = [line for line in out.splitlines() if not line.startswith("still ")]
    assert code == 0 and [line.split()[0] for line in lines[:6]] == [
        "quietgrad", "reading", "calibrating", "loading", "preparing", "calibrating"
    ]  # fmt: skip
    assert lines[6].startswith("epsilon = ") and lines[7].startswith("The best of")
    assert not [line for line in out[out.index("epsilon = ") :].splitlines() if "still" in line]


def test_no_file_that_is_released_is_as_old_as_the_first_run(
    quietgrad: Any, write: Write, of_three: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies keep times: the lock's, made before the runs, told beside the model's how long all of
    them took, and so about how many there were.
    """
    path = write()
    folder = folder_of(load_comparison(path, accounted=True))
    fit = ComparisonRunner.fit

    def long_ago(self: ComparisonRunner, *given: Any, **more: Any) -> Any:
        for file in folder.rglob("*"):
            if file != RunDir(folder).trials:  # which is not released, and watched
                os.utime(file, (0, 0))
        return fit(self, *given, **more)

    monkeypatch.setattr(ComparisonRunner, "fit", long_ago)
    began = time.time()
    assert quietgrad("compare", path, "--accounted")[0] == 0
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert ".lock" in {file.name for file in files}
    assert min(file.stat().st_mtime for file in files) >= began - 2


def test_the_plans_that_run_are_within_the_target(
    quietgrad: Any, write: Write, of_three: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    every: list[Any] = []
    calibrated = accounted._Choice._calibrated

    def noted(self: Any) -> Any:
        every[:] = calibrated(self)
        return every

    monkeypatch.setattr(accounted._Choice, "_calibrated", noted)
    assert quietgrad("compare", write(), "--accounted")[0] == 0
    events = [c.plan.event for c in every]
    delta = every[0].plan.delta
    assert {e.steps for e in events} == {4, 6} and {e.bands for e in events} == {1, 2}
    whole = selected_epsilon(events, RunCount(4.0), delta)
    assert 5.98 < whole <= 6.0
    for plan in of_three:
        assert plan.event in events and plan.delta == delta
        assert plan.noise.noise_multiplier == plan.event.noise_multiplier
        assert epsilon(plan.event, delta) < 5.0  # a run has less than the whole
        assert plan.seed is None  # known to nobody


def test_what_is_shown_does_not_depend_on_the_number_of_runs(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on what lost: the second run is the best, and others follow or do not."""
    monkeypatch.setattr(ComparisonRunner, "fit", lambda *a, **k: None)
    shown = []
    for scores in ([0.1, 0.75], [float("nan"), 0.75, 0.2, 0.3, 0.1]):
        left = iter(scores)
        monkeypatch.setattr(RunCount, "draw", lambda self, of=scores: len(of))
        monkeypatch.setattr(ComparisonRunner, "settle", lambda self, average, of=left: next(of))
        monkeypatch.setattr(
            "quietgrad.comparing.trials.random.SystemRandom", lambda: type("Known", (), {
                "randrange": lambda self, n: 1})()
        )  # fmt: skip
        path = write()
        code, out, err = quietgrad("compare", path, "--accounted")
        assert code == 0, err
        assert next(left, None) is None
        folder = folder_of(load_comparison(path, accounted=True))
        shown.append((out, err, (folder / "result.json").read_text()))
        (folder / "result.json").unlink()
    assert shown[0] == shown[1]
    assert "0.7500" in shown[0][0] and "0.1000" not in shown[0][0]


def test_a_kill_loses_no_run_and_draws_nothing_anew(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, draws, made = [], [], []
    fit, draw = ComparisonRunner.fit, Trials.draw

    def killed(self: ComparisonRunner, config: Any, plan: Any, *rest: Any, **more: Any) -> Any:
        starts.append({n: p.clone() for n, p in self.initial.items()})
        if len(starts) == 2:
            raise KeyboardInterrupt
        made.append(plan.event.steps)
        return fit(self, config, plan, *rest, **more)

    def drawn(self: Trials, *rest: Any) -> None:
        draw(self, *rest)
        self.drawn[:] = [0, 2, 1, 3]
        draws.append(self.start)

    monkeypatch.setattr(ComparisonRunner, "fit", killed)
    monkeypatch.setattr(Trials, "draw", drawn)
    path = write()
    comparison = load_comparison(path, accounted=True)
    code, out, _ = quietgrad("compare", path, "--accounted")
    assert code == 130 and "validation" not in out
    file = RunDir(folder_of(comparison)).trials
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = Trials.load(file)
    assert (kept.drawn, kept.done) == ([0, 2, 1, 3], 1) and kept.best is not None
    # Not with other settings: the draws were for these.
    code, _, err = quietgrad("compare", write(epsilons=[5.0]), "--accounted")
    assert code == 2 and "runs of other settings or other records" in " ".join(err.split())
    assert quietgrad("compare", write(), "--accounted")[0] == 0
    assert len(draws) == 1 and made == [4, 6, 4, 6]
    for name, value in starts[0].items():  # a head drawn at random is the same after the kill
        assert torch.equal(starts[-1][name], value)
    assert not file.exists()


def test_a_kill_of_the_first_run_keeps_the_draw(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*rest: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunCount, "draw", lambda self: 7)
    monkeypatch.setattr(ComparisonRunner, "fit", killed)
    path = write()
    assert quietgrad("compare", path, "--accounted")[0] == 130
    kept = Trials.load(RunDir(folder_of(load_comparison(path, accounted=True))).trials)
    assert (len(kept.drawn), kept.done) == (7, 0)


def test_the_weights_are_those_of_the_best(
    quietgrad: Any, write: Write, of_three: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties go to the first; what was saved is what had that score."""
    seen: list[tuple[float, dict[str, torch.Tensor]]] = []
    settle = ComparisonRunner.settle

    def noted(self: ComparisonRunner, average: Any) -> float:
        score = settle(self, average)
        now = trainable_parameters(self.model)
        seen.append((score, {n: p.detach().clone() for n, p in now.items()}))
        return score

    released: list[dict[str, torch.Tensor]] = []
    score_of = ComparisonRunner.score

    def scored(self: ComparisonRunner, part: str, records: Any) -> float:
        if part == "test":
            now = trainable_parameters(self.prepared.model.classifier)  # what is saved
            released.append({n: p.detach().clone() for n, p in now.items()})
        return score_of(self, part, records)

    monkeypatch.setattr(ComparisonRunner, "settle", noted)
    monkeypatch.setattr(ComparisonRunner, "score", scored)
    code, out, _ = quietgrad("compare", write(), "--accounted", "--json")
    assert code == 0
    best = max(score for score, _ in seen)
    wanted = next(weights for score, weights in seen if score == best)
    assert json.loads(out)["metrics"]["validation_accuracy"] == best
    (weights,) = released  # test records are looked at once
    kept = [weights[name] for name in weights]
    assert len(kept) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(kept, wanted.values(), strict=True))


def test_poisson_may_draw_none(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunCount, "draw", lambda self: 0)
    path = write(accounted={"distribution": "poisson", "mean": 2.0})
    code, out, _ = quietgrad("compare", path, "--accounted")
    assert code == 0 and "No run was drawn" in out and "would cost" in out
    monkeypatch.setattr(RunCount, "draw", lambda self: pytest.fail("drawn anew"))
    assert "No run was drawn" in quietgrad("compare", path, "--accounted")[1]


@pytest.mark.parametrize(
    ("extra", "changed", "flags", "message"),
    [
        ("", {"epsilons": [2.0, 4.0]}, ["--accounted"], "one choice has one epsilon"),
        ("", {}, ["--accounted", "--shard", "0/2"], "--shard 0/2 with --accounted"),
        ("", {}, ["--accounted", "--report"], "nothing was released"),
        ("", {}, [], "let --accounted draw the runs"),
        ("", {"accounted": {"mean": 0.5}}, ["--accounted"], "accounted.mean=0.5"),
        ("", {"accounted": {"distribution": "fixed"}}, ["--accounted"], "accounted.distribution"),
        ("", {"accounted": {"runs": 3}}, ["--accounted"], "unknown key accounted.runs"),
    ],
)
def test_refused(
    quietgrad: Any, write: Write, extra: str, changed: Any, flags: list[str], message: str
) -> None:
    path = write(extra, **changed)
    code, _, err = quietgrad("compare", path, *flags)
    assert code == 2 and message in " ".join(err.split())
    assert not (path.parent / "results.accounted").exists()


def test_data_that_are_refused_leave_no_folder(quietgrad: Any, write: Write) -> None:
    path = write()
    path.write_text(path.read_text().replace("reviews.csv", "nowhere.csv"))
    assert quietgrad("compare", path, "--accounted")[0] == 2
    assert not (path.parent / "results.accounted").exists()


def test_two_processes_do_not_draw_twice(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one drew while this one prepared."""
    path = write()
    file = RunDir(folder_of(load_comparison(path, accounted=True))).trials
    verify = accounted.verify_on_public_records

    def meanwhile(prepared: Any) -> float:
        file.parent.mkdir()
        other = Trials()
        other.draw("another", RunCount(3.0), 4)
        other.save(file)
        return verify(prepared)

    monkeypatch.setattr(accounted, "verify_on_public_records", meanwhile)
    code, _, err = quietgrad("compare", path, "--accounted")
    assert code == 2 and "by another process meanwhile" in " ".join(err.split())


def cut_off_in_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*rest: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ComparisonRunner, "fit", killed)


def test_runs_go_on_with_the_records_that_they_began_with(
    quietgrad: Any, write: Write, csv_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of before a change and after it are not draws of one law, which the choice's epsilon
    is for. The number of records is the same, and one label another.
    """
    path = write()
    with monkeypatch.context() as patch:
        cut_off_in_the_first_run(patch)
        assert quietgrad("compare", path, "--accounted")[0] == 130
    file = RunDir(folder_of(load_comparison(path, accounted=True))).trials
    before, text = file.read_bytes(), csv_file.read_text()
    _, line, rest = text.split("\n", 2)
    words, _, label = line.rpartition(",")
    other = next(row.rpartition(",")[2] for row in rest.split("\n") if not row.endswith(label))
    csv_file.write_text(text.replace(line, f"{words},{other}", 1))
    monkeypatch.setattr(ComparisonRunner, "fit", lambda *a, **k: pytest.fail("went on"))
    code, _, err = quietgrad("compare", path, "--accounted")
    assert code == 2 and "runs of other settings or other records" in " ".join(err.split())
    assert file.read_bytes() == before


def test_a_folder_that_was_replaced_releases_nothing(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is another file's, so a second process draws and releases there, too."""
    path = write()
    folder = folder_of(load_comparison(path, accounted=True))

    def replaced(*rest: Any, **more: Any) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        with RunDir(folder).locked():  # as another process would
            Trials().save(RunDir(folder).trials)

    monkeypatch.setattr(RunCount, "draw", lambda self: 1)
    monkeypatch.setattr(ComparisonRunner, "fit", replaced)
    code, _, err = quietgrad("compare", path, "--accounted")
    assert code == 2 and "so nothing is released" in " ".join(err.split())
    assert not RunDir(folder).result.exists() and not RunDir(folder).model.exists()


def test_a_choice_and_a_run_do_not_share_a_folder(
    quietgrad: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`quietgrad runs` told the choice's epsilon alone, and a report the run's."""
    path = write()
    run = RunDir(folder_of(load_comparison(path, accounted=True)))
    cut_off_in_the_first_run(monkeypatch)
    assert quietgrad("compare", path, "--accounted")[0] == 130
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a choice among runs that is not finished"):
            run.require_state(resume)
    run.trials.unlink()
    run.ledger.write_text("")
    code, _, err = quietgrad("compare", path, "--accounted")
    assert code == 2 and "name other comparison.results" in " ".join(err.split())
    assert not run.trials.exists()


def test_what_all_runs_began_with_is_told(
    quietgrad: Any, write: Write, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon of the choice is not that of the run before, for records of both."""
    record = provenance("reviews.csv", {"epsilon": 2.0, "delta": 1e-3, "steps": 4}, False)
    path = write()
    start = path.parent / "start"
    shutil.copytree(tiny_bert, start)  # which other tests begin with
    (start / FILE).write_text(json.dumps({KEY: record}))
    accepted = f'[model]\naccept_start = "{EPSILONS_ADD}"'
    text = path.read_text().replace("[model]", accepted)
    path.write_text(text.replace(str(tiny_bert), str(start)))
    monkeypatch.setattr(ComparisonRunner, "fit", lambda *a, **k: None)
    said = "for records of both runs their epsilons and deltas add"
    code, out, err = quietgrad("compare", path, "--accounted")
    assert code == 0, err
    assert " ".join(out.replace("│", " ").split()).count(said) == 2  # before the runs, and after
    folder = folder_of(load_comparison(path, accounted=True))
    (run,) = json.loads(quietgrad("runs", folder, "--json")[1])["runs"]
    assert run["started_from_runs"]
    told = quietgrad("report", folder)[1].replace("│", " ")
    assert said in " ".join(told.split())
    # Its configuration looks as cheap as one run: trained once more, that adds.
    again = ("--set", f"training.run_dir={folder}")
    code, out, err = quietgrad("train", folder / "config.toml", *again)
    assert code == 2 and "already holds a run" in " ".join(err.split())
    adds = "its epsilon and delta add to the choice's ("
    assert adds in " ".join(out.split())
    code, out, err = quietgrad("plan", folder / "config.toml")
    assert code == 0 and adds in " ".join((out + err).replace("│", " ").split())


def test_a_search_is_refused(quietgrad: Any, write: Write) -> None:
    path = write('[search]\ntrials = 3\n[search.ranges."optimizer.learning_rate"]\nlow = 0.001\n'
                 "high = 0.1")  # fmt: skip
    text = path.read_text()
    for line in ("learning_rates = [0.001, 0.01]", "protocol_rate = 0.001"):
        assert line in text
        text = text.replace(line + "\n", "")
    path.write_text(text)
    code, _, err = quietgrad("compare", path, "--accounted")
    assert code == 2 and "--accounted with [search]" in " ".join(err.split())


def test_another_choice_is_not_made_over_the_first(
    quietgrad: Any, write: Write, of_three: list[Any]
) -> None:
    assert quietgrad("compare", write(), "--accounted")[0] == 0
    code, _, err = quietgrad("compare", write(learning_rates=[1e-3, 2e-2]), "--accounted")
    assert code == 2 and "costs its epsilon again" in " ".join(err.split())
    assert len(of_three) == 3


def test_candidates_are_variants_and_rates(write: Write) -> None:
    comparison = load_comparison(write(), accounted=True)
    found = [(run.variant, run.rate) for run in candidates_of(comparison)]
    assert found == [("baseline", 1e-3), ("baseline", 1e-2), ("long", 1e-3), ("long", 1e-2)]


def test_an_ordinary_comparison_says_what_the_choice_would_cost(
    quietgrad: Any, write: Write
) -> None:
    path = write()
    path.write_text(path.read_text().replace("[data]", "[data]\npublic = true"))
    code, out, err = quietgrad("compare", path, "--report")
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.startswith("No epsilon counts"))
    assert "these 4 settings" in line and "--accounted" in line
    assert 6 < float(line.split("about epsilon ")[1].split(" ")[0]) < 12
