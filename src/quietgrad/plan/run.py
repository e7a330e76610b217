"""A plan in progress."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.accounting import epsilon_report
from quietgrad.clipping.backward import PerExampleLoss
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.facts import NotPrivate, RandomizedClipping
from quietgrad.keyring import KeyRing
from quietgrad.ledger import LedgerWriter
from quietgrad.noise.correlated import BandedNoise, NoiseHistory
from quietgrad.noise.gaussian import GaussianNoise, how_drawn
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.sampling.cyclic import CyclicPoissonSampler
from quietgrad.tensors import Batch

if TYPE_CHECKING:
    from quietgrad.plan.plan import PrivacyPlan


class PrivateRun:
    """A plan in progress: which release comes next, and the streams. Never makes more releases than the plan has steps."""

    def __init__(
        self,
        plan: PrivacyPlan,
        ring: KeyRing,
        writer: LedgerWriter | None,
        released: int,
        block: int = 0,
        drawn: str | None = None,
        given_up: bool = False,
    ) -> None:
        self.plan = plan
        self._ring = ring
        self._key = ring.sessions[-1].root  # of this session: all that is drawn from now on
        self._writer = writer
        self._released = released
        self._block = block
        self._drawn = drawn
        self._given_up = given_up
        self._history: NoiseHistory | None = None
        self._open_batch: int | None = None
        self._projection_stream: tuple[int, torch.Generator] | None = None

    @property
    def released(self) -> int:
        """Noisy sums released so far, also those of an earlier session with the same ledger."""
        return self._released

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Index batches for the releases that remain. Every one must be released, an empty one too: skipping would reveal it.

        Raises:
            RuntimeError: if the previous batch was not released.
        """
        while self._released < self.plan.steps:
            index = self._released
            self._open_batch = index
            yield self.plan.sampler.indices(self._key, index)
            if self._released == index:
                raise RuntimeError(
                    "the last batch was not released; call step() (or release()) for every batch, also an empty one: "
                    "which batches are skipped would depend on the data"
                )

    def clip(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> ClippedSum:
        """Clipped sum of the next release's batch, or of a part of it: parts add up with ``+``. Private."""
        return self.plan.clipper.clip(model, per_example_loss, batch, self._projections())

    def _projections(self) -> torch.Generator | None:
        """One stream a release: the clip calls of its micro-batches go on drawing from it, so no projection is used twice."""
        if not isinstance(self.plan.clipper.claim.clipping, RandomizedClipping):
            return None
        if self._projection_stream is None or self._projection_stream[0] != self._released:
            generator = torch.Generator()
            generator.manual_seed(self._key.words("projection", self._released)[0] & (2**63 - 1))
            self._projection_stream = (self._released, generator)
        return self._projection_stream[1]

    def release(self, clipped: ClippedSum) -> NoisySum:
        """Records the release, then draws the noise.

        Raises:
            RuntimeError: if the plan's releases are used up.
            ValueError: if the clipped sum claims another sensitivity than the plan accounts for.
        """
        if self._released >= self.plan.steps:
            raise RuntimeError(f"all {self.plan.steps} releases of the plan are made; build a plan with more steps")
        if self._open_batch is not None and self._open_batch != self._released:
            raise RuntimeError(
                "this batch is released already; every release needs a batch of its own from batches(), or the sampling rate "
                "accounted for is not the one that ran"
            )
        if self._open_batch is None and isinstance(self.plan.sampler, CyclicPoissonSampler):
            raise RuntimeError(
                "with correlated noise every release needs the batch that batches() gave for it: a record may take part in every b-th step only"
            )
        if clipped.claim != self.plan.clipper.claim:
            raise ValueError(
                f"the clipped sum claims {clipped.claim}, but the plan accounts for {self.plan.clipper.claim}"
            )
        step, noise = self._released, self.plan.noise
        # Nothing at hand: the first release here, or the one before failed.
        if isinstance(noise, BandedNoise) and (self._history is None or self._history.step != step):
            self._history = self._rejoin(noise, clipped.gradients, step)
        if self._writer is not None:
            self._writer.release(step)
        self._released += 1
        if isinstance(noise, GaussianNoise):
            return noise.release(clipped, self._key, step)
        assert self._history is not None
        noisy, self._history = noise.release(clipped, self._key, step, self._history, self._ring.key_of)
        return noisy

    def _rejoin(self, noise: BandedNoise, like: Mapping[str, Tensor], step: int) -> NoiseHistory:
        """The block's noise up to here, made again. Where the same keys would give other numbers a new block begins: as private, and ``NoisySum.mixing_row`` tells the truth."""
        how = how_drawn(like)
        if self._drawn not in (None, how):
            self._block = step
            if self._writer is not None:
                session = self._ring.sessions[-1]
                self._writer.noise_block(step, noise.digest)
                self._writer.noise_session(session.step, session.name)
            warnings.warn(
                f"the noise so far was drawn as {self._drawn}, and this session draws as {how}: its noise is not correlated with the steps before {step}, as private, and a little "
                "less accurate; go on where the run began to avoid that",
                stacklevel=4,
            )
        if self._drawn != how and self._writer is not None:
            self._writer.noise_drawn(how)
        self._drawn = how
        return noise.replay(like, self._ring.key_of, self._block, step)

    def step(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> NoisySum:
        """Clips, records and releases one batch, and writes the mean gradients to ``model`` for the optimiser, denoised if the plan has a denoiser.

        Returns:
            What was released, before denoising.
        """
        noisy = self.release(self.clip(model, per_example_loss, batch))
        denoiser = self.plan.config.denoiser
        written = noisy if denoiser is None else denoiser.denoise(noisy, model)
        written.write_gradients(model, self.plan.expected_batch_size)
        return noisy

    def epsilon(self) -> float:
        """Privacy spent so far at the plan's delta; 0 before the first release, infinite once privacy was given up."""
        if self._given_up:
            return math.inf
        if self._released == 0:
            return 0.0

        return epsilon_report(self.plan.event.after(self._released), self.plan.delta).epsilon

    def give_up_privacy(self, reason: str) -> NotPrivate:
        """Leave for ``quietgrad.research`` to look at clipped gradients before their noise, for data that need no protection. The ledger says so for good; epsilon is infinite.

        Raises:
            ValueError: without a reason.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"reason={reason!r}: say why these data need no protection; the ledger keeps it")
        if self._writer is not None:
            self._writer.not_private(reason)
        self._given_up = True
        return NotPrivate(reason)

    def close(self) -> None:
        """Closes the ledger."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> PrivateRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
