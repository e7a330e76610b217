"""Settings that were changed and that nothing reads, so that nobody believes in noise or denoising that does not run."""

from __future__ import annotations

from dataclasses import fields

from quietgrad.training.config import TrainConfig
from quietgrad.training.optimizers import build_denoiser
from quietgrad.training.tables import DenoisingTable, NoiseTable

CURVATURE_ONLY = ("spectrum", "curvature_factor", "floor", "horizon", "clamp")
# Method -> keys of its table that it does not read.
NOISE = {
    "independent": tuple(f.name for f in fields(NoiseTable) if f.name != "method"),
    "banded": CURVATURE_ONLY,
    "noisecurve": (),
}
DENOISING = {
    "none": tuple(f.name for f in fields(DenoisingTable) if f.name != "method"),
    "paper": ("target", "amplify", "delay", "persistence"),
    "spectral": (),
}


def unread_settings(config: TrainConfig) -> list[str]:
    """One sentence for every key of [noise] and [denoising] that differs from its default and is without effect."""
    found = []
    for name, table, unread in (
        ("noise", config.noise, NOISE[config.noise.method]),
        ("denoising", config.denoising, DENOISING[config.denoising.method]),
    ):
        default = type(table)()
        changed = [key for key in unread if getattr(table, key) != getattr(default, key)]
        found += [
            f"{name}.{key}={getattr(table, key)!r} is without effect: {name}.method={table.method!r} does not read it"
            for key in changed
        ]
        if table.method != default.method and not config.privacy.enabled:
            found.append(f"{name}.method={table.method!r} is without effect: privacy.enabled=false adds no noise")
    denoiser, steps = build_denoiser(config.denoising), config.training.steps
    amplifies = denoiser is not None and denoiser.target == "momentum" and denoiser.amplification > 1
    if config.denoising.method == "spectral" and not config.denoising.persistence and not amplifies:
        found.append(
            "denoising.persistence=False is without effect: only what is amplified on the momentum can persist"
        )
    if denoiser is not None and steps is not None and denoiser.first_steps >= steps:
        found.append(
            f"denoising.method={config.denoising.method!r} is without effect: it leaves the first {denoiser.first_steps} steps as they are, and there are {steps}; set denoising.delay"
        )
    return found
