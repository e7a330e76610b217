"""[noise] of a configuration file: NoiseCurve's record, whose workload comes from a public
spectrum, and what a configuration's optimiser makes of the workload.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from quietgrad.checks import SettingsWarning
from quietgrad.curvature.spectrum import Spectrum, load_spectrum, record_hash
from quietgrad.noise.correlation.curvature import Horizon
from quietgrad.noise.correlation.mixing import LARGEST_BANDED, Family, MixingMatrix
from quietgrad.noise.correlation.workloads import Curvature, PrefixSums, Workload
from quietgrad.noise.mechanism import Memory
from quietgrad.noise.methods import (
    BandedNoise,
    Bands,
    IndependentNoise,
    MatrixNoise,
    NoiseMethod,
)
from quietgrad.noise.sources.source import Source
from quietgrad.noise.toeplitz import ToeplitzNoise
from quietgrad.records import Amount, judge
from quietgrad.tensors import trainable_parameters
from quietgrad.training.optimizers import SGD, Optimizer
from quietgrad.training.settings.reading import Table


@dataclass(frozen=True)
class NoiseCurve:
    """Banded noise for the curvature of public data.

    Attributes:
        spectrum: file that ``quietgrad spectrum`` wrote.
        curvature_factor: what the spectrum's eigenvalues are multiplied by, because clipped
            gradients change less than gradients do; 0 takes the mean of min(1, C / norm) over the
            public images' gradients.
        floor: weight of a white part in the workload, against noise that the quadratic model does
            not see: see ``quietgrad.noise.Curvature``.
        horizon: "final" (the loss after the last step, as in the paper), "all" (after every step)
            or "both" (the mean of the two), see ``quietgrad.noise.Curvature``.
        clamp: largest learning rate times eigenvalue that the workload believes, see
            ``quietgrad.noise.Curvature``: 2 is the paper's, 1 was better here.
        bands, family, memory, source: see ``BandedNoise``.
    """

    spectrum: str = ""
    curvature_factor: Amount = 0.0
    floor: Amount = 0.0
    horizon: Horizon = "both"
    clamp: float = 1.0
    bands: Bands = "auto"
    family: Family = "auto"
    memory: Memory = "rows"
    source: Source = "keyed"

    def __post_init__(self) -> None:
        judge(self)
        self._banded(None)
        if not self.spectrum:
            raise ValueError(
                "spectrum is missing: it is the file that `quietgrad spectrum CONFIG` writes; "
                "without public data use noise.method='banded'"
            )
        if not 0 < self.clamp <= 2:
            raise ValueError(
                f"clamp={self.clamp!r} must be in (0, 2]; plain SGD is unstable beyond 2"
            )

    def banded(self, optimizer: Optimizer, max_grad_norm: float) -> BandedNoise:
        """Banded noise with the workload that the spectrum and the learning rate make.

        Raises:
            ValueError: for a file that is no spectrum, or does not say how clipping shortens its
                gradients.
        """
        plain = isinstance(optimizer, SGD) and not optimizer.momentum
        constant = optimizer.schedule == "constant" and not optimizer.warmup_steps
        if not plain or not constant or optimizer.head_learning_rate is not None:
            warnings.warn(
                "noise.method='noisecurve' is derived for plain SGD with one constant learning "
                "rate (optimizer.name='sgd', momentum=0, schedule='constant', warmup_steps=0, no "
                "head_learning_rate); otherwise it is as private, but its matrix is not the best "
                "one",
                SettingsWarning,
                stacklevel=2,
            )
        spectrum = load_spectrum(self.spectrum)
        factor = self.curvature_factor or clipping_factor(spectrum, max_grad_norm)
        eigenvalues = tuple(float(m) * factor for m in spectrum.eigenvalues())
        rate = optimizer.rate
        return self._banded(
            lambda steps: Curvature(eigenvalues, rate, steps, self.floor, self.horizon, self.clamp)
        )

    def _banded(self, workload: Callable[[int], Workload] | None) -> BandedNoise:
        return BandedNoise(self.bands, self.family, self.memory, self.source, workload)


# A new mechanism is one more line.
NOISE = Table(
    {
        "independent": IndependentNoise,
        "banded": BandedNoise,
        "toeplitz": ToeplitzNoise,
        "noisecurve": NoiseCurve,
    },
    "method",
)


def noise_of(
    noise: NoiseMethod | NoiseCurve,
    optimizer: Optimizer,
    max_grad_norm: float,
    mixing: MixingMatrix | None = None,
) -> NoiseMethod:
    """The noise of a plan: what the table says, for the workload of this optimiser.

    Args:
        noise: the table.
        optimizer: whose momentum and learning rates shape the workload.
        max_grad_norm: C.
        mixing: a matrix found earlier, on resume: it takes the place of solving again.
    """
    # One band is independent noise: a search may come to it.
    if isinstance(noise, BandedNoise | NoiseCurve) and noise.bands == 1:
        return IndependentNoise(noise.source)
    if mixing is not None:
        return MatrixNoise(mixing, noise.memory, noise.source)
    if isinstance(noise, NoiseCurve):
        return noise.banded(optimizer, max_grad_norm)
    if not isinstance(noise, BandedNoise):
        return noise  # the optimiser has no say in it
    momentum = optimizer.momentum if isinstance(optimizer, SGD) else 0.0

    def workload(steps: int) -> Workload:
        # The Toeplitz family treats all steps alike.
        long = noise.family == "auto" and steps > LARGEST_BANDED
        same = noise.family == "toeplitz" or long
        return PrefixSums(steps, momentum, None if same else _rates(optimizer, steps))

    return replace(noise, workload=workload)


def _rates(optimizer: Optimizer, steps: int) -> tuple[float, ...] | None:
    """Learning rates by step up to a factor; None for a constant one."""
    rates = tuple(optimizer.factor(step, steps) for step in range(steps))
    return None if len(set(rates)) == 1 else rates


def clipping_factor(spectrum: Spectrum, max_grad_norm: float) -> float:
    """Mean of min(1, C / norm) over the spectrum's public gradients: to first order the clipped
    sum's Jacobian is the Hessian times that.

    Raises:
        ValueError: if the spectrum does not say how large they are.
    """
    quantiles = spectrum.facts.get("gradient_norm_quantiles")
    if not quantiles:
        raise ValueError(
            "the spectrum holds no gradient norms of its public data, so how clipping shortens "
            "them is not known; set noise.curvature_factor (1: not at all)"
        )
    return float(np.minimum(1.0, max_grad_norm / np.maximum(quantiles, 1e-12)).mean())


def check_spectrum(
    noise: NoiseMethod | NoiseCurve,
    classifier: nn.Module,
    private_ids: Iterable[bytes],
    image_shape: tuple[int, ...] | None = None,
) -> None:
    """Refuses a spectrum of other parameters, of data that overlap the private ones, or of images
    whose form is another, so that no overlap could be found.

    Raises:
        ValueError: naming what differs.
    """
    if not isinstance(noise, NoiseCurve):
        return
    spectrum = load_spectrum(noise.spectrum)
    spectrum.require_same_parameters(
        {n: tuple(p.shape) for n, p in trainable_parameters(classifier).items()}
    )
    known = spectrum.facts.get("image_shape")
    if image_shape is not None and tuple(known or ()) != image_shape:
        raise ValueError(
            f"noise.spectrum={noise.spectrum!r} is of images of the form "
            f"{known or 'that it does not say'}, the private ones have {list(image_shape)}: images "
            "are known by "
            "their pixels, so private ones among the public could not be told; make the spectrum "
            "again with this data.image_size"
        )
    spectrum.require_disjoint(record_hash(i) for i in private_ids)
