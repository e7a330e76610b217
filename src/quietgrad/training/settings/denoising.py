"""[denoising] of a configuration file: ``method`` picks a rule, whose fields are the other keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from quietgrad.checks import nearest
from quietgrad.denoising import (
    ConstantAmplification,
    GradientRule,
    MomentumRule,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpikesWithBulk,
)


def bulk_on_momentum(
    kappa: float = SpikesWithBulk.kappa,
    keep_bulk: float = SpikesWithBulk.keep_bulk,
    delay: int = OnMomentum.delay,
    embeddings: bool = SpikesWithBulk.embeddings,
) -> OnMomentum:
    """A rule within a rule, with the keys of both."""
    return OnMomentum(SpikesWithBulk(kappa, keep_bulk, embeddings), delay)


# Method -> what makes its rule; a new rule is one more line, and its new keys fields of the table.
OF_GRADIENT: dict[str, Callable[..., GradientRule]] = {
    "published": PublishedShrinkage,
    "bulk": SpikesWithBulk,
}
OF_MOMENTUM: dict[str, Callable[..., MomentumRule]] = {
    "amplify": ConstantAmplification,
    "persistent": PersistentAmplification,
    "bulk-on-momentum": bulk_on_momentum,
}
METHODS: Mapping[str, Callable[..., GradientRule | MomentumRule | None]] = {
    "none": lambda: None,
    **OF_GRADIENT,
    **OF_MOMENTUM,
}


@dataclass(frozen=True)
class DenoisingTable:
    """What is done to released values before the optimiser steps along them; it costs no privacy.

    A key that the method's rule has and that is not given takes the rule's default, and is written
    to the run's folder, so that a resume goes on with it. None is for keys that the rule does not
    have.

    Attributes:
        method: "none"; on the gradient "published" (``PublishedShrinkage``) or "bulk"
            (``SpikesWithBulk``); on the optimiser's first moment "persistent"
            (``PersistentAmplification``), "amplify" (``ConstantAmplification``) or
            "bulk-on-momentum" (``OnMomentum(SpikesWithBulk())``).
        kappa, norm_correction, keep_bulk, gain, largest_gain, delay, embeddings: see the rules.

    Raises:
        ValueError: for an unknown method, a key that its rule does not have, a value out of range.
    """

    method: str = "none"
    kappa: float | None = None
    norm_correction: bool | None = None
    keep_bulk: float | None = None
    gain: float | None = None
    largest_gain: float | None = None
    delay: int | None = None
    embeddings: bool | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            hint = nearest(self.method, METHODS)
            raise ValueError(f"denoising.method={self.method!r} is unknown{hint}")
        own = inspect.signature(METHODS[self.method]).parameters
        given = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        for key, value in given.items():
            if value is not None and key not in own:
                valid = ", ".join(own) or "none"
                raise ValueError(
                    f"denoising.{key}={value!r} is no key of denoising.method={self.method!r}, "
                    f"whose keys are: {valid}; take it out, or set another method"
                )
        for key in own:
            if given[key] is None:
                object.__setattr__(self, key, own[key].default)
        try:
            METHODS[self.method](**self._settings())
        except (TypeError, ValueError) as error:  # begins with the field's name
            raise ValueError(f"denoising.{error}") from None

    @property
    def gradient_rule(self) -> GradientRule | None:
        """What is made of a release; None where the method acts elsewhere or not at all."""
        kind = OF_GRADIENT.get(self.method)
        return None if kind is None else kind(**self._settings())

    @property
    def momentum_rule(self) -> MomentumRule | None:
        """What is made of the first moment; None where the method acts elsewhere or not at all."""
        kind = OF_MOMENTUM.get(self.method)
        return None if kind is None else kind(**self._settings())

    def _settings(self) -> dict[str, Any]:
        of_table = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        return {key: value for key, value in of_table.items() if value is not None}
