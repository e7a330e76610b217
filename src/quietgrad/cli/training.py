"""``quietgrad train`` and ``quietgrad plan``."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.checks import SettingsWarning
from quietgrad.cli.accounting import DECLARED_PUBLIC, RELATIONS
from quietgrad.cli.noise import noise_record, noise_rows, source_rows
from quietgrad.cli.output import console, fail, one_line, print_json, print_table
from quietgrad.noise.methods import IndependentNoise
from quietgrad.training.files.provenance import start_warnings
from quietgrad.training.settings.config import TrainConfig, load_config
from quietgrad.training.settings.references import references_for
from quietgrad.training.settings.resume import require_same_settings


@one_line
def run_train(config_path: Path | None, overrides: list[str], resume: bool, as_json: bool) -> None:
    """See ``quietgrad train --help``."""
    target = console(as_json)
    config = _config_to_run(config_path, overrides, resume)
    from quietgrad.training.files.noise_state import saved_mixing, with_kept_seed, without_seed
    from quietgrad.training.files.run_dir import open_run_dir

    run_dir = open_run_dir(config.training.run_dir, resume)
    if resume:
        config = with_kept_seed(config, run_dir)
        require_same_settings(without_seed(load_config(run_dir.config)), without_seed(config))

    prepared, started = _prepare(config, target, saved_mixing(run_dir) if resume else None)
    from quietgrad.training import runner
    from quietgrad.training.files import figure
    from quietgrad.training.prepare import verify_on_public_records

    if prepared.plan is not None:
        difference = verify_on_public_records(prepared)
        target.print(
            "Clipping agrees with per-example autograd on validation records: relative difference "
            f"{difference:.1e}."
        )
        _print_guarantee(target, prepared)
    else:
        target.print(
            "[bold]Privacy is switched off:[/bold] this run is a reference, and not private."
        )
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.fields[spent]}"),
    )
    with Progress(*columns, console=target, refresh_per_second=2) as bar:
        task = bar.add_task("training", total=prepared.steps, spent="")
        score_text = ""
        declared = " (data declared public)" if config.data.public else ""

        def report(progress: runner.Progress) -> None:
            nonlocal score_text
            if progress.score is not None:
                score_text = f" | validation {prepared.metric.name} {progress.score:.3f}"
                if not target.is_terminal:
                    target.print(
                        f"step {progress.step}/{progress.steps}: epsilon spent "
                        f"{round_up(progress.epsilon, 3)}{declared}{score_text}"
                    )
            spent = (
                f"epsilon {round_up(progress.epsilon, 3)}{declared}"
                if prepared.plan is not None
                else "not private"
            )
            bar.update(task, completed=progress.step, spent=spent + score_text)

        outcome = runner.train(prepared, run_dir, resume, report, _sayer(target))
    if outcome.interrupted:
        if as_json:
            print_json(outcome.result | {"interrupted": True})
        fail(
            f"stopped after step {outcome.result['steps']} of {prepared.steps}; everything is "
            f"saved{_count_to_keep(outcome.result)}. "
            f"Go on with: quietgrad train --resume --set training.run_dir={run_dir.path}",
            code=130,
        )
    known = references_for(config)
    figure.score_figure(
        run_dir.read_metrics(), outcome.result, known.get("non_private_accuracy"), run_dir.figure
    )
    result = outcome.result | {"seconds": round(time.monotonic() - started, 1)}
    if as_json:
        print_json(result)
    _print_result(target, result, known)


def _sayer(target: Console) -> Callable[[str], None]:
    return lambda line: target.print(
        f"[yellow]note:[/yellow] {line}", highlight=False, soft_wrap=True
    )


def _count_to_keep(result: dict[str, Any]) -> str:
    """A directory that was rolled back as a whole looks like an earlier state of itself; only a
    number kept elsewhere can tell.
    """
    if not result["private"]:
        return ""
    return (
        f" (keep elsewhere: {result['steps']} releases; quietgrad epsilon --ledger "
        f"{result['run_dir']} --expect-releases {result['steps']} refuses a directory rolled "
        "back)"
    )


def run_plan(
    config_path: Path | None, overrides: list[str], figure: Path | None, as_json: bool
) -> None:
    """See ``quietgrad plan --help``."""
    target = console(as_json)
    config = load_config(config_path, overrides)
    if figure is not None:
        _require_choice_to_draw(config, figure)
    prepared, _ = _prepare(config, target)
    from quietgrad.training.forecast import forecast

    record = forecast(prepared)
    if prepared.plan is not None:
        record |= noise_record(prepared.plan)
    if figure is not None and prepared.plan is not None:
        from quietgrad.training.files.noise_state import draw_choice

        draw_choice(prepared.plan, figure)
        record["figure"] = str(figure)
    if as_json:
        print_json(record)
        return
    if prepared.plan is not None:
        _print_guarantee(target, prepared)
    else:
        nothing = (
            "none: with privacy.enabled=false nothing protects the training records, and the "
            "run has no epsilon"
        )
        print_table(target, "Privacy plan", [("guarantee", nothing)])
    _print_clipping(target, record)
    print_table(
        target,
        "Forecast (measured on one micro-batch of validation records)",
        [
            (
                "frozen layers",
                "run once per record, then cached"
                if record["cached_frozen_layers"]
                else "run at every step",
            ),
            (
                "training time",
                f"about {record['predicted_seconds']:.0f} s for {prepared.steps} steps, "
                "evaluations not counted",
            ),
            ("memory", f"about {record['predicted_memory_mib']:.0f} MiB at the peak"),
            (
                "trainable parameters",
                f"{record['trainable_parameters']:,} of {record['parameters']:,}",
            ),
            *([] if figure is None else [("figure", str(figure))]),
        ],
    )


def _require_choice_to_draw(config: TrainConfig, figure: Path) -> None:
    """Before any work: that there will be a choice of bands, and a place for its figure."""
    if figure.suffix.lower() != ".png":
        fail(f"--figure={str(figure)!r} must end in .png: the figure is a PNG file", 2)
    if not figure.absolute().parent.is_dir():
        fail(
            f"--figure={str(figure)!r}: no such folder; make it, or name a file in one that is "
            "there",
            2,
        )
    bands = None if isinstance(config.noise, IndependentNoise) else config.noise.bands
    if bands != "auto" or not config.privacy.enabled:
        noise = config.to_dict()["noise"]
        fail(
            f"--figure draws a choice of bands, and noise.method={noise['method']!r} with "
            f"noise.bands={bands} leaves none; set noise.method=banded (or noisecurve) and "
            "noise.bands=auto",
            2,
        )


def _say_what_is_idle(prepared: Any) -> None:
    """So that nobody believes in noise or denoising that does not run."""
    config: TrainConfig = prepared.config
    told = config.to_dict()
    noise, denoising = told["noise"]["method"], told["denoising"]["method"]
    delay, found = getattr(config.denoising, "delay", 0), []
    if prepared.plan is None:
        found += [f"noise.method={noise!r}"] if noise != "independent" else []
        found += [f"denoising.method={denoising!r}"] if denoising != "none" else []
        found = [f"{name} is without effect: privacy.enabled=false adds no noise" for name in found]
    elif delay >= prepared.steps:
        found = [
            f"denoising.method={denoising!r} is without effect: it leaves the first {delay} steps "
            f"as they are, and there are {prepared.steps}; set denoising.delay"
        ]
    for sentence in found:
        Console(stderr=True).print(
            f"[bold]Note:[/bold] {sentence}", highlight=False, soft_wrap=True
        )


def _print_clipping(target: Console, record: dict[str, Any]) -> None:
    """Engine and estimators that the planner chose, beside what it did not choose."""
    if not record["layers"]:
        return
    rows = []
    for layer in record["layers"]:
        work = (
            f", {layer['multiplications']:,} multiplications an example"
            if layer["multiplications"]
            else ""
        )
        kept = (
            ", kept for the sum" if layer["kept"] and layer["estimator"] == "materialized" else ""
        )
        rows.append(
            (layer["shape"], f"{layer['count']} parameters, {layer['estimator']}{kept}{work}")
        )
    print_table(target, "Norm estimator by shape of parameter", rows)
    rows = [
        (
            "chosen",
            f"{record['engine']}; {record['micro_batch_size']} examples at a time "
            f"({record['why']})",
        )
    ]
    for other in record["alternatives"]:
        rows.append(
            (
                other["engine"],
                f"{other['ratio']:.2f} times the non-private step, {other['mib']:,.0f} MiB over "
                "parameters and data, "
                f"{other['micro_batch_size']} examples at a time",
            )
        )
    plain = record["non_private"]
    rows.append(
        (
            "without privacy",
            f"{plain['seconds']:.3g} s and {plain['mib']:,.0f} MiB for such a batch (modelled)",
        )
    )
    sketch = record["sketch"]
    if "noise_multiplier" in sketch:
        rows.append(
            (
                "sketching",
                f"hutch with k = {sketch['sketch_dim']} would {_saving(sketch['saves'])} and raise "
                "the noise multiplier from "
                f"{round_up(record['noise_multiplier'], 4)} to "
                f"{round_up(sketch['noise_multiplier'], 4)}",
            )
        )
    print_table(target, "Engines", rows)


def _saving(share: float) -> str:
    return (
        f"save {100 * share:.1f} % of the time"
        if share > 0
        else f"take {-100 * share:.1f} % more time"
    )


def _config_to_run(path: Path | None, overrides: list[str], resume: bool) -> TrainConfig:
    """A resume without CONFIG takes the configuration that the run directory holds."""
    config = load_config(path, overrides)
    if resume and path is None and config.training.run_dir:
        from quietgrad.training.files.run_dir import RunDir

        saved = RunDir(Path(config.training.run_dir)).config
        if saved.is_file():
            return load_config(saved, overrides)
    return config


def _prepare(config: TrainConfig, target: Console, mixing: Any = None) -> tuple[Any, float]:
    started = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SettingsWarning)
        from quietgrad.training.prepare import prepare

        with target.status("loading data and model, calibrating the noise"):
            prepared = prepare(config, mixing)
    _say_what_is_idle(prepared)
    for warning in caught:
        if issubclass(warning.category, SettingsWarning):  # those of libraries are not for the user
            target.print(f"[yellow]warning:[/yellow] {warning.message}")
    return prepared, started


def _print_guarantee(target: Console, prepared: Any) -> None:
    from quietgrad.tensors import trainable_parameters

    plan = prepared.plan
    train = prepared.train
    delta_note = (
        ""
        if prepared.config.privacy.target_delta is not None
        else " (1 / N^1.1, at most 0.01: the default)"
    )
    rows = [
        (
            "guarantee",
            f"epsilon = {round_up(plan.epsilon, 4)} at delta = "
            f"{round_up_to(plan.delta, 3)}{delta_note}, {RELATIONS[plan.neighbouring]}",
        ),
        (
            "records",
            f"{len(train)} {'declared public' if plan.data_are_public else 'private'} for "
            f"training; {len(prepared.validation)} validation and {len(prepared.test)} test, "
            "declared public",
        ),
        *noise_rows(plan),
        *source_rows(
            plan, sum(p.numel() for p in trainable_parameters(prepared.model.classifier).values())
        ),
        ("clipping", _clipping_text(plan)),
    ]
    if plan.data_are_public:
        rows.append(("data", DECLARED_PUBLIC))
    rows += [("start", warning) for warning in start_warnings(prepared.started_from)]
    if plan.seed is not None and not plan.data_are_public:
        rows.append(
            (
                "seed",
                "given: the noise is reproducible, so the guarantee holds only if the seed stays "
                "secret and serves this run alone",
            )
        )
    print_table(target, "Privacy plan", rows)


def _clipping_text(plan: Any) -> str:
    claim = plan.clipper.claim.clipping
    k = getattr(claim, "sketch_dim", None)
    if k is None:
        return f"exact per-example norms ({plan.clipper.estimator})"
    return (
        f"randomized: {plan.clipper.estimator} with k = {k}, {claim.envelope} envelope in the "
        "accountant"
    )


def _print_result(target: Console, result: dict[str, Any], known: dict[str, Any]) -> None:
    from quietgrad.training.tasks.metrics import BY_KEY

    rows = []
    if result["private"]:
        rows.append(
            (
                "privacy",
                f"epsilon = {round_up(result['epsilon'], 4)} at delta = "
                f"{round_up_to(result['delta'], 3)} ({RELATIONS[result['neighbouring']]})",
            )
        )
    else:
        rows.append(("privacy", "none: a reference run"))
    if result["private"] and result.get("data_declared_public"):
        rows.append(("data", DECLARED_PUBLIC))
    rows += [("start", warning) for warning in result.get("start_warnings", ())]
    for key, value in result["metrics"].items():
        plain = key.removeprefix("validation_")
        name = BY_KEY[plain].name if plain in BY_KEY else plain.replace("_", " ")
        rows.append((f"{'test' if plain == key else 'validation'} {name}", f"{value:.4f}"))
    if "majority_accuracy" in result:
        rows.append(("majority class", f"{result['majority_accuracy']:.4f}"))
    if known.get("non_private_accuracy") is not None:
        rows.append(
            (
                "without privacy",
                f"{known['non_private_accuracy']:.4f} (recorded; to measure it again: "
                f"{known['command']})",
            )
        )
    rows.append(("time", f"{result['seconds']:.0f} s"))
    rows.append(("written to", f"{result['run_dir']}{_count_to_keep(result)}"))
    if "seed_warning" in result:
        rows.append(("seed", result["seed_warning"]))
    print_table(target, "Result", rows)
