"""``quietgrad plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from quietgrad.accounting import RunCount, epsilon_report, selected_epsilon
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.checks import how_many
from quietgrad.cli.accounting import DECLARED_PUBLIC
from quietgrad.cli.beside.chosen import (
    duration,
    embedded,
    print_settings,
    settings_record,
    too_long,
)
from quietgrad.cli.beside.extension import Extension, require_one_length
from quietgrad.cli.output import (
    console,
    fail,
    one_line,
    print_json,
    print_table,
    require_place,
)
from quietgrad.cli.prepared import noise_record, prepare_shown, print_guarantee, say_choice
from quietgrad.cli.progress.stages import stages
from quietgrad.events import RELATIONS
from quietgrad.ledger import planned_course, read_ledger
from quietgrad.training.settings.config import TrainConfig, load_config

TUNING = RunCount(mean=10.0)  # geometric, the default of a comparison's [accounted]


def run_plan(
    config_path: Path | None, overrides: list[str], figure: Path | None, as_json: bool
) -> None:
    """See ``quietgrad plan --help``."""
    target = console(as_json)
    config = load_config(config_path, overrides)
    say_choice(target, config_path)
    if figure is not None:
        _require_choice_to_draw(config, figure)
    prepared = prepare_shown(config, target)
    from quietgrad.training.forecast import forecast

    with stages(target) as say:
        say("timing a step on validation records")
        settings = settings_record(prepared, embedded(config_path, overrides))
        record = forecast(prepared) | {"settings": settings}
    warning = too_long(record)
    if warning is not None:
        record["warning"] = warning
    if prepared.plan is not None:
        record |= noise_record(prepared.plan)
        record["tuning"] = {
            "mean_runs": TUNING.mean,
            "distribution": "geometric",
            "epsilon": selected_epsilon(prepared.plan.event, TUNING, prepared.plan.delta),
        }
    if figure is not None and prepared.plan is not None:
        from quietgrad.training.files.noise_state import draw_choice

        draw_choice(prepared.plan, figure)
        record["figure"] = str(figure)
    if as_json:
        print_json(record)
        return
    if prepared.plan is not None:
        print_guarantee(target, prepared, prepared.plan)
    else:
        nothing = (
            "none: with privacy.enabled=false nothing protects the training records, and the "
            "run has no epsilon"
        )
        print_table(target, "Privacy plan", {"guarantee": nothing})
    print_settings(target, record["settings"])
    _print_clipping(target, record)
    frozen = {}
    if record["trainable_parameters"] < record["parameters"]:
        cached = record["cached_frozen_layers"]
        how = "run once per record, then cached" if cached else "run at every step"
        frozen["frozen layers"] = how
    hours = record["hours_allowed"]
    print_table(
        target,
        "Forecast (measured on one micro-batch of validation records)",
        {
            **frozen,
            "training time": f"{'at most about' if 'users' in record else 'about'} "
            f"{duration(record['predicted_seconds'])} for {how_many(prepared.steps, 'step')}, "
            "evaluations and checks of early steps not counted; "
            f"{hours:g} {'hour is' if hours == 1 else 'hours are'} allowed (training.hours)",
            "memory": f"{_memory(record['predicted_memory_mib'])} for weights and a step",
            "trainable parameters": f"{record['trainable_parameters']:,} of "
            f"{record['parameters']:,}",
            **({} if figure is None else {"figure": str(figure)}),
        },
    )
    if "tuning" in record:
        cost = record["tuning"]["epsilon"]
        per_user = " per user" if "users" in record else ""
        target.print(
            f"tuning: the best of {TUNING.mean:g} such runs on average, and no other looked at, "
            f"would cost epsilon = {round_up(cost, 4)}{per_user} in place of "
            f"{round_up(record['epsilon'], 4)} (quietgrad compare CONFIG --accounted)",
            soft_wrap=True,
        )
    if warning is not None:
        target.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)


def _memory(mib: float) -> str:
    """Of a small model "0 MiB" would be read as none."""
    return f"about {mib:,.0f} MiB" if mib >= 1 else "less than 1 MiB"


@one_line
def run_extension(
    run_dir: Path | None,
    overrides: list[str],
    figure: Path | None,
    extend: Extension,
    as_json: bool,
) -> None:
    """What more steps of a run would cost, from its ledger alone. See ``quietgrad plan --help``."""
    steps, epochs, target = extend
    if run_dir is None or overrides or figure is not None:
        raise ValueError(
            "--extend-steps and --extend-epochs ask about a run: give its directory, as in "
            "quietgrad plan RUN_DIR --extend-epochs 2, without --set and --figure"
        )
    require_one_length(extend)
    from quietgrad.beside.values import require_alike
    from quietgrad.plan.by_step.course import extension_of
    from quietgrad.training.files.run_dir import RunDir

    contents = read_ledger(run_dir)
    if contents.not_private is not None or not contents.header:
        raise ValueError(
            f"{str(run_dir)!r} has no epsilon: "
            + (contents.not_private or "nothing was planned under its ledger")
        )
    course, event = planned_course(contents)
    require_alike(event.beside, True)  # a course has no numbers beside the gradients
    more = extension_of(course, steps, epochs)
    whole = course.then(more).event(event.clipping, event.bands)
    delta = float(contents.header["delta"])
    total = epsilon_report(whole, delta).epsilon
    planned = epsilon_report(course.event(event.clipping, event.bands), delta).epsilon
    spent = 0.0 if contents.event is None else epsilon_report(contents.event, delta).epsilon
    limit = target
    known = [e.target_epsilon for e in contents.extensions if e.target_epsilon is not None]
    if limit is None and known:
        limit = known[-1]
    saved = RunDir(run_dir).config if run_dir.is_dir() else None
    if limit is None and saved is not None and saved.is_file():
        limit = load_config(saved).privacy.target_epsilon
    record: dict[str, Any] = {
        "epsilon": total,
        "epsilon_planned": planned,
        "epsilon_spent": spent,
        "delta": delta,
        "steps": course.steps + more.steps,
        "extension_steps": more.steps,
        "releases": contents.releases,
        "target_epsilon": limit,
        "within_target": limit is None or total <= limit,
        "neighbouring": contents.header["neighbouring"],
    }
    declared = {"data_declared_public": True} if contents.header.get("data_declared_public") else {}
    record |= declared
    if as_json:
        print_json(record)
        return
    above = "" if record["within_target"] else f"; above the target of {limit:g}"
    allow = "" if record["within_target"] else f" --extend-to-epsilon {round_up(total, 2)}"
    how = f"--extend-steps {more.steps}"
    print_table(
        console(False),
        "Extension",
        {
            "spent": f"epsilon = {round_up(spent, 4)} after {contents.releases} releases",
            "planned": f"epsilon = {round_up(planned, 4)} after {course.steps} steps",
            "with the extension": f"epsilon = {round_up(total, 4)} after "
            f"{course.steps + more.steps} steps, at delta = {round_up_to(delta, 3)}"
            f"{above} ({RELATIONS[record['neighbouring']]})",
            **({"data": DECLARED_PUBLIC} if declared else {}),
            "to do it": f"quietgrad train --resume --set training.run_dir={run_dir} {how}{allow}",
        },
    )


def _require_choice_to_draw(config: TrainConfig, figure: Path) -> None:
    """Before any work: that there will be a choice of bands, and a place for its figure."""
    require_place(figure)
    bands = getattr(config.noise, "bands", None)
    if bands != "auto" or not config.privacy.enabled:
        noise = config.to_dict()["noise"]
        fail(
            f"--figure draws a choice of bands, and noise.method={noise['method']!r} with "
            f"noise.bands={bands} leaves none; set noise.method=banded (or noisecurve) and "
            "noise.bands=auto",
            2,
        )


def _print_clipping(target: Console, record: dict[str, Any]) -> None:
    """Engine and estimators that the planner chose, beside what it did not choose."""
    if not record["layers"]:
        return
    rows: dict[str, str] = {}
    for layer in record["layers"]:
        row = f"{how_many(layer['count'], 'parameter')}, {layer['estimator']}"
        if layer["kept"] and layer["estimator"] == "materialized":
            row += ", kept for the sum"
        if layer["multiplications"]:
            row += f", {layer['multiplications']:,} multiplications an example"
        shape = layer["shape"]
        rows[shape] = f"{rows[shape]}\n{row}" if shape in rows else row
    print_table(target, "Norm estimator by shape of parameter", rows)
    rows = {
        "chosen": f"{record['engine']}; {how_many(record['physical_batch_size'], 'example')} "
        f"at a time ({record['why']})"
    }
    for other in record["alternatives"]:
        rows[other["engine"]] = (
            f"{other['ratio']:.2f} times the non-private step, {_memory(other['mib'])} over "
            "parameters and data, "
            f"{how_many(other['physical_batch_size'], 'example')} at a time"
        )
    plain = record["non_private"]
    rows["without privacy"] = (
        f"{plain['seconds']:.3g} s and {_memory(plain['mib'])} for such a batch (modelled)"
    )
    for sketch in record["sketches"]:
        if "noise_multiplier" in sketch:
            rows[f"{sketch['estimator']}, k = {sketch['sketch_dim']}"] = (
                f"would {_saving(sketch['saves'])} and raise the noise multiplier from "
                f"{round_up(record['noise_multiplier'], 4)} to "
                f"{round_up(sketch['noise_multiplier'], 4)}"
            )
    print_table(target, "Engines", rows)


def _saving(share: float) -> str:
    if share > 0:
        return f"save {100 * share:.1f} % of the time"
    return f"take {-100 * share:.1f} % more time"
