"""A comparison as one page: its tables, and a figure of every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from quietgrad.report.comparison import COLOURS, Row, Series, cells, draw_series
from quietgrad.report.page import Section, html
from quietgrad.report.svg import GRID, INK, STYLE, svg

Epsilons = Mapping[float, Mapping[str, Series]]
MEANING = {
    "one rate": "Every variant at the same learning rate.",
    "tuned": "Every variant with the learning rate, or what else was searched, that was best for "
    "it on validation records.",
}
COLUMNS = (
    "Minus reference: the difference from the first variant, seed by seed. Steps to a share: when "
    "the mean score first reaches that share of what the first variant ends with; speed-up: the "
    "first variant's steps over these."
)


def comparison_page(
    title: str,
    tables: Mapping[str, Sequence[Row]],
    protocols: Mapping[str, Epsilons],
    shares: Sequence[float],
    facts: Sequence[str],
    missing: str = "",
    end_apart: bool = False,
) -> str:
    """The page.

    Args:
        title: of the comparison; "" where it has none.
        tables: protocol -> rows.
        protocols: protocol -> epsilon -> variant -> runs.
        shares: of the reference's score, whose steps the tables tell.
        facts: what the epsilons cover and what they do not.
        missing: says that runs are missing; "" where none is.
        end_apart: see ``comparison_figure``.
    """
    sections = []
    for name, rows in tables.items():
        shown = protocols[name]
        metric = next((s.metric for v in shown.values() for s in v.values()), "accuracy")
        caption = "Validation score against steps: mean over seeds, and its 95 % interval."
        if end_apart:
            caption += " Dots at the end: on all validation records."
        figure = _figure(shown, end_apart)
        table = cells(rows, shares, metric)
        lines = [line for line in (MEANING.get(name, ""), COLUMNS) if line]
        sections.append(Section(name.capitalize(), lines, figure, caption, table=table))
    sections.append(Section("What the numbers say, and what not", facts))
    found = sum(row.seeds for rows in tables.values() for row in rows)
    numbers = [(str(found), "runs in the tables")] if found else []
    warnings = [missing] if missing else []
    title = title or "Variants side by side"
    return html(title, "Comparison of private training runs", numbers, sections, warnings)


def _figure(epsilons: Epsilons, end_apart: bool) -> str:
    with matplotlib.rc_context(STYLE):
        size = (6.4, 2.7 * len(epsilons) + 0.2)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(epsilons), 1, squeeze=False)[:, 0]
        for axis, (epsilon, variants) in zip(axes, epsilons.items(), strict=True):
            colours = (INK, *COLOURS[1:]) * (1 + len(variants) // len(COLOURS))
            for (variant, series), colour in zip(variants.items(), colours, strict=False):
                draw_series(axis, series, variant, colour, end_apart)
            axis.set_title(f"epsilon {epsilon:g}", fontsize=10)
            axis.set_ylabel(f"validation {next(iter(variants.values())).metric}")
            axis.grid(color=GRID, linewidth=0.6)
            axis.legend(fontsize=8, loc="lower right", frameon=False)
        axes[-1].set_xlabel("step")
        return svg(figure)
