"""[denoising] of a configuration file: ``method`` picks a rule, whose fields are the other keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quietgrad.denoising import (
    ConstantAmplification,
    HardThreshold,
    MomentStep,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpikesWithBulk,
)
from quietgrad.denoising.rules.protocols import Directions
from quietgrad.training.settings.reading import Table


@dataclass(frozen=True)
class BulkOnMomentum:
    """``OnMomentum(SpikesWithBulk())``, a rule within a rule, with the keys of both.

    Attributes:
        kappa, keep_bulk, embeddings: see ``SpikesWithBulk``.
        delay: how many steps go along the moment as it is.
    """

    kappa: float = SpikesWithBulk.kappa
    keep_bulk: float = SpikesWithBulk.keep_bulk
    delay: int = OnMomentum.delay
    embeddings: bool = SpikesWithBulk.embeddings

    def __post_init__(self) -> None:
        _ = self.rule  # it judges the settings

    @property
    def rule(self) -> OnMomentum:
        """What acts."""
        return OnMomentum(SpikesWithBulk(self.kappa, self.keep_bulk, self.embeddings), self.delay)

    def directions(self, step: MomentStep, model: nn.Module | None = None) -> Directions:
        """See ``MomentumRule``."""
        return self.rule.directions(step, model)


# A new rule is one more line. "none" is None: NoneType() gives it.
DENOISING = Table(
    {
        "none": type(None),
        "published": PublishedShrinkage,
        "bulk": SpikesWithBulk,
        "truncate": HardThreshold,
        "amplify": ConstantAmplification,
        "persistent": PersistentAmplification,
        "bulk-on-momentum": BulkOnMomentum,
    },
    "method",
)
