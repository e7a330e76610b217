"""``quietgrad compare``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.cli.output import console, print_json

if TYPE_CHECKING:
    from quietgrad.comparing.table import Comparison, Run
    from quietgrad.report.comparison import Series

GUARANTEE = (
    "Each epsilon is that of its run alone, were its seed secret: here seeds are known and "
    "the runs add up, so compare on records that are public."
)
USERS = " They are per user, with all records of each."
Protocols = dict[str, dict[float, dict[str, "Series"]]]


def run_compare(path: Path, only_report: bool, shard: str, as_json: bool) -> None:
    """See ``quietgrad compare --help``."""
    from quietgrad.comparing.comparison import read_results, run_comparison, runs_left
    from quietgrad.comparing.table import load_comparison
    from quietgrad.report.comparison import comparison_figure, markdown, rows

    target = console(as_json)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    comparison = load_comparison(path)
    if not only_report:

        def report(run: Run, record: dict[str, Any], left: int) -> None:
            unit = " per user" if "unit" in record else ""
            target.print(
                f"{run.variant}, epsilon {run.epsilon:g}{unit}, rate {run.rate:g}{described(run)}, "
                f"seed {run.seed}: validation {record['curve'][-1][1]:.4f}, "
                f"{record['seconds']:.0f} s; {left} more known"
            )

        run_comparison(comparison, report, _shard(shard))
    results = read_results(comparison)
    missing = runs_left(comparison, results)
    protocols = protocols_of(comparison, results)
    tables = {
        name: rows(chosen, comparison.table.reference, comparison.table.shares)
        for name, chosen in protocols.items()
        if chosen
    }
    guarantee = GUARANTEE + USERS * any("unit" in record for record in results.values())
    words = next((r["metric"] for r in results.values() if "metric" in r), "accuracy")
    if any(protocols.values()):
        comparison_figure(
            {k: v for k, v in protocols.items() if v},
            comparison.table.title,
            comparison.figure,
            bool(comparison.table.eval_records),
        )
    if as_json:
        print_json(
            {
                "missing_runs": missing,
                "guarantee": guarantee,
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
        target.print(f"\n{missing} runs are missing; the same command without --report makes them.")
    target.print(f"\n{guarantee}")
    if tables:
        target.print(f"\nFigure: {comparison.figure}")


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
