"""What the script asks for, as one-step plans of Quietgrad's: every release has the clipper, the
noise and the sampling of a plan, and the accountant composes what was released.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn, optim

from quietgrad.checks import require_at_least, require_int
from quietgrad.clipping.settings import Clipping, Performance
from quietgrad.noise.methods import IndependentNoise
from quietgrad.plan.config import PrivacyConfig
from quietgrad.plan.plan import PrivacyPlan

CLIPPINGS = ("flat", "per_layer")
MODES = ("hooks", "ghost", "functorch", "ew")
ADAPTIVE = (
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "min_clipbound",
    "max_clipbound",
    "unclipped_num_std",
)


@dataclass
class Releases:
    """Makes the plan of the next release.

    Attributes:
        dataset_size: N.
        sample_rate: q.
        groups: as ``quietgrad.Clipping`` has them.
        source: of the noise, "keyed" or "secure".
    """

    dataset_size: int
    sample_rate: float
    groups: Any
    source: Any
    _plans: dict[tuple[float, float, bool], PrivacyPlan] = field(default_factory=dict)

    def plan(self, noise_multiplier: float, max_grad_norm: float, alone: bool) -> PrivacyPlan:
        """Of one release.

        Args:
            noise_multiplier, max_grad_norm: sigma and C as they are now.
            alone: whether the model takes one record at a time.

        Raises:
            ValueError: naming the setting and the remedy.
        """
        key = (
            _number("noise_multiplier", noise_multiplier),
            _number("max_grad_norm", max_grad_norm),
            alone,
        )
        if key not in self._plans:
            config = PrivacyConfig(
                noise_multiplier=key[0],
                max_grad_norm=key[1],
                sample_rate=self.sample_rate,
                steps=1,
                clipping=Clipping(groups=self.groups),
                noise=IndependentNoise(source=self.source),
                performance=Performance(engine="one-example" if alone else "auto"),
            )
            self._plans[key] = config.build(self.dataset_size)
        return self._plans[key]


def _number(name: str, value: Any) -> float:
    """Also of a tensor or a word, as schedules of a script's own set them."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is no number; set one above 0") from None


def steps_of(epochs: int, per_epoch: int) -> int:
    """Releases of so many passes over a loader.

    Raises:
        TypeError, ValueError: for what is no number of passes.
    """
    require_int("epochs", epochs)
    require_at_least("epochs", epochs, 1, "it counts passes over the data loader")
    return epochs * per_epoch


def clipping_of(
    clipping: str, max_grad_norm: float | Sequence[float], names: list[str]
) -> tuple[float, Any]:
    """(C, groups) of Opacus' ``clipping`` and ``max_grad_norm``.

    Args:
        clipping: "flat" or "per_layer".
        max_grad_norm: one number, or one for each trainable parameter.
        names: of the trainable parameters.

    Raises:
        ValueError: for adaptive and unknown clipping, and for another number of norms.
    """
    require_clipping(clipping)
    if isinstance(max_grad_norm, int | float):
        return float(max_grad_norm), "whole" if clipping == "flat" else "layer"
    norms = [float(c) for c in max_grad_norm]
    if clipping == "flat" or len(norms) != len(names):
        raise ValueError(
            f"max_grad_norm has {len(norms)} numbers; a list needs clipping='per_layer' and one "
            f"number for each of the {len(names)} trainable parameters"
        )
    return math.hypot(*norms), dict(zip(names, norms, strict=True))


def require_known(arguments: Collection[str]) -> None:
    """Checks what Opacus passes on to its wrappers.

    Raises:
        ValueError: naming the argument and the remedy.
    """
    for name in sorted(set(arguments) - {"strict"}):
        if name in ADAPTIVE:
            raise ValueError(
                f"{name} is refused: it sets Opacus' adaptive clipping, whose threshold follows "
                "the share of clipped records; leave it out, and see clipping='adaptive'"
            )
        raise ValueError(
            f"{name} is no argument of make_private that changes anything here; leave it out"
        )


def require_clipping(clipping: str) -> None:
    """Raises:
    ValueError: for adaptive and unknown clipping.
    """
    if clipping == "adaptive":
        raise ValueError(
            "clipping='adaptive' is refused: its threshold follows the share of clipped records, "
            "whose noise is not in this accountant; use clipping='flat', with max_grad_norm set "
            "on public data, a scheduler of quietgrad.integrations.opacus.schedulers, or "
            "quietgrad.beside.AdaptiveClipping in a loop of docs/loops.md"
        )
    if clipping not in CLIPPINGS:
        raise ValueError(f"clipping={clipping!r} is unknown; use one of {', '.join(CLIPPINGS)}")


def require_mode(grad_sample_mode: str) -> None:
    """Raises:
    ValueError: for a mode that Quietgrad has nothing for.
    """
    if grad_sample_mode not in MODES:
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} is not offered; use one of {', '.join(MODES)}: "
            "they all run Quietgrad's clipper, which chooses by itself; several processes are "
            "refused"
        )


def require_optimizer(module: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raises:
    ValueError: for an optimiser of other parameters, or one whose step is several releases.
    """
    if isinstance(optimizer, optim.LBFGS):
        raise ValueError(
            "optimizer is LBFGS, which asks for the gradient of a batch several times a step, and "
            "every one would be a release; use an optimiser that steps once a gradient "
            "(torch.optim.AdamW, SGD)"
        )
    own = {id(p) for p in module.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer holds parameters that are not the module's; build it from "
            "module.parameters(), after layers were replaced and moved to their device"
        )
