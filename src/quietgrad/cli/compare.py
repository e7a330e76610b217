"""``quietgrad compare``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.checks import how_many
from quietgrad.cli.output import console, print_json, print_table
from quietgrad.cli.progress.counted import Counted
from quietgrad.cli.progress.stages import stages
from quietgrad.events import RELATIONS
from quietgrad.ledger.earlier import start_row
from quietgrad.report.page import require_page_place, write_page
from quietgrad.report.png import require_figure_place

if TYPE_CHECKING:
    from quietgrad.comparing.table import Comparison, Run
    from quietgrad.report.comparison import Series

GUARANTEE = (
    "Each epsilon is that of its run alone, were its seed secret: here seeds are known and "
    "the runs add up, so compare on records that are public."
)
TYPICAL_DELTA = 1e-5
USERS = " They are per user, with all records of each."
Protocols = dict[str, dict[float, dict[str, "Series"]]]


def run_compare(
    path: Path, only_report: bool, shard: str, html: Path | None, as_json: bool
) -> None:
    """See ``quietgrad compare --help``."""
    part = _shard(shard)
    if html is not None:
        require_page_place(html)
    from quietgrad.comparing.comparison import read_results, run_comparison, runs_left
    from quietgrad.comparing.table import load_comparison
    from quietgrad.report.comparison import comparison_figure, markdown, rows

    target = console(as_json)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    comparison = load_comparison(path)
    require_figure_place(comparison.figure, "comparison.figure")
    if not only_report:

        def report(run: Run, record: dict[str, Any], left: int) -> None:
            unit = " per user" if "unit" in record else ""
            target.print(
                f"{run.variant}, epsilon {run.epsilon:g}{unit}, rate {run.rate:g}{described(run)}, "
                f"seed {run.seed}: validation {record['curve'][-1][1]:.4f}, "
                f"{record['seconds']:.0f} s; {how_many(left, 'run')} left, beside any that scores "
                "will choose",
                markup=False,
                soft_wrap=True,
            )

        def progress(made: int, known: int, done: int, steps: int) -> None:
            # Runs that have as many steps as this one, or nearly.
            shown.count(made * steps + done, known * steps, f" (run {made + 1} of {known})")

        with Counted(target, "comparing") as shown:
            run_comparison(comparison, report, part, shown.say, progress)
    results = read_results(comparison)
    missing = runs_left(comparison, results)
    protocols = protocols_of(comparison, results)
    tables = {
        name: rows(chosen, comparison.table.reference, comparison.table.shares)
        for name, chosen in protocols.items()
        if chosen
    }
    guarantee = GUARANTEE + USERS * any("unit" in record for record in results.values())
    cost = cost_of_tuning(comparison)
    words = next((r["metric"] for r in results.values() if "metric" in r), "accuracy")
    if any(protocols.values()):
        comparison.figure.parent.mkdir(parents=True, exist_ok=True)  # as that of the results is
        comparison_figure(
            {k: v for k, v in protocols.items() if v},
            comparison.table.title,
            comparison.figure,
            bool(comparison.table.eval_records),
        )
    if html is not None:
        from quietgrad.report.sides import comparison_page

        ends = bool(comparison.table.eval_records)
        facts = [line for line in (guarantee, cost) if line]
        missed = f"Missing: {how_many(missing, 'run')}." if missing else ""
        shares = comparison.table.shares
        page = comparison_page(
            comparison.table.title, tables, protocols, shares, facts, missed, ends
        )
        write_page(html, page)
    if as_json:
        print_json(
            {
                **({} if html is None else {"html": str(html)}),
                "missing_runs": missing,
                "guarantee": guarantee,
                **({"choice": cost} if cost else {}),
                "figure": str(comparison.figure),
                "tables": {
                    k: markdown(v, comparison.table.shares, words) for k, v in tables.items()
                },
            }
        )
        return
    for name, table in tables.items():
        target.print(f"\n{name}\n", markup=False)
        target.print(markdown(table, comparison.table.shares, words), markup=False, soft_wrap=True)
    if missing:
        target.print(
            f"\nMissing: {how_many(missing, 'run')}; the same command without --report goes on."
        )
    target.print(f"\n{guarantee}")
    if cost:
        target.print(f"\n{cost}", markup=False, soft_wrap=True)
    if tables:
        target.print(f"\nFigure: {comparison.figure}")
    if html is not None:
        target.print(f"Page: {html}", markup=False)


def run_accounted(
    path: Path, only_report: bool, shard: str, html: Path | None, as_json: bool
) -> None:
    """See ``quietgrad compare --help``."""
    if html is not None:
        raise ValueError(
            f"--html={str(html)!r} with --accounted: one run is released, and its page is of "
            "`quietgrad report`; leave --html out"
        )
    if shard != "0/1":
        raise ValueError(
            f"--shard {shard} with --accounted: the number of runs is one secret draw; leave "
            "--shard out"
        )
    from quietgrad.comparing.accounted import choose, folder_of, read_choice
    from quietgrad.comparing.table import load_comparison

    target = console(as_json)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    comparison = load_comparison(path, accounted=True)

    def say(facts: dict[str, Any]) -> None:
        selection = facts["selection"]
        target.print(
            f"{_promise(facts)}; noise multipliers "
            f"{' to '.join(sorted({round_up(s, 4) for s in selection['noise_multipliers']}))}. "
            "Neither the number of runs nor the runs that lose are shown; after a stop the same "
            "command goes on.",
            markup=False,
            soft_wrap=True,
        )
        for line in facts.get("start_warnings", ()):
            target.print(line, markup=False, soft_wrap=True)

    if only_report:
        result = read_choice(comparison)
    else:
        with contextlib.ExitStack() as before:
            begins = before.enter_context(stages(target))

            def ready(facts: dict[str, Any]) -> None:
                before.close()  # from here on, how far it is would tell how many runs were drawn
                say(facts)

            result = choose(comparison, ready, begins)
    if result is None:
        raise ValueError(
            f"--report: nothing was released to {str(folder_of(comparison))!r} yet; leave "
            "--report out"
        )
    if as_json:
        print_json(result)
        return
    if result["selected"] is None:
        target.print(
            "No run was drawn, so there is none to choose from. That is the outcome: drawing again "
            "would cost the epsilon again. Other distributions draw at least one.",
            soft_wrap=True,
        )
        return
    key = result["metric"]
    rows = {
        "best setting": "\n".join(f"{k} = {v}" for k, v in result["selected"].items()),
        f"validation {key}": f"{result['metrics'][f'validation_{key}']:.4f}",
        f"test {key}": f"{result['metrics'][key]:.4f}",
        "guarantee": _promise(result),
        **start_row(result),
        "not covered": "the number of runs and those that lost: removed",
        "model": str(folder_of(comparison) / "model"),
    }
    print_table(target, "The best of a random number of runs", rows)


def _promise(facts: dict[str, Any]) -> str:
    selection = facts["selection"]
    declared = "; the records were declared public" if facts["data_declared_public"] else ""
    return (
        f"epsilon = {round_up(facts['epsilon'], 4)} at delta = {round_up_to(facts['delta'], 3)} "
        f"({RELATIONS[facts['neighbouring']]}){declared}, for all runs and the choice of the best "
        f"of a random number of them ({selection['distribution']}, {selection['mean_runs']:g} on "
        f"average) with settings drawn from {selection['candidates']}"
    )


def cost_of_tuning(comparison: Comparison) -> str:
    """What the choice would cost on private records; nothing where there is none."""
    from quietgrad.accounting import noise_multiplier, selected_epsilon
    from quietgrad.comparing.table import AccountedTable
    from quietgrad.events import PoissonGaussian

    table, search = comparison.table, comparison.search
    tried = len(table.learning_rates) if search is None else search.trials
    settings = tried * len(comparison.variants)
    if settings < 2:
        return ""
    one, delta = table.epsilons[0], TYPICAL_DELTA
    # One Gaussian release stands for a run: compositions are nearly that.
    run = PoissonGaussian(noise_multiplier(one, delta, sample_rate=1.0, steps=1), 1.0, 1)
    whole = selected_epsilon(run, AccountedTable(float(min(settings, 10_000))).count, delta)
    return (
        f"No epsilon counts the choice among these {settings} settings. On private records, runs "
        f"at epsilon {one:g} each and the choice of the best of {settings} on average would cost "
        f"about epsilon {round_up_to(whole, 3)} (delta {delta:g}): quietgrad compare --accounted, "
        "docs/tuning.md."
    )


def described(run: Run) -> str:
    """The settings that a search found, beside the rate."""
    return "".join(
        f", {key.rpartition('.')[2]} {value:g}"
        if isinstance(value, float)
        else f", {key.rpartition('.')[2]} {value}"
        for key, value in run.settings
    )


def protocols_of(comparison: Comparison, results: Mapping[Run, dict[str, Any]]) -> Protocols:
    """Protocol -> epsilon -> variant -> finished runs; epsilons where the reference or a variant
    has none are left out.
    """
    from quietgrad.comparing.comparison import chosen_run
    from quietgrad.comparing.table import Run
    from quietgrad.report.comparison import Series

    names = ("tuned",) if comparison.search is not None else ("one rate", "tuned")
    if comparison.search is None and len(comparison.table.learning_rates) == 1:
        names = ("one rate",)  # there is nothing to tune
    found: Protocols = {name: {} for name in names}
    for protocol, chosen in found.items():
        for epsilon in comparison.table.epsilons:
            variants = {}
            for variant in comparison.variants:
                one = Run(variant, epsilon, comparison.table.protocol_rate, 0)
                best = (
                    one
                    if protocol == "one rate"
                    else chosen_run(comparison, results, variant, epsilon)
                )
                runs = {
                    r.seed: v
                    for r, v in results.items()
                    if best is not None and replace(r, seed=0) == best
                }
                if best is not None and runs:
                    variants[variant] = Series(
                        best.rate,
                        {s: [(int(a), float(b)) for a, b in v["curve"]] for s, v in runs.items()},
                        {s: v["test"] for s, v in runs.items()},
                        described(best).removeprefix(", "),
                        next(iter(runs.values())).get("metric", "accuracy"),
                    )
            if comparison.table.reference in variants:
                chosen[epsilon] = variants
    return found


def _shard(text: str) -> tuple[int, int]:
    first, slash, count = text.partition("/")
    if not slash or not first.isdigit() or not count.isdigit() or int(first) >= int(count):
        raise ValueError(
            f"--shard {text!r} must be I/N with I from 0 to N - 1, such as 0/2 in one process and "
            "1/2 in another"
        )
    return int(first), int(count)
