"""What a run's directory says of it: public facts alone, read without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quietgrad.accounting import epsilon_report
from quietgrad.durable import whole_lines
from quietgrad.events import PrivacyEvent
from quietgrad.ledger import LEDGER_NAME, LedgerContents, ledger_path
from quietgrad.ledger.earlier import start_warnings
from quietgrad.ledger.reader import Scan, planned_course, scan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AUDIT = "audit.json"
COUNT_BELOW_THE_NORM = "records-below-the-clipping-norm"  # ``AdaptiveClipping.name``, without torch


@dataclass(frozen=True)
class RunFacts:
    """One run.

    Attributes:
        name: of its directory.
        config: tables of config.toml.
        environment: versions and machine.
        forecast: engine per layer, time and memory as expected; empty where nothing says.
        result: of a finished run; empty before.
        metrics: evaluations, in order.
        ledger: what it says, and its digest; None for a run without privacy, and for the best of
            several runs, which keeps none.
        audit: what ``quietgrad audit --json`` said; None where there was none.
        card: the model card of the saved model, "" where there is none.
    """

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...] = ()
    ledger: Scan | None = None
    audit: Mapping[str, Any] | None = None
    card: str = field(default="", repr=False)
    forecast: Mapping[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> LedgerContents:
        """The ledger's contents; empty ones where there is none."""
        return LedgerContents() if self.ledger is None else self.ledger.contents

    @property
    def private(self) -> bool:
        """Whether an epsilon can be claimed at all."""
        if self.said.not_private is not None:
            return False
        return self.ledger is not None or bool(self.result.get("private"))

    @property
    def event(self) -> PrivacyEvent | None:
        """All releases so far; None where there was none, or no ledger says."""
        return self.said.event

    @property
    def steps(self) -> int:
        """Steps made; of a private run the releases that its ledger counts."""
        if self.ledger is not None:
            return self.said.releases
        last = self.metrics[-1].get("step", 0) if self.metrics else 0
        return int(self.result.get("steps", last))

    @property
    def planned(self) -> int | None:
        """Steps in all."""
        if self.ledger is not None and self.said.header:
            return planned_course(self.said)[0].steps
        planned = self.result.get("planned_steps", self.setting("training", "steps"))
        return None if planned is None else int(planned)

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return bool(self.result)

    @property
    def delta(self) -> float | None:
        """The delta of the claim."""
        return self.said.header.get("delta", self.result.get("delta"))

    @property
    def epsilon(self) -> float | None:
        """Spent so far, an upper bound, from the ledger; None where none can be claimed."""
        if not self.private or self.delta is None:
            return None
        if self.ledger is None:
            return self.result.get("epsilon")
        return 0.0 if self.event is None else epsilon_report(self.event, self.delta).epsilon

    @property
    def neighbouring(self) -> str:
        """The relation that epsilon is about."""
        said = self.said.header.get("neighbouring", self.result.get("neighbouring"))
        return str(said or "add-remove")

    @property
    def data_declared_public(self) -> bool:
        """Whether the records were declared to need no protection."""
        said = {**self.result, **self.said.header}
        return bool(said.get("data_declared_public"))

    @property
    def start_warnings(self) -> list[str]:
        """What is to be said of weights of earlier runs that it began with; also of a run that has
        no result yet.
        """
        found = [*self.result.get("start_warnings", ()), *start_warnings(self.said.started_from)]
        return list(dict.fromkeys(found))

    @property
    def norms(self) -> tuple[float, float] | None:
        """Least and largest clipping norm of the planned steps, where a ledger says; of one that
        follows what was released, the first.
        """
        if self.said.course is not None:
            planned = [settings.max_grad_norm for settings in self.said.course.settings]
            return min(planned), max(planned)
        norm = self.said.header.get("max_grad_norm")
        return (float(norm), float(norm)) if isinstance(norm, int | float) else None

    @property
    def norm_adapts(self) -> bool:
        """Whether the clipping norm follows a noisy count of the records below it."""
        beside = self.said.header.get("event", {}).get("beside", ())
        return any(side.get("name") == COUNT_BELOW_THE_NORM for side in beside)

    def setting(self, table: str, key: str, default: Any = None) -> Any:
        """A key of the run's configuration."""
        return self.config.get(table, {}).get(key, default)


def read_run(run_dir: str | Path, audit: str | Path | None = None) -> RunFacts:
    """Reads a run's directory.

    Args:
        run_dir: as ``quietgrad train`` wrote it.
        audit: what ``quietgrad audit --json`` printed; None takes RUN_DIR/audit.json if it is
            there.

    Raises:
        ValueError: if there is no run, its ledger is damaged or gone, or the audit is of another
            one.
    """
    path = Path(run_dir)
    config = path / "config.toml"
    if not config.is_file():
        raise ValueError(
            f"RUN_DIR={str(run_dir)!r} holds no run (no config.toml); pass a directory that "
            f"`quietgrad train` wrote, see `quietgrad runs`"
        )
    try:
        tables = tomllib.loads(config.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"RUN_DIR={str(run_dir)!r}: config.toml cannot be read: {error}") from None
    ledger = scan(ledger_path(path)) if (path / LEDGER_NAME).is_file() else None
    card = path / "model" / "README.md"
    facts = RunFacts(
        path.resolve().name,
        tables,
        _json(path / "environment.json"),
        _json(path / "result.json"),
        tuple(whole_lines(path / "metrics.jsonl")),
        ledger,
        _audit_of(path, audit),
        card.read_text(encoding="utf-8") if card.is_file() else "",
        _json(path / "forecast.json"),
    )
    if ledger is None and facts.result.get("private") and "selection" not in facts.result:
        raise ValueError(
            f"RUN_DIR={str(run_dir)!r} has the result of a private run and not its ledger, which "
            "alone says what was released: nothing can be claimed; restore ledger.jsonl and its "
            "count file from the same moment"
        )
    if facts.audit is not None:
        _require_same_mechanism(facts, facts.audit, audit or path / AUDIT)
    if ledger is None and not facts.result and not facts.metrics:
        raise ValueError(
            f"RUN_DIR={str(run_dir)!r} holds no ledger, no metrics and no result: nothing was "
            "released or measured there yet; report a run that has begun"
        )
    return facts


def _audit_of(path: Path, given: str | Path | None) -> Mapping[str, Any] | None:
    file = path / AUDIT if given is None else Path(given)
    if given is None and not file.is_file():
        return None
    if not file.is_file():
        raise ValueError(f"--audit={str(file)!r}: no such file")
    found = _json(file)
    if not {"event", "points", "lower_bound", "verdict"} <= found.keys():
        raise ValueError(
            f"--audit={str(file)!r} is not what `quietgrad audit --json` prints; write that to a "
            "file, and name it"
        )
    return found


def _require_same_mechanism(facts: RunFacts, audit: Mapping[str, Any], file: str | Path) -> None:
    """Canaries are records more, so rate and noise differ a little; what else a mechanism is may
    not.
    """
    header = facts.said.header
    own, other = header.get("event", {}), audit["event"]
    planned = facts.planned
    for name, ours, theirs in (
        ("steps", planned, other.get("steps")),
        ("bands", own.get("bands"), other.get("bands")),
        ("clipping", own.get("clipping"), other.get("clipping")),
    ):
        if facts.ledger is None or ours != theirs:
            raise ValueError(
                f"--audit={str(file)!r} is of another mechanism: its {name} is {theirs!r}, the "
                f"run's {ours!r}; audit the run's own config.toml"
            )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{str(path)!r} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}
