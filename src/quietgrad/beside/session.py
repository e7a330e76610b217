"""What a run makes of the numbers that it released beside its gradients: all of it
post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from quietgrad.beside.adaptive import AdaptiveClipping
from quietgrad.beside.training_loss import TrainingLoss
from quietgrad.beside.values import SideMethod
from quietgrad.events import SideRelease


@dataclass(frozen=True)
class PrivateEstimate:
    """A noisy training loss that was released and paid for. Public.

    Attributes:
        release: number of releases until and with the one that it is of.
        value: mean of the records' clipped losses, estimated from this release alone.
        noise_std: standard deviation of the noise in ``value``. Which records were drawn adds at
            most half the range over the root of the expected batch size.
        smoothed, smoothed_noise_std: the same for the exponential average of the releases so far.
    """

    release: int
    value: float
    noise_std: float
    smoothed: float
    smoothed_noise_std: float

    def __str__(self) -> str:
        return (
            f"training loss {self.smoothed:.3f} +- {self.smoothed_noise_std:.3f} (private estimate)"
        )


class Clips(Protocol):
    """What this room knows of a clipper."""

    @property
    def max_grad_norm(self) -> float: ...
    def clipping_to(self: Norm, max_grad_norm: float) -> Norm: ...


Norm = TypeVar("Norm", bound=Clips)


class TellsBeside:
    """What a run tells of its numbers beside the gradients. Public."""

    _beside: SideSession

    @property
    def max_grad_norm(self) -> float:
        """C of the next release."""
        return self._beside.max_grad_norm

    @property
    def training_loss(self) -> PrivateEstimate | None:
        """The last private estimate of the training loss, if there is one."""
        return self._beside.training_loss

    def shown(self) -> dict[str, float]:
        """What a log may say of what is released beside the gradients: name -> number."""
        return self._beside.shown()


class SideSession:
    """Estimates of one session of a run. Holds released values alone.

    Args:
        methods: what is released beside the gradients.
        releases: the same, as it is accounted for.
        expected_batch_size: B.
        max_grad_norm: C of the next release.
    """

    def __init__(
        self,
        methods: tuple[SideMethod, ...],
        releases: tuple[SideRelease, ...],
        expected_batch_size: float,
        max_grad_norm: float,
    ) -> None:
        self._methods = methods
        self._multipliers = {side.name: side.noise_multiplier for side in releases}
        self._size = expected_batch_size
        self.max_grad_norm = max_grad_norm
        self.training_loss: PrivateEstimate | None = None
        self._mean = self._squares = self._weight = 0.0

    @property
    def adapts(self) -> bool:
        """Whether the clipping norm follows what is released."""
        return any(isinstance(method, AdaptiveClipping) for method in self._methods)

    def clipper(self, planned: Norm) -> Norm:
        """What clips the next batch: with the norm that was released, where it follows that."""
        if self.adapts:
            return planned.clipping_to(self.max_grad_norm)
        self.max_grad_norm = planned.max_grad_norm
        return planned

    def take(self, release: int, noisy: Mapping[str, float]) -> None:
        """Makes of released numbers what they are for.

        Args:
            release: number of releases made, this one with them.
            noisy: name -> noisy sum, in units of what one record can add.
        """
        for method in self._methods:
            if method.name not in noisy:
                continue
            if isinstance(method, TrainingLoss):
                self._estimate(method, release, noisy[method.name])
            elif isinstance(method, AdaptiveClipping):
                self.max_grad_norm = method.next_norm(
                    self.max_grad_norm, noisy[method.name], self._size
                )

    def shown(self) -> dict[str, float]:
        """Name -> number, for logs. Public."""
        found: dict[str, float] = {}
        if self.training_loss is not None:
            found["private_training_loss"] = self.training_loss.smoothed
            found["private_training_loss_noise_std"] = self.training_loss.smoothed_noise_std
        if self.adapts:
            found["clipping_norm"] = self.max_grad_norm
        return found

    def _estimate(self, method: TrainingLoss, release: int, noisy: float) -> None:
        value = method.estimate(noisy, self._size)
        std = method.width * self._multipliers[method.name] / self._size
        decay = method.smoothing
        self._mean = decay * self._mean + (1 - decay) * value
        self._weight = decay * self._weight + (1 - decay)
        self._squares = decay**2 * self._squares + ((1 - decay) * std) ** 2
        self.training_loss = PrivateEstimate(
            release, value, std, self._mean / self._weight, self._squares**0.5 / self._weight
        )
