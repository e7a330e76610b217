"""Configurations with single settings of their components changed, as tests name them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from quietgrad.noise import BandedNoise, IndependentNoise, MatrixNoise
from quietgrad.plan import PrivacyConfig

CLIPPING = ("estimator", "sketch_dim", "groups", "scaling", "layers")
NOISE = ("bands", "workload", "mixing", "family", "memory", "source")
PERFORMANCE = ("max_physical_batch_size", "memory_budget", "engine")


def changed(config: PrivacyConfig, **changes: Any) -> PrivacyConfig:
    """``changed(config, bands=3)`` has ``noise=BandedNoise(3)``, ``estimator="hutch"`` another
    ``clipping``; other names are those of ``PrivacyConfig``.
    """
    taken = {
        names: {name: changes.pop(name) for name in names if name in changes}
        for names in (CLIPPING, NOISE, PERFORMANCE)
    }
    if taken[CLIPPING]:
        changes["clipping"] = replace(config.clipping, **taken[CLIPPING])
    if taken[PERFORMANCE]:
        changes["performance"] = replace(config.performance, **taken[PERFORMANCE])
    if taken[NOISE]:
        changes["noise"] = _noise(config, taken[NOISE])
    return replace(config, **changes)


def _noise(config: PrivacyConfig, settings: dict[str, Any]) -> Any:
    before = {f.name: getattr(config.noise, f.name) for f in dataclasses.fields(config.noise)}
    wanted = before | settings
    if settings.get("bands") == 1:
        kind: Any = IndependentNoise
    else:
        kind = MatrixNoise if "mixing" in wanted else BandedNoise
        kind = kind if "bands" in wanted or "mixing" in wanted else IndependentNoise
    names = {f.name for f in dataclasses.fields(kind)}
    assert settings.keys() <= names | {"bands"}, settings
    return kind(**{name: value for name, value in wanted.items() if name in names})
