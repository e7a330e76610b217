"""The [noise] table to what the plan needs: workload, bands, and checks of the spectrum that shapes
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import nn

from quietgrad.checks import SettingsWarning
from quietgrad.curvature.spectrum import Spectrum, load_spectrum, record_hash
from quietgrad.noise.correlation.mixing import LARGEST_BANDED, MixingMatrix
from quietgrad.noise.correlation.workloads import Curvature, PrefixSums, Workload
from quietgrad.tensors import trainable_parameters
from quietgrad.training.optimizers import rate_factor
from quietgrad.training.settings.config import TrainConfig


def noise_settings(config: TrainConfig, mixing: MixingMatrix | None = None) -> dict[str, Any]:
    """Arguments of ``PrivacyConfig`` for the configuration's noise.

    Args:
        config: the configuration.
        mixing: a matrix found earlier, on resume: it takes the place of solving again.
    """
    table = config.noise
    source: dict[str, Any] = {"noise_source": table.source}
    if (
        table.method == "independent" or table.bands == 1
    ):  # one band is independent noise: a search may come to it
        return source
    if mixing is not None:
        return source | {"mixing": mixing, "noise_memory": table.memory}
    workload: Callable[[int], Workload]
    if table.method == "noisecurve":
        optimizer = config.optimizer
        plain = (
            optimizer.name == "sgd"
            and not optimizer.momentum
            and optimizer.head_learning_rate is None
        )
        if not plain or optimizer.schedule != "constant" or optimizer.warmup_steps:
            warnings.warn(
                "noise.method='noisecurve' is derived for plain SGD with one constant learning "
                "rate (optimizer.name='sgd', momentum=0, schedule='constant', warmup_steps=0, no "
                "head_learning_rate); otherwise it is as private, but its matrix is not the best "
                "one",
                SettingsWarning,
                stacklevel=2,
            )
        spectrum = load_spectrum(table.spectrum)
        factor = table.curvature_factor or clipping_factor(spectrum, config.privacy.max_grad_norm)
        eigenvalues = tuple(float(m) * factor for m in spectrum.eigenvalues())

        def workload(steps: int) -> Workload:
            return Curvature(
                eigenvalues,
                config.optimizer.learning_rate,
                steps,
                table.floor,
                table.horizon,
                table.clamp,
            )
    else:
        momentum = config.optimizer.momentum if config.optimizer.name == "sgd" else 0.0

        def workload(steps: int) -> Workload:
            return PrefixSums(steps, momentum, _schedule(config, steps))

    return source | {
        "bands": table.bands if table.bands else "auto",
        "workload": workload,
        "mixing_family": table.family,
        "noise_memory": table.memory,
    }


def _schedule(config: TrainConfig, steps: int) -> tuple[float, ...] | None:
    """Learning rates by step up to a factor; None for a constant one, and for the Toeplitz family,
    which treats all steps alike.
    """
    if config.noise.family == "toeplitz" or (
        config.noise.family == "auto" and steps > LARGEST_BANDED
    ):
        return None
    rates = tuple(rate_factor(config.optimizer, step, steps) for step in range(steps))
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
    config: TrainConfig,
    classifier: nn.Module,
    private_ids: Iterable[bytes],
    image_shape: tuple[int, ...] | None = None,
) -> None:
    """Refuses a spectrum of other parameters, of data that overlap the private ones, or of images
    whose form is another, so that no overlap could be found.

    Raises:
        ValueError: naming what differs.
    """
    if config.noise.method != "noisecurve":
        return
    spectrum = load_spectrum(config.noise.spectrum)
    spectrum.require_same_parameters(
        {n: tuple(p.shape) for n, p in trainable_parameters(classifier).items()}
    )
    known = spectrum.facts.get("image_shape")
    if image_shape is not None and tuple(known or ()) != image_shape:
        raise ValueError(
            f"noise.spectrum={config.noise.spectrum!r} is of images of the form "
            f"{known or 'that it does not say'}, the private ones have {list(image_shape)}: images "
            "are known by "
            "their pixels, so private ones among the public could not be told; make the spectrum "
            "again with this data.image_size"
        )
    spectrum.require_disjoint(record_hash(i) for i in private_ids)
