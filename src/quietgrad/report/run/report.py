"""The report of a run, as a page and as a model card."""

from __future__ import annotations

import math
from typing import Any

from quietgrad.accounting import attack_success
from quietgrad.accounting.rounding import round_up, round_up_to
from quietgrad.events import per_unit, unit_of
from quietgrad.report.page import Section, html
from quietgrad.report.run.facts import RunFacts
from quietgrad.report.run.figures import scores_figure, trade_off_figure
from quietgrad.report.run.ran import estimators, what_ran
from quietgrad.report.run.statement import statement
from quietgrad.report.words import in_words

PRIVACY_HEAD, RAN_HEAD = "## Privacy", "## What ran"
FALSE_ALARMS = 0.01  # at which an attacker's hits are told
SCORES = {"accuracy": "accuracy", "mean_auc": "mean AUC", "token_accuracy": "token accuracy"}


def page_of(facts: RunFacts) -> str:
    """The whole report as HTML."""
    sections = [_scores(facts), *_attacker(facts), _ran(facts), _statement(facts)]
    state = "finished" if facts.finished else "not finished"
    steps = f"{facts.steps} of {facts.planned} steps" if facts.planned else f"{facts.steps} steps"
    return html(
        f"Run {facts.name}",
        f"{'Privacy report' if facts.private else 'Report of a run without privacy'}: {state}, "
        f"{steps}",
        _numbers(facts),
        sections,
        _warnings(facts),
    )


def card_of(facts: RunFacts) -> str:
    """The model card, its section on privacy replaced by the whole statement, and what ran."""
    before, head, after = facts.card.partition(PRIVACY_HEAD)
    if not head:
        before = f"# Run {facts.name}\n\n"
    rest = after.partition("\n## ")
    lines = [PRIVACY_HEAD, "", "| | |", "| --- | --- |"]
    lines += [f"| {_cell(name)} | {_cell(text)} |" for name, text in statement(facts)]
    lines += ["", RAN_HEAD, "", "| | |", "| --- | --- |"]
    lines += [f"| {_cell(name)} | {_cell(text)} |" for name, text in what_ran(facts)]
    if table := estimators(facts):
        heads, *rows = table
        lines += ["", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return before + "\n".join(lines) + "\n" + ("\n## " + rest[2] if rest[1] else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _numbers(facts: RunFacts) -> list[tuple[str, str]]:
    found = []
    epsilon, delta = facts.epsilon, facts.delta
    if epsilon is not None and delta is not None:
        of = per_unit(facts.neighbouring)
        found.append(
            (
                round_up(epsilon, 4),  # as the statement below, and every command
                f"epsilon{of} at delta {round_up_to(delta, 3)}: the privacy spent",
            )
        )
    elif facts.said.not_private is not None:
        found.append(("none", "epsilon: the run gave up its privacy"))
    elif not facts.private:
        found.append(("none", "epsilon: a run without privacy"))
    name, score = _score(facts)
    if score is not None:
        found.append((f"{score:.3f}", name))
    if (guess := facts.result.get("majority_accuracy")) is not None:
        found.append((f"{guess:.3f}", "the most frequent class alone"))
    return found


def _score(facts: RunFacts) -> tuple[str, float | None]:
    metric = str(facts.result.get("metric", "accuracy"))
    final = facts.result.get("metrics", {}).get(metric)
    if final is not None:
        return f"test {SCORES.get(metric, metric)}", float(final)
    for line in reversed(facts.metrics):
        for key, value in line.items():
            if key.startswith("validation_") and key != "validation_records":
                return f"{key.replace('_', ' ')} so far", float(value)
    return "", None


def _warnings(facts: RunFacts) -> list[str]:
    found = []
    if facts.data_declared_public and facts.private:
        found.append("The training records were declared public: no seed was secret, nobody is "
                     "protected by these numbers.")  # fmt: skip
    if facts.audit is not None and facts.audit.get("refuted"):
        found.append(str(facts.audit["verdict"]))
    if facts.ledger is not None and facts.ledger.torn:
        found.append("The ledger's last line was cut off; it is counted as a release.")
    found += [f"{line}." for line in facts.start_warnings]
    return found


def _scores(facts: RunFacts) -> Section:
    result = facts.result
    rows = []
    for key, value in result.get("metrics", {}).items():
        plain = key.removeprefix("validation_")
        part = "test" if plain == key else "validation"
        rows.append((f"{part} {SCORES.get(plain, plain.replace('_', ' '))}", f"{value:.4f}"))
    counted = result.get("scored_records")
    if counted:
        every = result.get("records", {})
        of = ", ".join(
            f"{part} {count:,}"
            + (f" of {every[part]:,}" if every.get(part, count) != count else "")
            for part, count in counted.items()
        )
        equal = any(every.get(part, count) != count for part, count in counted.items())
        rows.append(("records", of + ("; equal texts count once" if equal else "")))
    figure = scores_figure(facts)
    caption = "The score of validation records, which are public"
    caption += "; below it privacy spent, counted from the ledger." if facts.private else "."
    return Section(
        "Result on public records",
        () if rows else ("The run has no result yet.",),
        figure,
        caption,
        rows=rows,
        table=_classes(result.get("class_scores", {}).get("test", {})),
    )


def _classes(scores: Any) -> list[list[str]]:
    classes = scores.get("classes", {})
    if not classes:
        return []
    heads = ["class (test records)", "records", "precision", "recall", "F1"]
    keys = ("precision", "recall", "f1")
    return [heads] + [
        [name, str(each["records"]), *(f"{each[key]:.3f}" for key in keys)]
        for name, each in classes.items()
    ]


def _attacker(facts: RunFacts) -> list[Section]:
    event = facts.event
    if event is None or not facts.private:
        return []
    unit = unit_of(facts.neighbouring)
    hits = math.ceil(1000 * attack_success(event, FALSE_ALARMS) - 1e-9) / 10
    lines = [
        f"Somebody {in_words(event, facts.neighbouring)}.",
        f"Allowed to be wrong about 1 in 100 of the {unit}s that were not there, the attacker "
        f"finds at most {hits:g} in 100 of those that were.",
    ]
    if facts.audit is not None:
        audit = facts.audit
        lines.append(
            f"An audit attacked a run of this configuration with {audit.get('canaries', '?')} "
            f"canaries: {audit['verdict']}"
        )
    caption = (
        "Two errors of an attacker who says whether one "
        f"{unit} was there. Nobody can come below the line."
        + (" Boxes: the audit's attack, with its limits." if facts.audit is not None else "")
    )
    return [Section("What an attacker can do", lines, trade_off_figure(facts), caption, True)]


def _ran(facts: RunFacts) -> Section:
    return Section("What ran", rows=what_ran(facts), table=estimators(facts))


def _statement(facts: RunFacts) -> Section:
    lines = (
        "Every row follows from the run's ledger and configuration. Sign it if you have checked "
        "the assumptions; the fingerprint tells this run from any other.",
    )
    signed = facts.private
    return Section("Privacy statement", lines if signed else (), rows=statement(facts), sign=signed)
