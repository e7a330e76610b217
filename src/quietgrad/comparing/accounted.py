"""The best setting for private records, with the choice paid for: ``quietgrad compare
--accounted``.

The number of runs is drawn from a stated law, the setting of each uniformly from the candidates
(variants x learning rates), all with noise calibrated so that the release of the best one has the
target epsilon (``quietgrad.accounting.selection``). The score is that of validation records, which
are public, so it follows from what a run releases. Released are the best run's setting, score and
weights; the number of runs and the other runs are not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quietgrad.accounting import selected_epsilon
from quietgrad.accounting.calibrate import calibrate
from quietgrad.comparing.runner import ComparisonRunner, seeded
from quietgrad.comparing.table import Comparison, Run
from quietgrad.comparing.trials import Trials
from quietgrad.durable import make_folder, write_whole
from quietgrad.ledger.earlier import told_starts
from quietgrad.plan import PrivacyPlan
from quietgrad.tensors import trainable_parameters
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.prepare import verify_on_public_records
from quietgrad.training.result import trained_on
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.tasks.task import Task

# Of the target: what one run is planned for before all noise is scaled together.
ONE_RUN = 0.6
Result = dict[str, Any]


def candidates_of(comparison: Comparison) -> list[Run]:
    """The settings that are drawn from, each as likely as any other."""
    table = comparison.table
    return [
        Run(variant, table.epsilons[0], rate, 0)
        for variant in comparison.variants
        for rate in table.learning_rates
    ]


def folder_of(comparison: Comparison) -> Path:
    """Where the best run goes: beside the results of ordinary comparisons."""
    return comparison.results.with_suffix(".accounted")


def read_choice(comparison: Comparison) -> Result | None:
    """What was released of the same settings; None where nothing was yet.

    Raises:
        ValueError: for a choice among other settings.
    """
    path = RunDir(folder_of(comparison)).result
    if not path.is_file():
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    if result["selection"]["settings"] != _settings(comparison):
        raise ValueError(
            f"{str(path.parent)!r} holds the choice among other settings, and another choice on "
            "the same records costs its epsilon again; name another comparison.results if that is "
            "meant"
        )
    return result


def choose(
    comparison: Comparison,
    say: Callable[[Result], None],
    begins: Callable[[str], None] = lambda stage: None,
) -> Result:
    """Makes the runs that remain and releases the best one.

    Args:
        comparison: from ``load_comparison(path, accounted=True)``.
        say: called before the runs with what the whole guarantees.
        begins: called with what begins before that, in a few words; of the runs nothing is said.

    Returns:
        What is released, also written to the folder with the model.

    Raises:
        ValueError: for settings, data or noise that cannot be had, before anything is drawn; for
            runs that were drawn for other settings or data.
    """
    folder = folder_of(comparison)
    saved = read_choice(comparison)
    if saved is None:
        trials = RunDir(folder).trials
        choice = _Choice(comparison, trials, begins)  # what is refused leaves no folder
        make_folder(folder)
        with RunDir(folder).locked():
            saved = read_choice(comparison) or choice.made(say)
    RunDir(folder).trials.unlink(missing_ok=True)
    return saved


@dataclass(frozen=True)
class _Candidate:
    run: Run
    config: TrainConfig
    plan: PrivacyPlan


class _Choice:
    """A choice that is not released yet."""

    def __init__(self, comparison: Comparison, path: Path, begins: Callable[[str], None]) -> None:
        self.comparison, self.path = comparison, path
        _require_no_run(RunDir(path.parent))
        self.trials = Trials.load(path)
        self.runner = ComparisonRunner(comparison, self.trials.start, begins)
        self.runner.mixings |= self.trials.kept()
        verify_on_public_records(self.runner.prepared)
        begins("calibrating the noise of all settings together")
        self.candidates = self._calibrated()
        self.epsilon = self._whole(1.0)
        if not self.epsilon <= comparison.table.epsilons[0]:
            raise RuntimeError(f"the plans have epsilon {self.epsilon} in place of the target")
        self.delta = self.candidates[0].plan.delta

    def made(self, say: Callable[[Result], None]) -> Result:
        trials, comparison = self.trials, self.comparison
        _require_no_run(RunDir(self.path.parent))
        now = Trials.load(self.path)
        if (now.start, now.done) != (trials.start, trials.done) and now.key:
            raise ValueError(
                f"{str(self.path)!r} was written by another process meanwhile; start the command "
                "again, alone"
            )
        events = [[c.plan.event.to_json(), c.plan.noise.digest] for c in self.candidates]
        task = self.runner.prepared.task
        key = _digest([_settings(comparison), events, self.delta, _digest_of_records(task)])
        if not trials.key:
            trials.draw(key, comparison.accounted.count, len(self.candidates))
            trials.keep(self.runner.mixings)
            trials.save(self.path)  # before the first run
        kept = _stamp(self.path)
        if trials.key != key:
            raise ValueError(
                f"{str(self.path)!r} holds runs of other settings or other records; go on with "
                "those, or remove the file to draw anew (never because of what is in it, or of "
                "how long it took: that would be a choice that no epsilon covers)"
            )
        say(self.facts())
        for number in trials.drawn[trials.done :]:
            chosen = self.candidates[number]
            average = self.runner.fit(chosen.config, chosen.plan, guard_on_public=True)
            score = self.runner.settle(average)
            trials.finished(score, trainable_parameters(self.runner.model))
            self._require_kept(kept)
            trials.save(self.path)
            kept = _stamp(self.path)
        self._require_kept(kept)
        return self._released()

    def _require_kept(self, kept: tuple[int, ...]) -> None:
        """Before anything is written: the lock is worth nothing in a folder that was replaced."""
        if _stamp(self.path) != kept:
            raise ValueError(
                f"{str(self.path)!r} was removed or replaced while its runs were made, so nothing "
                "is released; put the folder back and start the command again, alone"
            )

    def facts(self) -> Result:
        """Public: what is promised, whatever is drawn."""
        first, accounted = self.candidates[0].plan, self.comparison.accounted
        noise = [c.plan.noise_multiplier for c in self.candidates]
        return {
            "private": True,
            "data_declared_public": first.data_are_public,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "neighbouring": first.neighbouring,
            "selection": {
                "candidates": len(self.candidates),
                "mean_runs": accounted.mean,
                "distribution": accounted.distribution,
                "noise_multipliers": [min(noise), max(noise)],
                "settings": _settings(self.comparison),
            },
            **told_starts(self.runner.prepared.started_from),
        }

    def _calibrated(self) -> list[_Candidate]:
        """The candidates with noise that meets the target: planned one by one, then all noise
        scaled by one factor.
        """
        target = self.comparison.table.epsilons[0]
        found = []
        for run in candidates_of(self.comparison):
            config = seeded(self.comparison.config_of(run), None)
            privacy = replace(config.privacy, target_epsilon=ONE_RUN * target)
            config = replace(config, privacy=privacy)
            found.append(_Candidate(run, config, self.runner.plan(config)))
        self.candidates = found
        deltas = {c.plan.delta for c in found}
        assert len(deltas) == 1  # variants have no delta of their own (table.FIXED)
        factor = calibrate(self._whole, target)
        return [replace(c, plan=c.plan.scaled(factor)) for c in found]

    def _whole(self, factor: float) -> float:
        events = [c.plan.event_scaled(factor) for c in self.candidates]
        delta = self.candidates[0].plan.delta
        return selected_epsilon(events, self.comparison.accounted.count, delta)

    def _released(self) -> Result:
        """Writes the best run, as a run's directory without a ledger; then the rest is removed."""
        result, best, folder = self.facts(), self.trials.best, RunDir(self.path.parent)
        result["selected"] = None
        if best is not None:
            chosen, runner = self.candidates[best["candidate"]], self.runner
            with torch.no_grad():
                for name, parameter in trainable_parameters(runner.model).items():
                    parameter.copy_(best["weights"][name])
            key, plan = runner.prepared.metric.key, chosen.plan
            test = runner.score("test", runner.counted["test"])
            result |= {
                "selected": setting_of(self.comparison, chosen.run),
                "metric": key,
                "metrics": {key: test, f"validation_{key}": best["score"]},
                "noise_multiplier": plan.noise_multiplier,
                "steps": plan.steps,
                "planned_steps": plan.steps,
            }
            prepared = replace(runner.prepared, config=chosen.config, plan=plan, steps=plan.steps)
            record = trained_on(prepared, plan.steps) | {
                "epsilon": self.epsilon,
                "selection": result["selection"],
            }
            prepared.task.save(prepared.model, folder.model, record)
            privacy = replace(chosen.config.privacy, target_epsilon=plan.epsilon)  # of one run
            config = replace(chosen.config, privacy=privacy)
            write_whole(folder.config, config.to_toml().encode())
        folder.forget_beginning()  # how long it took would tell how many runs were drawn
        folder.write_json(folder.result, result)
        return result


def setting_of(comparison: Comparison, run: Run) -> Result:
    """What tells a candidate from the others."""
    return {
        "variant": run.variant,
        **comparison.variants[run.variant],
        "optimizer.learning_rate": run.rate,
    }


def _settings(comparison: Comparison) -> str:
    """A digest of all that decides what is drawn and run; of no record."""
    runs = [comparison.config_of(run).to_dict() for run in candidates_of(comparison)]
    accounted = comparison.accounted
    return _digest([runs, accounted.mean, accounted.distribution, comparison.table.distinct])


def _digest_of_records(task: Task) -> str:
    """All that runs read: where it changes, runs of before and after are not draws of one law.
    Private; it is in the secret file of the trials alone.
    """
    found = hashlib.sha256()
    for part in (task.splits.train, task.splits.validation, task.splits.test):
        owners, labels = getattr(part, "owners", None), getattr(part, "labels", ())
        found.update(json.dumps([len(part), *part.label_names]).encode())
        found.update(b"".join(part.record_ids) + np.ascontiguousarray(labels).tobytes())
        found.update(b"".join(hashlib.sha256(owner).digest() for owner in owners or ()))
    return found.hexdigest()


def _require_no_run(folder: RunDir) -> None:
    if folder.ledger.exists() or folder.checkpoint.exists():
        raise ValueError(
            f"{str(folder.path)!r} holds a run of `quietgrad train`, whose epsilon is none of the "
            "choice's; name other comparison.results"
        )


def _stamp(path: Path) -> tuple[int, ...]:
    """What tells a file from one that took its place; empty where there is none."""
    if not path.exists():
        return ()
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
