"""Numbers for people that stay sound: a printed epsilon, delta or noise multiplier is never below
the one that was computed, and what an audit shows, a lower bound, never above it.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def round_up(value: float, digits: int) -> str:
    """``value`` with ``digits`` decimals, rounded up: ``float`` of the text is at least ``value``.
    "inf" stays; NaN is "nan".
    """
    return _with_decimals(value, digits, ROUND_CEILING)


def round_down(value: float, digits: int) -> str:
    """``value`` with ``digits`` decimals, rounded down: of a lower bound."""
    return _with_decimals(value, digits, ROUND_FLOOR)


def round_up_to(value: float, figures: int) -> str:
    """``value`` with so many significant figures, rounded up."""
    return _with_figures(value, figures, ROUND_CEILING)


def round_down_to(value: float, figures: int) -> str:
    """``value`` with so many significant figures, rounded down: of a lower bound."""
    return _with_figures(value, figures, ROUND_FLOOR)


def _with_decimals(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    wide = Context(prec=400)  # every float64 fits with all of its digits before the point
    exact = Decimal(repr(float(value)))
    return str(exact.quantize(Decimal(1).scaleb(-digits), rounding=rounding, context=wide))


def _with_figures(value: float, figures: int, rounding: str) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=figures, rounding=rounding).create_decimal(repr(float(value)))
    return f"{rounded.normalize():g}" if 1e-4 <= abs(rounded) < 1e16 else f"{rounded.normalize():e}"
