"""The workload of a loss with known curvature: expected excess loss on a quadratic (NoiseCurve).

Symbols: T steps, eta learning rate, mu_i eigenvalues of a representative Hessian, W [T, T] the
workload.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quietgrad.checks import SettingsWarning, require_at_least, require_positive, require_word
from quietgrad.noise.correlation.powers import gauss_rule, mean_over_horizons, powers, truncated
from quietgrad.noise.correlation.quadratic_form import DenseWorkload, Floats, require_steps

UNMERGED = 20_000  # eigenvalues that are taken one by one
MERGED = 1e-3  # relative width of a group of eigenvalues beyond that
Horizon = Literal["final", "all", "both"]
HORIZONS: tuple[Horizon, ...] = get_args(Horizon)


@dataclass(frozen=True)
class Curvature:
    """Expected excess loss after the last step of plain SGD on a quadratic with these eigenvalues
    (NoiseCurve, theorem 1, without its factor eta^2 / 2).

    W[j, l] = sum_i mu_i (1 - eta mu_i)^(2T - 2 - j - l). Negative eigenvalues count as zero
    (section 4.3); where eta mu > 2 the powers would grow without bound, so mu is clamped to 2 /
    eta, with a warning that says how often.

    With a floor, W gains floor tr(W) / T on its diagonal. A spectrum sees noise sequences of a few
    shapes only, and the best X for it lets all others grow large; where the loss is not quadratic
    those move the iterate too. The floor charges for the noise's energy in every step alike.

    Attributes:
        eigenvalues: mu, in any order.
        learning_rate: eta, constant.
        steps: T.
        floor: share of the white part, 0 for theorem 1 as it stands.
        horizon: "final" (theorem 1: the loss after the last step) or "all" (the mean loss after
            every step: W = (1/T) sum_t W_t with W_t theorem 1's for t steps). Where eta mu is
            small, "all" is prefix sums; it needs no floor, because no step's noise goes uncounted.
            "both" is the mean of the two: the last step, whose model is released, counts half, and
            the way there the other half.
        clamp: largest eta mu that is believed, in (0, 2]. At 2 (the limit of stability) noise that
            alternates from step to step is never forgotten, and the best X spends itself on that;
            clipped training does not behave so (docs/noisecurve/horizons.md). At 1 sharper
            directions forget the past at once.
    """

    eigenvalues: tuple[float, ...]
    learning_rate: float
    steps: int
    floor: float = 0.0
    horizon: str = "final"
    clamp: float = 2.0

    def __post_init__(self) -> None:
        require_steps(self.steps)
        require_positive("learning_rate", self.learning_rate)
        require_at_least("floor", self.floor, 0, "it is a share of the workload's trace")
        require_word("horizon", self.horizon, HORIZONS)
        mu = np.asarray(self.eigenvalues, dtype=np.float64)
        if mu.ndim != 1 or not mu.size or not np.isfinite(mu).all():
            raise ValueError(
                "eigenvalues must be a non-empty list of finite numbers; pass the spectrum of a "
                "Hessian"
            )
        if not (mu > 0).any():
            raise ValueError(
                "eigenvalues holds no positive one, so no direction has curvature; use "
                "prefix_sum_workload, or a spectrum of a trained model"
            )
        if not 0 < self.clamp <= 2:
            raise ValueError(
                f"clamp={self.clamp!r} must be in (0, 2]; beyond 2 the powers grow without bound"
            )
        beyond, limit = int((mu > 2 / self.learning_rate).sum()), self.clamp / self.learning_rate
        if beyond:
            warnings.warn(
                f"learning_rate={self.learning_rate:g}: {beyond} of {mu.size} eigenvalues exceed 2 "
                f"/ learning_rate = {2 / self.learning_rate:.3g} (the largest is "
                f"{mu.max():.3g}), where plain SGD without clipping would diverge; "
                f"{int((mu > limit).sum())} are clamped to {limit:.3g}",
                SettingsWarning,
                stacklevel=3,
            )

    @property
    def name(self) -> str:
        after = {
            "final": "the last step",
            "all": "every step",
            "both": "every step, the last one half",
        }[self.horizon]
        return (
            f"curvature ({len(self.eigenvalues)} eigenvalues, learning rate "
            f"{self.learning_rate:g}, loss after {after})"
        )

    def measure(self) -> tuple[Floats, Floats]:
        """Nodes 1 - eta mu_i and weights mu_i of the positive eigenvalues, clamped."""
        mu = np.asarray(self.eigenvalues, dtype=np.float64)
        mu = np.minimum(mu[mu > 0], self.clamp / self.learning_rate)
        return 1 - self.learning_rate * mu, mu

    def factor(self) -> Floats:
        """With the horizon "final" never forms W: the measure is replaced by its Gauss rule, whose
        moments are the same to rounding. Cost: p n^2 + T n^2, n ~ 5 sqrt(T) nodes.
        """
        nodes, weights = self._nodes()
        last = powers(nodes, weights, self.steps)[::-1]
        if (
            self.horizon != "final"
        ):  # T^2 memory, T^3 time; ``responses`` has what the Toeplitz family needs instead
            matrix = mean_over_horizons(nodes, weights, self.steps)
            if self.horizon == "both":
                matrix = (matrix + last @ last.T) / 2
            matrix += self.floor * np.trace(matrix) / self.steps * np.eye(self.steps)
            return DenseWorkload(matrix).factor()
        factor = truncated(last)
        if not self.floor:
            return factor
        white = np.sqrt(self.floor * np.vdot(factor, factor) / self.steps) * np.eye(self.steps)
        return np.concatenate([factor, white], axis=1)

    def _nodes(self) -> tuple[Floats, Floats]:
        """The measure, or the Gauss rule that is the same for powers up to 2T."""
        nodes, weights = self.measure()
        if len(weights) > UNMERGED:
            mu, weights = _merged(weights)
            nodes = 1 - self.learning_rate * mu
        # x^k is within 1e-16 of a polynomial of degree sqrt(2 k ln(2e16)) on [-1, 1]; n nodes
        # integrate degree 2n - 1.
        enough = int(np.ceil(0.5 * np.sqrt(4 * self.steps * np.log(2e16)))) + 8
        return gauss_rule(nodes, weights, enough) if len(nodes) > enough else (nodes, weights)

    def responses(self) -> list[Response]:
        """The workload as sums over steps of squared responses to the noise before them. Cost and
        memory T r for a rank r of a few dozens, whatever the horizon.
        """
        lagged = truncated(powers(*self._nodes(), self.steps))
        shares = {"final": (1.0, 0.0), "all": (0.0, 1.0), "both": (0.5, 0.5)}[self.horizon]
        steps = np.full(self.steps, shares[1] / self.steps)
        steps[-1] += shares[0]
        found = [Response(lagged, steps)]
        if self.floor:
            impulse = np.zeros((self.steps, 1))
            impulse[0] = 1.0
            found.append(
                Response(
                    impulse, np.full(self.steps, self.floor * found[0].independent() / self.steps)
                )
            )
        return found


def _merged(mu: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues and weights, those within a thousandth of each other as one, so that cost stops
    growing with the parameters.

    Mass and mean are kept. What changes is of second order: x^2 exp(-x) / 24 times the squared
    width at most, with x = 2 k eta mu the exponent of a power k, 3e-8 of the mass.
    """
    _, group = np.unique(np.floor(np.log(mu) / MERGED), return_inverse=True)
    weights = np.bincount(group, mu).astype(np.float64)
    return np.bincount(group, mu**2) / weights, weights


@dataclass(frozen=True, eq=False)
class Response:
    """sum_t p_t |sum_{u <= t} R[t - u] z_u|^2: what noise z does after each step, weighed.

    Attributes:
        lagged: R [T, r], the effect of a unit of noise so many steps later.
        steps: p [T], weight of each step.
    """

    lagged: Floats
    steps: Floats

    def lag_weights(self) -> Floats:
        """[T] sum of p_t over the steps that have so many before them."""
        return np.cumsum(self.steps[::-1])[::-1]

    def independent(self) -> float:
        """The sum for independent noise of unit variance: tr(W)."""
        return float(self.lag_weights() @ (self.lagged**2).sum(axis=1))


def curvature_workload(
    eigenvalues: ArrayLike, learning_rate: float, steps: int
) -> NDArray[np.float64]:
    """W of ``Curvature``, [T, T] float64. Negative eigenvalues count as zero; those above 2 /
    learning_rate are clamped, with a warning.

    Args:
        eigenvalues: [p], of a representative Hessian of public data.
        learning_rate: eta of plain SGD.
        steps: T.

    Raises:
        ValueError, TypeError: for arguments out of range.
    """
    mu = tuple(float(m) for m in np.asarray(eigenvalues, dtype=np.float64).ravel())
    nodes, weights = Curvature(mu, learning_rate, steps).measure()
    out = np.zeros((steps, steps))
    exponents = np.arange(steps - 1, -1, -1)[None, :]
    for start in range(0, len(nodes), 2048):  # bounds the temporary, not the sum
        part = slice(start, start + 2048)
        powers = nodes[part, None] ** exponents * np.sqrt(weights[part, None])
        out += powers.T @ powers
    return out
