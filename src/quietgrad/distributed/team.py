"""What a run asks of the processes that it runs on, and the answer of a single one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.soundness.processes import refuse_process_group
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.randomness import RandomKey

Facts = Mapping[str, str]
Denoise = Callable[[NoisySum, nn.Module], NoisySum]


class Team(Protocol):
    """The processes of one run; every method but the first three is called by all of them in the
    same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def share(self) -> tuple[int, int]:
        """Which of how many shares of a batch this process clips."""
        ...

    def require(self) -> None:
        """That the processes are still those that the run was started on."""
        ...

    def stopping_all(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error of this rank stops the others too."""
        ...

    def releasing(self) -> contextlib.AbstractContextManager[None]:
        """Inside, an error leaves this rank without a way to tell the others: it is over here."""
        ...

    def stop(self, error: BaseException | None = None) -> None:
        """Tells the others, at their next agreement, that this rank cannot go on, and why."""
        ...

    def loops(self, where: str, released: int) -> None:
        """Tells those who wait for this rank that its loop "begins" or "leaves", or "closes"."""
        ...

    def look_at(self, model: nn.Module, release: int, loss: Any) -> None:
        """Takes digests of weights, model and loss, for the next ``agree``; once a release."""
        ...

    def same_records(self, dataset: Any, key: RandomKey, cut: str) -> str:
        """That all ranks have the same records in the same order, as far as some tell; a digest of
        those.
        """
        ...

    def agree(self, place: str, facts: Facts, examples: int = 0) -> int:
        """That all ranks say the same; returns the examples of all together."""
        ...

    def write_down(self, write: Callable[[], None]) -> None:
        """Done by one rank, while the others wait for its word."""
        ...

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those whose noise this rank draws."""
        ...

    def summed(self, clipped: ClippedSum, beside: tuple[str, ...]) -> ClippedSum:
        """The sum over all ranks, of what this rank owns."""
        ...

    def gathered(
        self, noisy: NoisySum, like: Mapping[str, Tensor], beside: tuple[str, ...]
    ) -> NoisySum:
        """What all owners released."""
        ...

    def denoised(self, denoise: Denoise, noisy: NoisySum, model: nn.Module) -> NoisySum:
        """A rule that takes every matrix by itself, each on its owner."""
        ...


class Alone:
    """One process: nothing is told to anybody."""

    rank = 0
    size = 1
    share = (0, 1)

    def require(self) -> None:
        """Raises RuntimeError where a process group was initialised since the run began."""
        refuse_process_group()

    def stopping_all(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def releasing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stop(self, error: BaseException | None = None) -> None:
        return None

    def loops(self, where: str, released: int) -> None:
        return None

    def look_at(self, model: nn.Module, release: int, loss: Any) -> None:
        return None

    def same_records(self, dataset: Any, key: RandomKey, cut: str) -> str:
        return ""

    def agree(self, place: str, facts: Facts, examples: int = 0) -> int:
        return examples

    def write_down(self, write: Callable[[], None]) -> None:
        write()

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def summed(self, clipped: ClippedSum, beside: tuple[str, ...]) -> ClippedSum:
        return clipped

    def gathered(
        self, noisy: NoisySum, like: Mapping[str, Tensor], beside: tuple[str, ...]
    ) -> NoisySum:
        return noisy

    def denoised(self, denoise: Denoise, noisy: NoisySum, model: nn.Module) -> NoisySum:
        return denoise(noisy, model)
