"""What a run reads of its plan, so that plans import runs and not the other way round."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from quietgrad.beside.values import SideMethod
from quietgrad.clipping.clipper import Clipper
from quietgrad.events import PoissonGaussian
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.sampling.poisson import PoissonSampler


class Planned(Protocol):
    """The parts that run, and public facts; ``PrivacyPlan`` says what each is."""

    @property
    def sampler(self) -> PoissonSampler: ...
    @property
    def clipper(self) -> Clipper: ...
    @property
    def beside(self) -> tuple[SideMethod, ...]: ...
    @property
    def event(self) -> PoissonGaussian: ...
    @property
    def delta(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def expected_batch_size(self) -> float: ...
    def write_gradients(self, noisy: NoisySum, model: nn.Module) -> None: ...
