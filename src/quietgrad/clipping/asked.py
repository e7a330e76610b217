"""What a bound clipper reads of a clipper: clippers import it, and not the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quietgrad.beside.values import SideMethod
from quietgrad.clipping.capture.examples import Combined
from quietgrad.clipping.capture.layout import Layout
from quietgrad.clipping.engines.thresholds import Groups, Scaling
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.cost import Throughput
from quietgrad.events import SensitivityClaim


class Settings(Protocol):
    """What a bound clipper reads of a ``Clipper``."""

    @property
    def max_grad_norm(self) -> float: ...
    @property
    def physical_batch_size(self) -> int | None: ...
    @property
    def max_physical_batch_size(self) -> int | None: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def groups(self) -> str | Groups | Mapping[str, float]: ...
    @property
    def scaling(self) -> Scaling: ...
    @property
    def views(self) -> int: ...
    @property
    def combined(self) -> Combined | None: ...
    @property
    def memory_budget(self) -> float | None: ...
    @property
    def speed(self) -> Throughput | None: ...
    @property
    def beside(self) -> tuple[SideMethod, ...]: ...
    @property
    def claim(self) -> SensitivityClaim: ...
    @property
    def sketched(self) -> bool: ...
    def policies(self, layout: Layout) -> dict[str, Policy]: ...
