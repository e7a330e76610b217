"""``quietgrad report``. It never imports torch."""

from __future__ import annotations

from pathlib import Path

from quietgrad.cli.output import console, one_line, print_json, print_table
from quietgrad.durable import write_whole


@one_line
def run_report(
    run_dir: Path, html: Path | None, card: Path | None, audit: Path | None, as_json: bool
) -> None:
    """See ``quietgrad report --help``."""
    from quietgrad.report.page import require_page_place, write_page
    from quietgrad.report.run.facts import read_run
    from quietgrad.report.run.report import card_of, page_of
    from quietgrad.report.run.statement import statement

    target = console(as_json)
    if card is not None:
        _require_card_place(card)
    if html is not None:
        require_page_place(html)
    facts = read_run(run_dir, audit)
    rows = statement(facts)
    written = {}
    if html is not None:
        write_page(html, page_of(facts))
        written["html"] = str(html)
    if card is not None:
        write_whole(card, card_of(facts).encode())
        written["card"] = str(card)
    if as_json:
        print_json(
            {
                "run_dir": str(run_dir),
                "private": facts.private,
                "epsilon": facts.epsilon,
                "delta": facts.delta,
                "steps": facts.steps,
                "metrics": dict(facts.result.get("metrics", {})),
                "fingerprint": None if facts.ledger is None else facts.ledger.complete.chain,
                "statement": [{"what": what, "text": text} for what, text in rows],
                **written,
            }
        )
        return
    shown: dict[str, str] = {}
    for what, text in rows:
        shown[what] = f"{shown[what]}\n{text}" if what in shown else text
    print_table(target, "Privacy statement", shown)
    for path in written.values():
        target.print(f"Written: {path}", markup=False, soft_wrap=True)


def _require_card_place(card: Path) -> None:
    """Before any work, and before a ledger or a result would be written over."""
    from quietgrad.report.page import CARD_MARKS, require_ours

    if card.suffix.lower() != ".md":
        raise ValueError(f"--card={str(card)!r} must end in .md: a card is a page of Markdown")
    if not card.absolute().parent.is_dir():
        raise ValueError(f"--card={str(card)!r}: no such folder; make it first")
    require_ours(card, "--card", CARD_MARKS)
