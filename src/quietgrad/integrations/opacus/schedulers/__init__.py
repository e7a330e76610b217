"""Schedules of noise and clipping norm under Opacus' names."""

from quietgrad.integrations.opacus.schedulers.grad_clip_scheduler import (
    ExponentialGradClip,
    LambdaGradClip,
    StepGradClip,
    _GradClipScheduler,
)
from quietgrad.integrations.opacus.schedulers.noise_scheduler import (
    ExponentialNoise,
    LambdaNoise,
    StepNoise,
    _NoiseScheduler,
)

__all__ = [
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaGradClip",
    "LambdaNoise",
    "StepGradClip",
    "StepNoise",
    "_GradClipScheduler",
    "_NoiseScheduler",
]
