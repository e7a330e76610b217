"""Correctly rounded normal numbers: round(s z) for z exactly normal, s of any size, entry by entry
from a keystream.

Box and Muller's pair: with U uniform in (0, 1) and A in [-1, 1), r = sqrt(-2 ln U), the numbers r
cos(pi A) and r sin(pi A) are independent and normal. U and A are
*real* numbers: their first bits are the two words of block (0, j) of the stream, the next ones
those of block (1, j), (2, j), ..., read only where they matter. float64 gives s r cos(pi A) with a
known error; where no half-integer lies within that error, the rounding is certain. Where one does
(2e-5 of the entries at s = 2^30) more bits are read, and the interval of what the pair can still
become is computed with as many digits as it takes. So every entry has exactly the distribution P(k)
= Phi((k + 1/2) / s) - Phi((k - 1/2) / s), tails included: nothing is cut off, nothing goes to
delta, and the numbers are the same on every machine, from any place of the stream on.

What is assumed of torch's float64 arithmetic: one rounding in +, -, *, / and sqrt, and at most 4
units in the last place in log, cos and sin (their vector libraries promise 1).

Source: G. E. P. Box and M. E. Muller, A note on the generation of random normal deviates, 1958; the
reading of bits as they are needed is Karney's (Sampling exactly from the normal distribution,
2016).
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from decimal import Decimal

import torch
from torch import Tensor

from quietgrad.noise.sources.keystream import Keystream

CHUNK = 1 << 16  # pairs drawn at a time: their arrays stay in the processor's cache
ULP = 2.0**-53
POSITIVE = (1 << 63) - 1
NARROW, WIDE = 2.0**-8, 5.3  # between these radii ERROR is a bound
ERROR = 2.0**-41
SPARE_DIGITS = 20  # beyond the bits read; ten of them are left to rounding
PI = Decimal(
    "3.141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342117067982148086513282306647"
)


def rounded_normals(stream: Keystream, start: int, count: int, scale: float) -> Tensor:
    """[count] float64 whole numbers: entries start .. start + count - 1 of the stream's round(scale
    z).

    Args:
        stream: where the bits come from.
        start, count: any part of the stream.
        scale: s, the standard deviation in whole numbers. Beyond 2^40 most entries need the slow
            way.
    """
    made = torch.empty(count, dtype=torch.float64, device="cpu")
    first, last = start // 2, (start + count + 1) // 2
    for begin in range(first, last, CHUNK):
        pairs = _pairs(stream, begin, min(CHUNK, last - begin), scale)
        offset = 2 * begin - start
        low, high = max(offset, 0), min(offset + len(pairs), count)
        made[low:high] = pairs[low - offset : high - offset]
    return made


def _pairs(stream: Keystream, first: int, count: int, scale: float) -> Tensor:
    """[2 count]: both numbers of the pairs first .. first + count - 1."""
    words = stream.words(0, first, count)
    uniform = (words[:, 0] & POSITIVE).to(torch.float64).mul_(2.0**-63)
    radius = uniform.log().mul_(-2).sqrt_()
    angle = words[:, 1].to(torch.float64).mul_(math.pi * 2.0**-63)
    scaled = torch.empty(count, 2, dtype=torch.float64, device="cpu")
    length = radius * scale
    torch.mul(angle.cos(), length, out=scaled[:, 0])
    torch.mul(angle.sin_(), length, out=scaled[:, 1])
    rounded = scaled.round()
    distance = scaled.sub_(rounded).abs_()
    # First a constant that bounds the error of nearly all, then each one's own bound for those that
    # fail it.
    doubtful = distance > 0.5 - scale * ERROR
    doubtful |= ((radius < NARROW) | (radius > WIDE))[:, None]
    rows, columns = doubtful.nonzero(as_tuple=True)
    own = error_bound(uniform[rows], radius[rows]) * scale
    unsure = ~(0.5 - distance[rows, columns] > own)  # also where the radius is infinite
    for row, column in zip(rows[unsure].tolist(), columns[unsure].tolist(), strict=True):
        rounded[row, column] = _certain(stream, first + row, column, scale)
    return rounded.view(-1)


def error_bound(uniform: Tensor, radius: Tensor) -> Tensor:
    """What r cos(pi A) can err by: about twice what functions within 4 units in the last place
    give, and the bits of U that were not read.

    The logarithm errs by one unit of U and four of itself, which the root divides by r; cosine,
    angle and products by 18 units of r; U by 2^-63.
    """
    radius = (
        radius.abs()
    )  # the root of -0.0 is -0.0, and an error of minus infinity would pass for none
    return 64 * ULP * radius + 4 * ULP / radius + 2.0**-61 / (uniform * radius)


def _certain(stream: Keystream, pair: int, column: int, scale: float) -> int:
    """One number, from as many bits as it takes."""
    upper, lower = stream.block(0, pair)
    uniform, angle = upper & POSITIVE, lower - ((lower >> 63) << 64)
    bits, level = 63, 0
    function = _cosine if column == 0 else _sine
    while True:
        level += 1
        upper, lower = stream.block(level, pair)
        uniform, angle, bits = (uniform << 64) | upper, (angle << 64) + lower, bits + 64
        if uniform == 0:
            continue
        low, high = _interval(uniform, angle, bits, function, scale)
        if low == high:
            return low


def _interval(
    uniform: int, angle: int, bits: int, function: Callable[[Decimal], Decimal], scale: float
) -> tuple[int, int]:
    """Smallest and largest rounding that the bits read so far leave open: U in [uniform, uniform +
    1] / 2^bits, A in [angle, angle + 1] / 2^bits.
    """
    with decimal.localcontext() as context:
        context.prec = bits // 3 + SPARE_DIGITS
        one = Decimal(1 << bits)
        outer = (-2 * (Decimal(uniform) / one).ln()).sqrt()
        inner = (
            (-2 * (Decimal(uniform + 1) / one).ln()).sqrt()
            if uniform + 1 < 1 << bits
            else Decimal(0)
        )
        middle = (outer + inner) / 2 * function(PI * Decimal(2 * angle + 1) / (2 * one))
        open_still = (
            (outer - inner) / 2 + outer * PI / (2 * one) + Decimal(10) ** (10 - context.prec)
        )
        ends = (Decimal(scale) * (middle - open_still), Decimal(scale) * (middle + open_still))
        low, high = (
            int((end + Decimal("0.5")).to_integral_value(decimal.ROUND_FLOOR)) for end in ends
        )
        return low, high


def _sine(x: Decimal) -> Decimal:
    return _series(x, x, 1)


def _cosine(x: Decimal) -> Decimal:
    return _series(x, Decimal(1), 0)


def _series(x: Decimal, term: Decimal, power: int) -> Decimal:
    """Taylor's series for |x| <= pi, until its terms no longer count."""
    total, square, least = term, x * x, Decimal(10) ** -decimal.getcontext().prec
    while abs(term) > least:
        power += 2
        term = -term * square / (power * (power - 1))
        total += term
    return total
