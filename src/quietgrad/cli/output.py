"""Tables for people on standard error or output, one JSON object for programs on standard output."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table


def console(as_json: bool) -> Console:
    """Where tables and progress go: standard error if standard output is for JSON."""
    return Console(stderr=as_json, highlight=False)


def print_json(record: dict[str, Any]) -> None:
    """One JSON object; infinite numbers, which JSON lacks, become null (the record's ``reason`` says why)."""
    json.dump(_finite(record), sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(target: Console, title: str, rows: list[tuple[str, str]]) -> None:
    """A two-column table of facts."""
    table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    target.print(table)


def fail(message: str, code: int) -> NoReturn:
    """One line on standard error, and the exit code."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(code)
