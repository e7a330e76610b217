"""The ledger: an append-only file of what was released, each line on disk before its noise is
drawn, with a chain of digests and a count beside it. Nothing private is ever written to it.
"""

from quietgrad.ledger.reader import (
    LEDGER_NAME,
    LedgerContents,
    holds_records,
    ledger_path,
    planned_course,
    read_ledger,
)
from quietgrad.ledger.records import SessionStart
from quietgrad.ledger.writer import LedgerWriter

__all__ = [
    "LEDGER_NAME",
    "LedgerContents",
    "LedgerWriter",
    "SessionStart",
    "holds_records",
    "ledger_path",
    "planned_course",
    "read_ledger",
]
