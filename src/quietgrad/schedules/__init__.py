"""Settings that change from step to step: noise multiplier, clipping norm and sampling rate as
functions of the step's number alone, so that a schedule is public.
"""

from quietgrad.schedules.course import Course, StepSettings
from quietgrad.schedules.phases import Phase, Schedules
from quietgrad.schedules.shapes import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Listed,
    Schedule,
    Stepwise,
)

__all__ = [
    "Constant",
    "Cosine",
    "Course",
    "Exponential",
    "Linear",
    "Listed",
    "Phase",
    "Schedule",
    "Schedules",
    "StepSettings",
    "Stepwise",
]
