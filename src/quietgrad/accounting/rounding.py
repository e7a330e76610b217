"""Numbers for people that stay sound: a printed epsilon, delta or noise multiplier is never below
the one that was computed.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal


def round_up(value: float, digits: int) -> str:
    """``value`` with ``digits`` decimals, rounded up: ``float`` of the text is at least ``value``.
    "inf" stays; NaN is "nan".
    """
    if not math.isfinite(value):
        return str(value)
    wide = Context(prec=400)  # every float64 fits with all of its digits before the point
    return str(
        Decimal(repr(float(value))).quantize(
            Decimal(1).scaleb(-digits), rounding=ROUND_CEILING, context=wide
        )
    )


def round_up_to(value: float, figures: int) -> str:
    """``value`` with so many significant figures, rounded up."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    rounded = Context(prec=figures, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{rounded.normalize():g}" if 1e-4 <= abs(rounded) < 1e16 else f"{rounded.normalize():e}"
