"""``quietgrad plan RUN_DIR --extend-epochs 2``: what more steps of a run would cost, from its
ledger alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quietgrad.accounting import epsilon_report
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.cli.output import console, one_line, print_json, print_table
from quietgrad.events import RELATIONS
from quietgrad.ledger import planned_course, read_ledger

ExtendSteps = Annotated[
    int | None, typer.Option("--extend-steps", help="More steps after the last planned one.")
]
ExtendEpochs = Annotated[
    float | None, typer.Option("--extend-epochs", help="The same in passes over the records.")
]
ExtendTo = Annotated[
    float | None,
    typer.Option(
        "--extend-to-epsilon", help="A new target for the whole run, in place of the first."
    ),
]


@one_line
def run_extension(
    run_dir: Path | None,
    overrides: list[str],
    figure: Path | None,
    extend: tuple[int | None, float | None, float | None],
    as_json: bool,
) -> None:
    """See ``quietgrad plan --help``."""
    steps, epochs, target = extend
    if run_dir is None or overrides or figure is not None:
        raise ValueError(
            "--extend-steps and --extend-epochs ask about a run: give its directory, as in "
            "quietgrad plan RUN_DIR --extend-epochs 2, without --set and --figure"
        )
    from quietgrad.plan.by_step.course import extension_of
    from quietgrad.training.files.run_dir import RunDir
    from quietgrad.training.settings.config import load_config

    contents = read_ledger(run_dir)
    if contents.not_private is not None or not contents.header:
        raise ValueError(
            f"{str(run_dir)!r} has no epsilon: "
            + (contents.not_private or "nothing was planned under its ledger")
        )
    course, event = planned_course(contents)
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
            "to do it": f"quietgrad train --resume --set training.run_dir={run_dir} {how}{allow}",
        },
    )
