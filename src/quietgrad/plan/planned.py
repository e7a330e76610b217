"""What a run reads of its plan, so that plans import runs and not the other way round."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from quietgrad.beside.values import SideMethod
from quietgrad.clipping.clipper import Clipper
from quietgrad.distributed.team import Team
from quietgrad.events import PrivacyEvent
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.randomness import RandomKey
from quietgrad.sampling.poisson import PoissonSampler
from quietgrad.sampling.users import UserIndices
from quietgrad.schedules import Course, StepSettings


class Planned(Protocol):
    """The parts that run, and public facts; ``PrivacyPlan`` says what each is."""

    @property
    def sampler(self) -> PoissonSampler: ...
    @property
    def clipper(self) -> Clipper: ...
    @property
    def beside(self) -> tuple[SideMethod, ...]: ...
    @property
    def event(self) -> PrivacyEvent: ...
    @property
    def course(self) -> Course | None: ...
    @property
    def delta(self) -> float: ...
    @property
    def steps(self) -> int: ...
    def at(self, step: int) -> StepSettings: ...
    def clipper_at(self, step: int) -> Clipper: ...
    def indices(self, key: RandomKey, step: int) -> NDArray[np.int64] | UserIndices: ...
    def batch_size_at(self, settings: StepSettings) -> float: ...
    def phase_at(self, step: int) -> tuple[int, int]: ...
    def write_gradients(
        self, noisy: NoisySum, model: nn.Module, team: Team | None = None
    ) -> None: ...
