"""What rounding can do to a norm, and the certified upper bound that gradients are divided by.

Clipping bounds a record's contribution only if its norm is not underestimated, and a norm taken
from factors is a difference of large products: where the contributions of a record's positions
cancel, float32 leaves nothing of it. So every estimate comes with what it may be wrong by
(``Measured``), and

    cert = sqrt(squared + slack) + margin + floor        at least the norm of what the sum will hold
    of this record

Symbols (per example): M = sum_t g_t a_t^T the gradient, S = sum_t |a_t| |g_t| its *spread* (S >=
|M|, far above it where positions cancel), u the unit roundoff, gamma(n) = n u (any order of a sum
of n products errs by at most gamma(n) times the sum of absolute values: Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., section 3.1), eta the smallest normal number (products
below it may become zero).

    slack    of a squared norm: ghost norms err by up to gamma(p + d + ...) S^2 (``ghost``), any
             norm by the rounding of its own sum of squares
    margin   of a norm: the sum is formed by another product than the one that was measured; either
             errs by gamma(t) S
    floor    of a norm: squares of entries below sqrt(eta) may have become zero

    least    of a norm: a model rounds too, and otherwise beside a longer record (attention's
             softmax over more keys). A few roundings of each factor move M by a few u S, whatever
             is left of M. Where exact norms divide, no norm below ``OF_SPREAD`` u S does, u that of
             float32; in half precision, of sketches too, it is more (``coarseness``)

All norms are divided by (1 + SHARE) estimates, so that a contribution is the same function of its
record whichever way it was measured: a bound that depended on the way would make it depend on who
else is in the batch, through the choice of the way. Where ``cert`` is above that, the example is
doubtful and is measured again as its own gradient (``bookkeeping``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor

from quietgrad.events import LARGEST_COUNTED_RATIO
from quietgrad.sending import numbers_beside

# By how much a measured norm is enlarged, always: what a certified bound may exceed the estimate
# by.
SHARE = 2.0**-10

# A sum over more positions is cut into blocks of so many, so that its rounding stays in bounds at
# any length. No more than 128: libraries add up a longer block in parts of a size that follows from
# its length, so that a record would round otherwise where it is padded to a longer one.
LONGEST_CHAIN = 128

# In units of u S: no exact norm below that divides. A record whose positions cancel by more than a
# factor of 8192 in float32 is shortened further, and what the model's own rounding may do to it
# stays below a thousandth of C.
OF_SPREAD = 2.0**11

# The same as a share of S, in float64 too: half precision may stand below it.
LEAST_SHARE = OF_SPREAD * 2.0**-24

# Times ``least_times``, in half precision alone, and times the root of the sum of squares of the
# terms' norms, which is the norm of a gradient whose terms know nothing of each other: no norm
# below that divides.
OF_TERMS = 2.0**-8

# Of C: a record whose rounding may be more is formed apart from its micro-batch.
# Its partial sums are far above C, and what others add to them within one product would round as
# coarsely (62 C in an embedding that is used twice).
APART = 2.0**-5

# Positions whose blocks are added one after the other; longer sums are pairs of such runs.
LONGEST_RUN = 8 * LONGEST_CHAIN

# Entries whose squares are added up in the working precision; the rest of a sum of squares is done
# in float64.
SQUARES_AT_ONCE = 512

# Of a GPU's matrix units, against the model of one rounding a product and one an addition.
GPU_FACTOR = 2.0

SMALLEST_NORMAL = 2.0**-126

# A sketched norm may be this much too long and count for it, R up to 2. Beside sketches, what the
# sum is off by counts as often (docs/privacy/sketches.md).
MOST_COUNTED = LARGEST_COUNTED_RATIO**0.5

# A longer gradient counts as not finite: its square would overflow in the working precision.
LARGEST_NORM = 2.0**63


@dataclass(frozen=True)
class Measured:
    """Squared norms of one parameter's per-example gradients with what they may be wrong by.
    Private.

    Attributes:
        squared: [b] float64, estimates of the squared norms.
        slack: [b] float64, at most so much do the squared norms exceed ``squared``.
        margin: [b] float64, norm of the difference between what was measured and what the sum will
            hold; 0 where the same numbers serve both.
        least: [b] float64, ``OF_SPREAD`` u S; None for gradients of which nothing more is known.
        terms: [b] float64, root of the sum of squares of the terms' norms (``Spread.terms``), or
            None.
    """

    squared: Tensor
    slack: Tensor
    margin: Tensor
    least: Tensor | None = None
    terms: Tensor | None = None


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of the precision in which sums are accumulated."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def smallest_normal(dtype: torch.dtype) -> float:
    """eta: products below it may be flushed to zero."""
    return 2.0**-1022 if dtype == torch.float64 else SMALLEST_NORMAL


@overload
def gamma(terms: float, like: Tensor, dtype: torch.dtype) -> float: ...
@overload
def gamma(terms: float | Tensor, like: Tensor, dtype: torch.dtype) -> float | Tensor: ...
def gamma(terms: float | Tensor, like: Tensor, dtype: torch.dtype) -> float | Tensor:
    """Relative error of a sum of so many products, in units of the sum of their absolute values."""
    return 1.01 * (terms + 4.0) * unit_roundoff(dtype) * (GPU_FACTOR if like.is_cuda else 1.0)


def chain(terms: int) -> int:
    """Longest path of additions through a sum over so many positions."""
    return terms if terms <= LONGEST_CHAIN else LONGEST_CHAIN + -(-terms // LONGEST_CHAIN)


def blocks(terms: int) -> Iterator[slice]:
    """The blocks that a sum over so many positions is cut into."""
    for start in range(0, terms, LONGEST_CHAIN):
        yield slice(start, start + LONGEST_CHAIN)


def soaring(norms: Tensor) -> Tensor:
    """Norms, which grow from about 2^58 on, by 2^40 at ``LARGEST_NORM``. There some ways of taking
    them overflow and others do not: what a record adds fades to nothing before, without a jump.
    """
    return torch.addcmul(norms, norms, (norms * 2.0**-58).square_().square_().square_())


def squared_norms(values: Tensor) -> Tensor:
    """[b] float64 sums of squares over all other dimensions: blocks in the working precision, their
    sum in float64. Relative error at most ``norm_gamma``.
    """
    # A sketch may lie in memory the other way round: the order of entries does not matter.
    flat = (values if values.is_contiguous() or values.dim() < 3 else values.mT).flatten(1)
    n = flat.shape[1]
    if n <= SQUARES_AT_ONCE:
        return torch.linalg.vector_norm(flat, dim=1).double().square_()
    whole = n - n % SQUARES_AT_ONCE
    blocks = flat[:, :whole].unflatten(1, (-1, SQUARES_AT_ONCE))
    total = torch.linalg.vector_norm(blocks, dim=2).double().square_().sum(1)
    return (
        total
        if whole == n
        else total + torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square_()
    )


def norm_gamma(like: Tensor, dtype: torch.dtype) -> float:
    """Relative error of ``squared_norms``."""
    return 2.0 * gamma(SQUARES_AT_ONCE, like, dtype)


def least_of(spread_b: Tensor) -> Tensor:
    """[b] what gradients of that spread are divided by at least, in float64 as in float32."""
    return spread_b * (OF_SPREAD * unit_roundoff(torch.float32))


def direct(values_bn: Tensor, spread_b: Tensor | None = None) -> Measured:
    """Gradients that are kept as they were measured: nothing but the rounding
    of their own squares; ``spread_b``: of what they are sums of, where that is known.
    """
    squared = squared_norms(values_bn)
    least = None if spread_b is None else least_of(spread_b)
    slack = norm_gamma(values_bn, values_bn.dtype) * squared
    return Measured(squared, slack, torch.zeros_like(squared), least)


# Which of them add up in squares: parameters are orthogonal.
SQUARED = (False, False, True, True, True)


@dataclass
class NormSums:
    """Squared norms of groups of parameters, added up over parameters while a backward pass runs.
    Private.

    Attributes:
        squared, slack: [groups, b] float64, see ``Measured``.
        margin_squared: [groups, b] float64; parameters are orthogonal, so their margins add up in
            squares.
        least_squared, terms_squared: [groups, b] float64, likewise.
        entries: for each group, entries of the gradients, for the floor.
    """

    squared: Tensor
    slack: Tensor
    margin_squared: Tensor
    least_squared: Tensor
    terms_squared: Tensor
    entries: list[int]
    _rows: list[tuple[Tensor, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._rows = list(zip(*self._all, strict=True))  # views, made once: parameters add to them

    @property
    def _all(self) -> list[Tensor]:
        numbers = [self.squared, self.slack, self.margin_squared, self.least_squared]
        return [*numbers, self.terms_squared]

    @classmethod
    def empty(cls, groups: int, examples: int, device: torch.device) -> NormSums:
        zeros = torch.zeros(5, groups, examples, dtype=torch.float64, device=device)
        squared, slack, margin, least, terms = zeros
        return cls(squared, slack, margin, least, terms, [0] * groups)

    def add(self, group: int, measured: Measured, entries: int) -> None:
        squared, slack, margin_squared, least_squared, terms_squared = self._rows[group]
        squared.add_(measured.squared)
        slack.add_(measured.slack)
        margin_squared.addcmul_(measured.margin, measured.margin)
        if measured.least is not None:
            least_squared.addcmul_(measured.least, measured.least)
        if measured.terms is not None:
            terms_squared.addcmul_(measured.terms, measured.terms)
        self.entries[group] += entries

    def add_several(
        self, groups: Sequence[int], measured: Measured, entries: Sequence[int]
    ) -> None:
        """Of m parameters: each of ``measured`` is [m b] here."""
        m = len(groups)
        each = [None if x is None else x.view(m, -1) for x in vars(measured).values()]
        if len(set(groups)) > 1:
            for i, group in enumerate(groups):
                one = Measured(*(None if x is None else x[i] for x in each))  # type: ignore[arg-type]
                self.add(group, one, entries[i])
            return
        numbers = zip(self._rows[groups[0]], each, SQUARED, strict=True)
        for row, values, squared in numbers:
            if values is not None:
                row.add_(values.square().sum(0) if squared else values.sum(0))
        self.entries[groups[0]] += sum(entries)

    def add_least(self, group: int, least_b: Tensor) -> None:
        """Of gradients whose norms are added later."""
        self._rows[group][3].addcmul_(least_b, least_b)

    def of_all(self, added: Callable[[Tensor], Tensor]) -> NormSums:
        """Of all ranks that hold a part of each gradient: parts are orthogonal, so that squares,
        what they may be wrong by and squared margins add up.

        Args:
            added: a vector of numbers to the sum of the ranks', the same to the bit on all.
        """
        own = torch.stack(self._all)
        found = added(torch.cat([own.flatten(), numbers_beside(self.entries, own)]))
        entries = [int(n) for n in found[own.numel() :].tolist()]
        squared, slack, margin, least, terms = found[: own.numel()].view(own.shape)
        return NormSums(squared, slack, margin, least, terms, entries)

    def norms(self, least_times: float = 1.0) -> Norms:
        """``least_times``: what least divisors are multiplied by."""
        floor = (numbers_beside(self.entries, self.squared) * SMALLEST_NORMAL).sqrt().unsqueeze(1)
        estimate = self.squared.clamp_min(0).sqrt()
        estimate = torch.where(estimate > LARGEST_NORM, torch.inf, estimate)
        cert = (self.squared + self.slack).clamp_min(0).sqrt() + self.margin_squared.sqrt() + floor
        own, single = soaring(estimate) * (1.0 + SHARE) + floor, self.least_squared.sqrt()
        if least_times == 1.0:
            return Norms(estimate, own, cert, single)
        of_terms = self.terms_squared.sqrt() * (OF_TERMS * least_times)
        return Norms(estimate, own, cert, torch.maximum(single * least_times, of_terms), single)


def of_this_process(sums: NormSums) -> NormSums:
    """Where one process holds a record's whole gradient."""
    return sums


@dataclass(frozen=True)
class Norms:
    """[groups, b] each, float64. Private.

    Attributes:
        estimate: the best estimate.
        own: the estimate enlarged, an upper bound of ordinary gradients' norms.
        certified: an upper bound of the norm of what the sum will hold, rounding included.
        least: what is divided by at least.
        single: the same in float32; None where it is no other.
    """

    estimate: Tensor
    own: Tensor
    certified: Tensor
    least: Tensor
    single: Tensor | None = None

    @property
    def enlarged(self) -> Tensor:
        """What exactly measured gradients are divided by."""
        return torch.maximum(self.own, self.least)

    def above(self, least: Tensor) -> Norms:
        """The same of gradients that are formed, of which ``least`` was known before."""
        return replace(self, least=torch.maximum(self.least, least))

    def doubtful(self, limits: Tensor, stability: float) -> Tensor:
        """[b] whether the enlarged norm of some group is no upper bound, and a gradient that must
        be shortened depends on it; or rounding may be more than ``APART`` of what it may add; or
        float32's ``least`` decides what it adds: its terms are thousands of times that.

        Args:
            limits: [groups] clipping norms.
            stability: added to norms before they divide (automatic clipping); 0 where gradients
                below the limit stay as they are.
        """
        known = self.own + stability if stability else torch.maximum(self.own, limits.unsqueeze(1))
        single = self.least if self.single is None else self.single
        small = self.certified - self.estimate <= APART * known
        plain = (self.certified <= known) & small & (single <= known)
        return ~(plain & self.certified.isfinite()).all(dim=0)

    def apart(self, factors: Tensor, limits: Tensor) -> Tensor:
        """[b] whether rounding may be more than ``APART`` of what some group allows.

        Args:
            factors: [groups, b] clip factors.
            limits: [groups] clipping norms.
        """
        lost = (self.certified - self.estimate) * factors
        return (lost > APART * limits.unsqueeze(1)).any(dim=0)

    def divisors(self) -> Tensor:
        """[groups, b] the largest of the three: sound whatever the data, and without a jump. For
        sketches, which are not measured again.
        """
        return torch.maximum(self.enlarged, self.certified)
