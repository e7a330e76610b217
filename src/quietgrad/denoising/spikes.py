"""The singular triplets of a noisy matrix that stand out of the noise, without a decomposition of
the whole matrix.

The noise level is known, so the interval that holds the noise's singular values is known, and a
Chebyshev polynomial can be laid over it: it stays within [-1, 1] there and grows exponentially
outside (``Operator``: X is the matrix so scaled, x(y) > 1 its eigenvalue for a spike y).

- *Test.* A few Gaussian vectors w are filtered. If a singular value of kappa e or more is there,
  T_k(X) w is long with probability 1 - ``MISSED``, for the degree
  k chosen here: each vector misses it only by being nearly orthogonal to one direction. Layers
  whose vectors stay short are passed over.
- *Search.* Subspace iteration in rounds, from the test's filtered vectors, which point towards what
  stands out already: what is not strong yet is filtered, with what is strong projected out (else it
  would drown the weaker), then the whole block takes two steps with X, and Rayleigh-Ritz. A block
  that fills up is followed by a wider one.
- *Fallback.* Small matrices, and those in which more stands out than the widest block holds, go
  through the eigenvalues of G G^T.

Cost of the test: about 4 m n p k operations for p = 8 vectors (k = 12 for a square matrix of side
384 at kappa = 1.02), with X formed 2 m^2 n + 2 m^2 p k; of the search 80 m n p, or 40 m^2 p with X
formed; of the fallback 2 m^2 n + O(m^3). Memory: the stack of matrices once, m^2 for each X that is
formed, and O((m + n) p) vectors a matrix.

Shape legend: l matrices of one shape, m <= n their sides, p vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quietgrad.denoising.filter import DENSE_SIDE, FORMED_SIDE_TEST, Operator
from quietgrad.denoising.formulas import bulk_edge

VECTORS = 8  # of the test
BLOCKS = (
    VECTORS,
    24,
)  # vectors of the search, which begins with the test's, and of its second attempt
# a block is full if fewer of its vectors are left over: they are what separates a spike from the
# bulk
ROOM = 3
MISSED = 1e-4  # probability that the test passes over a matrix with a singular value of kappa e
HIGHEST_DEGREE = (
    40  # a test that needs more (kappa close to 1) is left out: the search does as well
)
STRONG = 3.0  # Ritz values x beyond this are projected out of the filter
ROUNDS = (4, 8)  # degrees of the search's filters
# beside a Ritz value x beyond this (some six edges) the first vectors say nothing of weaker ones,
# and the search gets another round
VERY_STRONG = 60.0
DIVERGED = 1e15  # a matrix of a norm of so many noise levels is passed over


@dataclass(frozen=True)
class Spikes:
    """Singular triplets above the bulk's edge, largest first; values at or below the edge are zero.

    Attributes:
        values_lp: singular values.
        left_lmp, right_lnp: singular vectors, in the orientation of the matrices that were given.
    """

    values_lp: Tensor
    left_lmp: Tensor
    right_lnp: Tensor


def find_spikes(stack_lmn: Tensor, noise_std: float) -> Spikes:
    """Triplets above the edge of every matrix of a stack.

    Singular values are those of a full decomposition to 1e-3 relative where they are 2 % above the
    edge or more (2e-3 beside one that is several times as large); closer to it, and beside one of a
    thousand edges, one may be missed, where the shrinker leaves little of it. Deterministic:
    starting vectors come from a generator of fixed seed, which knows nothing of the matrices.

    Args:
        stack_lmn: [l, m, n] matrices in float32 or float64.
        noise_std: s, standard deviation of the noise in every entry; positive.
    """
    return _as_given(_find(Operator.of(_wide(stack_lmn), noise_std)), stack_lmn)


def detect(stack_lmn: Tensor, noise_std: float, kappa: float) -> tuple[Tensor, Spikes] | None:
    """Test, and search where it finds something: ([l] which matrices, their triplets above the
    edge), or None for no matrix at all.

    Args:
        stack_lmn, noise_std: as for ``find_spikes``.
        kappa: as for ``has_spike``.
    """
    operator = Operator.of(_wide(stack_lmn), noise_std, FORMED_SIDE_TEST)
    candidates, filtered_lpm = _test(operator, kappa)
    if bool(candidates.any()):
        candidates = candidates & _are_finite(operator.stack, noise_std)
    if not bool(candidates.any()):
        return None
    if not bool(candidates.all()):
        operator = operator.some(candidates)
        filtered_lpm = None if filtered_lpm is None else filtered_lpm[candidates]
    if operator.x_lmm is None:
        operator = Operator.of(operator.stack, noise_std)
    return candidates, _as_given(_find(operator, filtered_lpm), stack_lmn)


def _wide(stack_lmn: Tensor) -> Tensor:
    return stack_lmn.transpose(1, 2) if stack_lmn.shape[1] > stack_lmn.shape[2] else stack_lmn


def _as_given(found: Spikes, stack_lmn: Tensor) -> Spikes:
    if stack_lmn.shape[1] > stack_lmn.shape[2]:
        return Spikes(found.values_lp, found.right_lnp, found.left_lmp)
    return found


def _find(
    operator: Operator, filtered_lpm: Tensor | None = None, blocks: tuple[int, ...] = BLOCKS
) -> Spikes:
    """``filtered_lpm``: the test's vectors, which point towards what stands out already."""
    m = operator.stack.shape[1]
    if not blocks or m <= DENSE_SIDE or 4 * blocks[0] >= m:
        return _by_eigenvalues(operator.stack, operator.noise_std)
    start = _start(operator.stack, blocks[0])
    block = (
        _two_steps(operator, start)
        if filtered_lpm is None
        else _orthonormal(_usable(filtered_lpm, start))
    )
    found = _search(operator, block)
    full = found.values_lp[:, blocks[0] - ROOM] > 0
    if not bool(full.any()):
        return found
    return _replaced(found, full, _find(operator.some(full), None, blocks[1:]))


def _usable(filtered_lpm: Tensor, otherwise_lpm: Tensor) -> Tensor:
    """The filtered vectors at length 1; where a strong signal overflowed the polynomial, the
    others.
    """
    lengths = torch.linalg.vector_norm(filtered_lpm, dim=2, keepdim=True)
    usable = (torch.isfinite(lengths) & (lengths > 0)).all(dim=1, keepdim=True)
    return torch.where(usable, filtered_lpm / lengths, otherwise_lpm)


def _are_finite(stack_lmn: Tensor, noise_std: float) -> Tensor:
    """[l] False for matrices of a run that has diverged, whose squares overflow: there is nothing
    to tell apart in them.
    """
    return torch.linalg.vector_norm(stack_lmn, dim=(1, 2)) <= DIVERGED * noise_std


def has_spike(stack_lmn: Tensor, noise_std: float, kappa: float) -> Tensor:
    """[l] False where the largest singular value is below kappa e, up to a probability ``MISSED``;
    True where it may not be.

    Pure noise gives False unless its largest singular value strays above the edge by more than
    about half of kappa - 1.
    """
    return _test(Operator.of(_wide(stack_lmn), noise_std, FORMED_SIDE_TEST), kappa)[0]


def _test(operator: Operator, kappa: float) -> tuple[Tensor, Tensor | None]:
    """What ``has_spike`` returns, and the filtered vectors; None where the test is left out."""
    l, m, n = operator.stack.shape
    degree, longest = degree_of_test((m, n), kappa)
    if m <= DENSE_SIDE or degree > HIGHEST_DEGREE:
        return torch.ones(l, dtype=torch.bool, device=operator.stack.device), None
    filtered_lpm = operator.chebyshev(_start(operator.stack, VECTORS), degree)
    # Not "longer than": a signal strong enough to overflow the polynomial leaves what compares with
    # nothing.
    return ~(torch.linalg.vector_norm(filtered_lpm, dim=2) <= longest).all(dim=1), filtered_lpm


def degree_of_test(shape: Sequence[int], kappa: float) -> tuple[int, float]:
    """Degree of the test's polynomial, and the length that a filtered vector must not exceed.

    A vector of m normal entries has length about sqrt m, and no more than that once filtered if all
    lies in the bulk. A singular value of kappa e makes it at least T_k(x) |u^T w|, and |u^T w| is
    the size of one normal variable: the degree is the smallest for which all vectors stay short
    with probability at most ``MISSED``.
    """
    m, n = shape
    longest = math.sqrt(m)
    one_vector = MISSED ** (1 / VECTORS)
    one = torch.tensor(one_vector, dtype=torch.float64, device="cpu")
    smallest = math.sqrt(2) * float(torch.erfinv(one))
    growth = math.acosh(max(_position(kappa, m, n), 1.0))
    wanted = math.acosh(max(longest / smallest, 1.0))
    return (max(2, math.ceil(wanted / growth)) if wanted < growth * 1e6 else 10**6), longest


def _start(stack_lmn: Tensor, vectors: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(0)
    block = torch.randn(
        vectors, stack_lmn.shape[1], generator=generator, dtype=torch.float32, device="cpu"
    )
    return block.to(stack_lmn).expand(len(stack_lmn), -1, -1).contiguous()


def _position(ratio: float, m: int, n: int) -> float:
    """x of a singular value of ``ratio`` edges: 1 at the edge itself."""
    return (ratio**2 * (math.sqrt(m) + math.sqrt(n)) ** 2 - (m + n)) / (2 * math.sqrt(m * n))


@dataclass(frozen=True)
class _Ritz:
    """Approximate values and left vectors (rows), largest first, and what the right vectors follow
    from (the rotation in float64).
    """

    values_lp: Tensor
    left_lpm: Tensor
    projected_lpn: Tensor
    rotation_lpp: Tensor

    def right_lpn(self) -> Tensor:
        """Right vectors, as rows."""
        right = torch.bmm(self.rotation_lpp, self.projected_lpn.to(self.rotation_lpp))
        return right.to(self.left_lpm) / self.values_lp.clamp(
            min=torch.finfo(torch.float32).tiny
        ).unsqueeze(2)


def _search(operator: Operator, block_lpm: Tensor) -> Spikes:
    """``block_lpm``: orthonormal rows to begin with."""
    ritz = _rayleigh_ritz(operator, block_lpm)
    for degree in ROUNDS:
        ritz = _round(operator, ritz, degree)
    # The one branch that depends on values: on a GPU one wait a stack, not a layer.
    if bool((operator.position(ritz.values_lp) > VERY_STRONG).any()):
        ritz = _round(operator, ritz, ROUNDS[-1])
    edge = bulk_edge(operator.stack.shape[1:], operator.noise_std)
    values = torch.where(ritz.values_lp > edge, ritz.values_lp, 0.0)
    return Spikes(values, ritz.left_lpm.transpose(1, 2), ritz.right_lpn().transpose(1, 2))


def _round(operator: Operator, ritz: _Ritz, degree: int) -> _Ritz:
    """Strong vectors as they are, the others filtered, and all refined."""
    strong = (operator.position(ritz.values_lp) > STRONG).to(ritz.left_lpm.dtype).unsqueeze(2)
    kept = ritz.left_lpm * strong
    filtered = operator.chebyshev(ritz.left_lpm * (1 - strong), degree, kept)
    lengths = torch.linalg.vector_norm(filtered, dim=2, keepdim=True)
    tiny = torch.finfo(filtered.dtype).tiny
    # Beside a signal of 1e5 edges or more its rounding, filtered, can overflow: then those vectors
    # stay as they were.
    weak = torch.where(
        torch.isfinite(lengths), filtered / lengths.clamp(min=tiny), ritz.left_lpm * (1 - strong)
    )
    return _rayleigh_ritz(operator, _two_steps(operator, kept + weak))


def _two_steps(operator: Operator, block: Tensor) -> Tensor:
    """Two applications of X, orthonormal after each: columns in descending order keep the weak
    apart from the strong.
    """
    return _orthonormal(operator.apply(_orthonormal(operator.apply(block))))


def _replaced(found: Spikes, which: Tensor, better: Spikes) -> Spikes:
    """``found`` with the matrices of ``which`` replaced; as many columns as either has."""
    width = max(better.values_lp.shape[1], found.values_lp.shape[1])

    def put(whole: Tensor, part: Tensor) -> Tensor:
        out = whole.new_zeros(*whole.shape[:-1], width)
        out[..., : whole.shape[-1]] = whole
        out[which] = 0
        out[which, ..., : part.shape[-1]] = part
        return out

    return Spikes(
        put(found.values_lp, better.values_lp),
        put(found.left_lmp, better.left_lmp),
        put(found.right_lnp, better.right_lnp),
    )


def _rayleigh_ritz(operator: Operator, q_lpm: Tensor) -> _Ritz:
    """Triplets in the span of orthonormal rows."""
    b_lpn = torch.bmm(q_lpm, operator.stack)
    wide = b_lpn.double()  # squares halve the digits of the small ones
    squares, vectors = torch.linalg.eigh(torch.bmm(wide, wide.transpose(1, 2)))
    values = squares.clamp(min=0).sqrt().flip(1).to(q_lpm)
    rotation = vectors.flip(2).transpose(1, 2)
    return _Ritz(values, torch.bmm(rotation.to(q_lpm), q_lpm), b_lpn, rotation)


def _orthonormal(block_lpm: Tensor) -> Tensor:
    return torch.linalg.qr(block_lpm.transpose(1, 2)).Q.transpose(1, 2)


def _by_eigenvalues(stack_lmn: Tensor, noise_std: float) -> Spikes:
    """All triplets above the edge from the eigenvalues of G G^T, in float64."""
    wide = stack_lmn.double()
    squares, vectors = torch.linalg.eigh(torch.bmm(wide, wide.transpose(1, 2)))
    values = squares.clamp(min=0).sqrt().flip(1)
    above = values > bulk_edge(stack_lmn.shape[1:], noise_std)
    width = max(1, int(above.sum(dim=1).max()))
    values = torch.where(above, values, 0.0)[:, :width]
    left = vectors.flip(2)[:, :, :width]
    right = torch.bmm(wide.transpose(1, 2), left) / torch.where(
        values > 0, values, torch.inf
    ).unsqueeze(1)
    return Spikes(values.to(stack_lmn), left.to(stack_lmn), right.to(stack_lmn))
