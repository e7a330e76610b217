"""A plan in progress."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from quietgrad.accounting import epsilon_report
from quietgrad.clipping.bindings import Bindings
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.clipped_sum import ClippedSum, Stamp
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.soundness.processes import refuse_process_group
from quietgrad.events import NotPrivate, RandomizedClipping
from quietgrad.ledger import LedgerWriter
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.plan.contribution import clip_given
from quietgrad.plan.noise_session import NoiseSession
from quietgrad.plan.planned import Planned
from quietgrad.plan.process import BoundToProcess
from quietgrad.plan.seeds import SeedUse
from quietgrad.tensors import Batch


@dataclass(frozen=True)
class OpenBatch:
    """The batch that ``batches`` gave and that is not yet released.

    Attributes:
        release: which release it is for.
        examples: how many it holds; private.
    """

    release: int
    examples: int


class PrivateRun(BoundToProcess):
    """A plan in progress: which release comes next, and the streams. Never makes more releases than
    the plan has steps.

    It belongs to the process that started it, and cannot be copied.
    """

    def __init__(
        self,
        plan: Planned,
        session: NoiseSession,
        writer: LedgerWriter | None = None,
        released: int = 0,
        given_up: bool = False,
        seed_use: SeedUse | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self._session = session
        self._writer = writer
        self._released = released
        self._given_up = given_up
        self._bindings = Bindings(plan.clipper)
        self._seed_use = seed_use
        self._open: OpenBatch | None = None
        self._closed = False
        self._one_at_a_time = threading.Lock()
        self._token = object()  # on the stamps of this run's sums, and of no other's

    @property
    def released(self) -> int:
        """Noisy sums released so far, also those of an earlier session with the same ledger."""
        return self._released

    def batches(self) -> Iterator[NDArray[np.int64]]:
        """Index batches for the releases that remain. Every one must be released, an empty one too:
        skipping would reveal it.

        Raises:
            RuntimeError: if the previous batch was not released, or in another process than the
                run's.
        """
        while self._released < self.plan.steps:
            self._require_own_process()
            index = self._released
            indices = self.plan.sampler.indices(self._session.key, index)
            self._open = OpenBatch(index, len(indices))
            yield indices
            if self._released == index:
                raise RuntimeError(
                    "the last batch was not released; call step() (or release()) for every batch, "
                    "also an empty one: "
                    "which batches are skipped would depend on the data"
                )

    def clip(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> ClippedSum:
        """Clipped sum of the open batch, or of a part of it: parts add up with ``+``, each once.
        Private.

        Args:
            model, per_example_loss: as for ``quietgrad.clipping.clipped_gradients``.
            batch: tensors [examples, ...]; or an iterator over micro-batches of the open batch (a
                generator), each clipped and added while one alone is held.

        Raises:
            ValueError: for an iterator without a micro-batch, and what the clipper refuses.
            RuntimeError: in another process than the run's, or under a process group of several
                ranks.
        """
        self._require_own_process()
        bound = self._bindings.of(model, per_example_loss)
        total: ClippedSum | None = None
        for part in batch if isinstance(batch, Iterator) else (batch,):
            drawn = Projections(self._session.key, self._released)
            clipped = self._stamped(bound.clip(part, drawn, step=self._released))
            total = clipped if total is None else total + clipped
        if total is None:
            raise ValueError(
                "batch is an iterator that gave no micro-batch; for a batch without records give "
                "one empty micro-batch, whose sum is zero"
            )
        return total

    def check(
        self, model: nn.Module, per_example_loss: PerExampleLoss, public_batch: Batch
    ) -> None:
        """Examines model and loss on two or more public or made-up records, before any private one
        is read; the guard's later looks use them too.

        Raises:
            ValueError: naming what cannot be clipped per example, with the remedy.
        """
        self._bindings.of(model, per_example_loss).check(public_batch)

    def contribution(
        self, gradients: Mapping[str, Tensor], examples: int | None = None
    ) -> ClippedSum:
        """Per-example gradients that were made otherwise (a canary's, or by code of the user's
        own), clipped here and stamped as ``clip`` stamps: they add up with its sums.

        Each record is shortened, never lengthened, to norm C over all its parameters together; norm
        and factor are taken in float64. A record that is not finite counts and contributes zero.

        Args:
            gradients: name -> gradient of one record, in the parameter's shape; with ``examples``,
                [examples, *shape]. Private.
            examples: how many records, if not one. They have to be in the open batch, like those of
                any sum: the release counts them.

        Raises:
            ValueError: for tensors of another number of records, or where the accountant's law of
                the sketched norms is not above the exact one.
            RuntimeError: in another process than the run's.
        """
        self._require_own_process()
        refuse_process_group()
        claim = self.plan.clipper.claim
        if isinstance(claim.clipping, RandomizedClipping) and claim.clipping.envelope != "mixed":
            raise ValueError(
                f"the plan accounts for the {claim.clipping.envelope!r} envelope, which holds for "
                "sketched norms alone; contributions with exact norms need the 'mixed' one"
            )
        return self._stamped(clip_given(gradients, examples, claim))

    def _stamped(self, clipped: ClippedSum) -> ClippedSum:
        part = frozenset([object()])
        return replace(
            clipped, stamp=Stamp.on(clipped.gradients, self._token, self._released, part)
        )

    def release(self, clipped: ClippedSum) -> NoisySum:
        """Records the release, then draws the noise.

        Args:
            clipped: the sum over the open batch: what ``clip`` returned for its parts, each added
                once and left as it was.

        Raises:
            RuntimeError: if the plan's releases are used up, no batch is open, the sum is not of
                the open batch, or this is another process than the run's.
            ValueError: if the clipped sum claims another sensitivity than the plan accounts for.
        """
        with self._one_at_a_time:  # two threads would release one batch twice
            return self._release(clipped)

    def _release(self, clipped: ClippedSum) -> NoisySum:
        self._require_own_process()
        refuse_process_group()
        if self._closed:
            raise RuntimeError("the run is closed; start another one")
        if self._released >= self.plan.steps:
            raise RuntimeError(
                f"all {self.plan.steps} releases of the plan are made; build a plan with more steps"
            )
        if self._open is None:
            raise RuntimeError(
                "there is no open batch: every release needs the batch that batches() gave for it, "
                "or the sampling rate accounted for is not the one that ran; loop over "
                "run.batches() and clip the records at its indices"
            )
        if self._open.release != self._released:
            raise RuntimeError(
                "this batch is released already; every release needs a batch of its own from "
                "batches(), or the sampling rate "
                "accounted for is not the one that ran"
            )
        if clipped.claim != self.plan.clipper.claim:
            raise ValueError(
                f"the clipped sum claims {clipped.claim}, but the plan accounts for "
                f"{self.plan.clipper.claim}"
            )
        self._require_sum_of(self._open, clipped)
        self._session.join(clipped.gradients, self._released)
        if self._writer is not None:
            self._writer.release(self._released)
        self._released += 1
        if self._seed_use is not None:
            self._seed_use.releases = self._released
        noisy = self._session.cover(clipped)
        return replace(noisy, expected_batch_size=self.plan.expected_batch_size)

    def _require_sum_of(self, batch: OpenBatch, clipped: ClippedSum) -> None:
        """Refuses a sum that is not of the open batch, as far as that can be told: its origin, that
        nothing was changed, and how many records it holds.
        """
        stamp = clipped.stamp
        if stamp is None or stamp.run is not self._token or stamp.release != batch.release:
            raise RuntimeError(
                "the clipped sum was not made by this run for the batch that is open; clip the "
                "open batch with run.clip (gradients made otherwise: run.contribution)"
            )
        if not stamp.fits(clipped.gradients):
            raise RuntimeError(
                "the clipped sum was changed after it was clipped, so its bound is gone; release "
                "it as run.clip and + made it"
            )
        # The message names no sizes: how many records a batch holds is private.
        if clipped.private.examples != batch.examples:
            raise RuntimeError(
                "the clipped sum does not hold as many records as the open batch; clip exactly the "
                "records at the indices that batches() gave, each once (several views of a record "
                "are no records: average their losses)"
            )

    def keep_noise(self) -> None:
        """Keeps the rows that correlated noise goes on from in a secret file beside ``keys``, so
        that a resume draws again only what came after. Without ``keys``, with independent noise or
        memory="regenerate" there is nothing to keep. Cost: b - 1 copies of the trainable
        parameters, written to disk.
        """
        self._require_own_process()
        self._session.keep()

    def model_seed(self) -> int:
        """What to seed torch's generators with for the next release, where the model itself draws
        (dropout): a function of the session's secret root and the release's number. Secret.
        """
        self._require_own_process()
        return self._session.key.words("model", self._released)[0] >> 1

    def backward(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch
    ) -> NoisySum:
        """Stands where ``loss.backward()`` stood: one private step up to the optimiser's.

        Clips the open batch, writes the release down, adds the noise, post-processes by the plan's
        denoiser, and sets ``.grad`` of the trainable parameters to the mean, in place of
        what it held.

        Args:
            model, per_example_loss, batch: as for ``clip``; the whole batch, or all its parts.

        Returns:
            What was released, before the denoiser: what optimisers step on that denoise a moment of
            their own (``quietgrad.denoising.SpectralAdamW``), instead of ``.grad``.

        Raises:
            ValueError, RuntimeError: as ``clip`` and ``release``.
        """
        noisy = self.release(self.clip(model, per_example_loss, batch))
        self.plan.write_gradients(noisy, model)
        return noisy

    def step(self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch) -> NoisySum:
        """The same as ``backward``."""
        return self.backward(model, per_example_loss, batch)

    def epsilon(self) -> float:
        """Privacy spent so far at the plan's delta; 0 before the first release, infinite once
        privacy was given up.
        """
        if self._given_up:
            return math.inf
        if self._released == 0:
            return 0.0

        return epsilon_report(self.plan.event.after(self._released), self.plan.delta).epsilon

    def give_up_privacy(self, reason: str) -> NotPrivate:
        """Leave for ``quietgrad.research`` to look at clipped gradients before their noise, for
        data that need no protection. The ledger says so for good; epsilon is infinite.

        Raises:
            ValueError: without a reason.
        """
        self._require_own_process()
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(
                f"reason={reason!r}: say why these data need no protection; the ledger keeps it"
            )
        if self._writer is not None:
            self._writer.not_private(reason)
        self._given_up = True
        return NotPrivate(reason)

    def close(self) -> None:
        """Closes the ledger; nothing can be released after it."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> PrivateRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
