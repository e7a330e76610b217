"""Settings that were changed and that nothing reads, so that nobody believes in noise or denoising
that does not run.
"""

from __future__ import annotations

from dataclasses import fields

from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.settings.tables import NoiseTable

CURVATURE_ONLY = ("spectrum", "curvature_factor", "floor", "horizon", "clamp")
# Method -> keys of [noise] that it does not read. In [denoising] such a key is refused.
NOISE = {
    "independent": tuple(f.name for f in fields(NoiseTable) if f.name not in ("method", "source")),
    "banded": CURVATURE_ONLY,
    "noisecurve": (),
}


def unread_settings(config: TrainConfig) -> list[str]:
    """One sentence for every changed setting of [noise] and [denoising] that is without effect."""
    default, noise, denoising = TrainConfig(), config.noise, config.denoising
    found = [
        f"noise.{key}={getattr(noise, key)!r} is without effect: {noise.method=} does not read it"
        for key in NOISE[noise.method]
        if getattr(noise, key) != getattr(default.noise, key)
    ]
    for name, method, plain in (
        ("noise", noise.method, default.noise.method),
        ("denoising", denoising.method, default.denoising.method),
    ):
        if method != plain and not config.privacy.enabled:
            why = "privacy.enabled=false adds no noise"
            found.append(f"{name}.method={method!r} is without effect: {why}")
    delay, steps = denoising.delay or 0, config.training.steps
    if delay and steps is not None and delay >= steps:
        found.append(
            f"denoising.method={denoising.method!r} is without effect: it leaves the first {delay} "
            f"steps as they are, and there are {steps}; set denoising.delay"
        )
    return found
