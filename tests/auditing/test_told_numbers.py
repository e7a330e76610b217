"""What an audit tells: a claim is never rounded below the epsilon that is claimed, and what was
shown never above the bound that the errors give.
"""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from quietgrad.accounting.rounding import round_down, round_down_to
from quietgrad.auditing.report import AuditReport, Finding, Guesses
from quietgrad.events import PoissonGaussian

EVENT = PoissonGaussian(1.0, 0.1, 10)


def report_of(claimed: float, shown: float) -> AuditReport:
    seen = Guesses(90, 100, 100)
    finding = Finding("whole run", "guesses", claimed, shown, shown, seen)
    return AuditReport(
        "one run", "gradient", claimed, 1.2345e-5, 0.95, 100, "add-remove", EVENT, (finding,)
    )


def numbers_in(text: str) -> list[Decimal]:
    return [Decimal(found) for found in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)]


@pytest.mark.parametrize(("claimed", "shown"), [(3.00004, 2.00006), (1.23449, 0.999996)])
def test_a_verdict_rounds_claims_up_and_bounds_down(claimed: float, shown: float) -> None:
    """3.00004 was told as 3, an upper bound, and 2.00006 as above 2.0001."""
    lower, delta, _, upper = numbers_in(report_of(claimed, shown).verdict)
    assert upper >= Decimal(repr(claimed)) and lower <= Decimal(repr(shown))
    assert delta >= Decimal("1.2345e-5")


def test_a_refuted_claim_is_told_below_what_was_shown() -> None:
    report = report_of(1.00004, 1.0002)
    claimed, shown, _ = numbers_in(report.verdict)
    assert report.refuted and Decimal("1.00004") <= claimed < shown <= Decimal("1.0002")


def test_rounding_down() -> None:
    assert round_down(0.99996, 4) == "0.9999" and round_down(2.5, 4) == "2.5000"
    assert round_down_to(0.99996, 4) == "0.9999" and round_down_to(1234.9, 4) == "1234"
    assert round_down(float("inf"), 4) == "inf" and round_down_to(0.0, 3) == "0"
