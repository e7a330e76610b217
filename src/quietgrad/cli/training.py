"""``quietgrad train``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.checks import how_many
from quietgrad.cli.accounting import DECLARED_PUBLIC
from quietgrad.cli.beside.chosen import embedded, print_settings, settings_record
from quietgrad.cli.beside.extension import Extension, require_one_length
from quietgrad.cli.beside.launch import start_processes
from quietgrad.cli.output import (
    console,
    fail,
    one_line,
    print_classes,
    print_json,
    print_table,
    quiet_libraries,
)
from quietgrad.cli.prepared import prepare_shown, print_guarantee, say_choice
from quietgrad.cli.progress.stages import stages
from quietgrad.cli.progress.training import TrainingProgress
from quietgrad.distributed.together import Together, launched, leave, meet, restarted
from quietgrad.events import RELATIONS
from quietgrad.ledger import holds_records
from quietgrad.training.settings.config import TrainConfig, load_config
from quietgrad.training.settings.references import references_for
from quietgrad.training.settings.resume import require_same_settings, with_saved_choices
from quietgrad.training.sharding.alike import REMEDY, settings_of

if TYPE_CHECKING:
    from quietgrad.training.files.run_dir import RunDir
    from quietgrad.training.prepare import Prepared


@one_line
def run_train(
    config_path: Path | None,
    overrides: list[str],
    resume: bool,
    as_json: bool,
    extend: Extension = (None, None, None),
    processes: int = 1,
) -> None:
    """See ``quietgrad train --help``."""
    target = console(as_json)
    if extend != (None, None, None) and not resume:
        raise ValueError(
            "--extend-steps, --extend-epochs and --extend-to-epsilon go on with a run: add --resume"
        )
    require_one_length(extend)
    config = _config_to_run(config_path, overrides, resume)
    say_choice(target, config_path)
    if processes != 1:
        start_processes(processes, sys.argv[1:])
    together = _meet(config)
    if together.size > 1:
        resume = together.of_first(_resumes(config, resume, together))
        config = together.all_of(
            lambda: _config_to_run(config_path, overrides, resume), "read its settings"
        )
        together.require_alike(settings_of(config), REMEDY)
    if not together.first:
        target = Console(quiet=True)
    from quietgrad.training.extending import Extend, extended
    from quietgrad.training.files.noise_state import saved_mixing
    from quietgrad.training.files.run_dir import RunDir, removed_if_refused

    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        wanted = config.training.run_dir
        run_dir = RunDir(
            together.by_first(lambda: stack.enter_context(removed_if_refused(wanted, resume)).path)
        )
        stack.enter_context(_told_if_interrupted(run_dir))
        if resume:
            config = together.all_of(lambda: _as_it_began(config, run_dir), "go on")
        from quietgrad.clipping.soundness.processes import on_public_records
        from quietgrad.plan.seeds import beginning_of
        from quietgrad.training.derived.resolve import is_open

        # Drawn where there is no seed: weights that begin at random have to begin alike.
        beginning = together.of_first(beginning_of(config.training.seed))
        made: list[Prepared] = []

        def prepare(config: TrainConfig) -> Prepared:
            with on_public_records():
                return prepare_shown(
                    config,
                    target,
                    saved_mixing(run_dir) if resume else None,
                    (lambda plan: extended(plan, run_dir, Extend(*extend))) if resume else None,
                    beginning,
                )

        def measured(given: TrainConfig) -> TrainConfig:
            made.append(prepare(given))
            return made[0].config

        if together.size > 1 and is_open(config):
            # What follows from measurements is the first process's: the others wait for it.
            given = config
            config = together.by_first(lambda: measured(given))
        prepared = together.all_of(lambda: made[0] if made else prepare(config), "prepare the run")
        together.require_same(
            "their training records",
            prepared.task.record_ids,
            "let every process read the same file, in the same order",
        )
        from quietgrad.training import runner
        from quietgrad.training.files import figure
        from quietgrad.training.forecast import kept_forecast
        from quietgrad.training.prepare import verify_on_public_records

        with on_public_records(), stages(target) as say:
            difference = None
            if prepared.plan is not None:
                say("checking clipping on validation records")
                difference = together.all_of(
                    lambda: verify_on_public_records(prepared), "check clipping"
                )
            # Before private records are in memory, whose peak would tell of them.
            say("timing a step on validation records")
            expected = together.by_first(lambda: kept_forecast(prepared))
    with _told_if_interrupted(run_dir):
        unsaid = [] if resume else embedded(config_path, overrides)
        _print_beginning(target, prepared, difference, unsaid)
        with TrainingProgress(target, prepared) as shown:
            try:
                with quiet_libraries(target):
                    outcome: runner.Outcome | None = runner.train(
                        prepared,
                        run_dir,
                        resume,
                        shown.report,
                        _sayer(target),
                        shown.told,
                        together,
                    )
            except KeyboardInterrupt:
                outcome = None
    together.of_first(None)  # the others stay until the last file is written
    leave()
    if not together.first:
        return
    run_dir.write_json(run_dir.forecast, expected)
    if outcome is None:  # said below the bar, not in it
        fail(_interrupted(run_dir), code=130)
    if outcome.interrupted:
        if as_json:
            print_json(outcome.result | {"interrupted": True})
        fail(
            f"stopped after step {outcome.result['steps']} of {prepared.steps}; everything is "
            f"saved{_count_to_keep(outcome.result)}. "
            f"Go on with: quietgrad train --resume --set training.run_dir={run_dir.path}",
            code=130,
        )
    if resume and not outcome.made:
        target.print("The run had ended; nothing was released.")
    known = references_for(config)
    figure.score_figure(
        run_dir.read_metrics(), outcome.result, known.get("non_private_accuracy"), run_dir.figure
    )
    result = outcome.result | {"seconds": round(time.monotonic() - started, 1)}
    if as_json:
        print_json(result)
    _print_result(target, result | _in_words(prepared, result), known)


def _print_beginning(
    target: Console, prepared: Prepared, difference: float | None, unsaid: list[str]
) -> None:
    """What is about to run; ``difference`` is that of clipping from autograd, ``unsaid`` are the
    settings that only the embedded default says.
    """
    if prepared.plan is not None:
        target.print(
            "Clipping agrees with per-example autograd on validation records: relative difference "
            f"{difference:.1e}."
        )
        print_guarantee(target, prepared, prepared.plan)
    else:
        target.print(
            "[bold]Privacy is switched off:[/bold] this run is a reference, and not private."
        )
    if prepared.reasons:
        print_settings(target, settings_record(prepared, unsaid))
    if prepared.config.training.caches and _has_frozen_layers(prepared):
        target.print(
            "Before the first step, frozen layers whose states can be kept run once over the "
            "records; no privacy is spent by that."
        )


def _meet(config: TrainConfig) -> Together:
    """The other processes that torchrun started with this one.

    Raises:
        ValueError: for what several processes do not do.
    """
    if not launched():
        return Together()
    if not config.privacy.enabled:
        raise ValueError(
            "privacy.enabled=false on several processes: they train private runs alone; start the "
            "reference with quietgrad train, without torchrun and --nproc"
        )
    if not config.training.run_dir:
        raise ValueError(
            "training.run_dir is not set, and on several processes it has to be: after a restart "
            "they would begin another run, and forget what was released; --set "
            "training.run_dir=PATH, on a disk that every process sees"
        )
    from quietgrad.training.precision import device_of

    return meet(device_of(config.training.device).type)


def _resumes(config: TrainConfig, resume: bool, together: Together) -> bool:
    """After a restart by torchrun a run goes on, where there is one, as with --resume."""
    from quietgrad.training.files.run_dir import RunDir

    again = restarted(together)
    return resume or (again and holds_records(RunDir(Path(config.training.run_dir)).ledger))


def _as_it_began(config: TrainConfig, run_dir: RunDir) -> TrainConfig:
    """The configuration of a run that is gone on with."""
    from quietgrad.training.files.noise_state import with_kept_seed, without_seed

    config = with_kept_seed(config, run_dir)
    require_same_settings(without_seed(load_config(run_dir.config)), without_seed(config))
    return config


def _in_words(prepared: Prepared, result: dict[str, Any]) -> dict[str, str]:
    """What epsilon means; nothing where nothing was released, or nothing was protected."""
    if prepared.plan is None or not result["steps"]:
        return {}
    from quietgrad.report.words import in_words

    event = prepared.plan.event.after(result["steps"])
    return {"in_words": in_words(event, prepared.plan.neighbouring)}


def _has_frozen_layers(prepared: Prepared) -> bool:
    return not all(p.requires_grad for p in prepared.model.classifier.parameters())


@contextlib.contextmanager
def _told_if_interrupted(run_dir: RunDir) -> Iterator[None]:
    """Of what stops a run elsewhere than at the end of a step, with everything saved."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        told = "" if stopped else f"{type(error).__name__}: {error}; "
        fail(told + _interrupted(run_dir), code=130 if stopped else 1)


def _interrupted(run_dir: RunDir) -> str:
    """Of a run that could not save and stop after its step."""
    if not holds_records(run_dir.ledger):
        return "interrupted before anything was released: no privacy was spent; start again"
    return (
        "interrupted; what was released is in the run's ledger. Go on with: quietgrad train "
        f"--resume --set training.run_dir={run_dir.path}"
    )


def _sayer(target: Console) -> Callable[[str], None]:
    return lambda line: target.print(
        f"[yellow]note:[/yellow] {line}", highlight=False, soft_wrap=True
    )


def _count_to_keep(result: dict[str, Any]) -> str:
    """Only a number kept elsewhere tells that a directory was rolled back as a whole."""
    if not result["private"]:
        return ""
    return (
        f" (keep elsewhere: {how_many(result['steps'], 'release')}; quietgrad epsilon --ledger "
        f"{result['run_dir']} --expect-releases {result['steps']} refuses a directory rolled "
        "back)"
    )


def _config_to_run(path: Path | None, overrides: list[str], resume: bool) -> TrainConfig:
    """A resume without CONFIG takes the configuration that the run directory holds, and one with
    it what that leaves out.
    """
    config = load_config(path, overrides)
    if resume and config.training.run_dir:
        from quietgrad.training.files.run_dir import RunDir

        saved = RunDir(Path(config.training.run_dir)).config
        if saved.is_file():
            if path is None:
                return load_config(saved, overrides)
            return with_saved_choices(load_config(saved), config)
    return config


def _print_result(target: Console, result: dict[str, Any], known: dict[str, Any]) -> None:
    from quietgrad.training.tasks.metrics import BY_KEY

    rows: dict[str, str] = {}
    if result["private"]:
        rows["privacy"] = (
            f"epsilon = {round_up(result['epsilon'], 4)} at delta = "
            f"{round_up_to(result['delta'], 3)} ({RELATIONS[result['neighbouring']]})"
        )
        if "in_words" in result:
            rows["an attacker"] = result["in_words"]
    else:
        rows["privacy"] = "none: a reference run"
    if result["private"] and result.get("data_declared_public"):
        rows["data"] = DECLARED_PUBLIC
    if "start_warnings" in result:
        rows["start"] = "\n".join(result["start_warnings"])
    for key, value in result["metrics"].items():
        plain = key.removeprefix("validation_")
        name = BY_KEY[plain].name if plain in BY_KEY else plain.replace("_", " ")
        rows[f"{'test' if plain == key else 'validation'} {name}"] = f"{value:.4f}"
    for part, scores in result.get("class_scores", {}).items():
        rows[f"{part} macro F1"] = f"{scores['macro_f1']:.4f}"
    if "majority_accuracy" in result:
        rows["test accuracy of the majority class"] = f"{result['majority_accuracy']:.4f}"
    if known.get("non_private_accuracy") is not None:
        rows["without privacy"] = (
            f"{known['non_private_accuracy']:.4f} (recorded; to measure it again: "
            f"{known['command']})"
        )
    rows["time"] = f"{result['seconds']:.0f} s"
    rows["written to"] = f"{result['run_dir']}{_count_to_keep(result)}"
    if "seed_warning" in result:
        rows["seed"] = result["seed_warning"]
    if "class_scores" in result:
        print_classes(target, result)
    print_table(target, "Result", rows)
