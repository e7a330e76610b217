"""Where the batches of a data set come from, and which of them is open: shared by the loader, the
optimisers that step on it and the accountant.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quietgrad.generators import KeyedByStep
from quietgrad.integrations.opacus.accountants import OpenedBatch, QuietgradAccountant
from quietgrad.integrations.opacus.following.steering import PassReadings
from quietgrad.integrations.opacus.following.tracing import Tape
from quietgrad.plan.process import BoundToProcess
from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler

Indices = NDArray[np.int64]


class BatchSource(BoundToProcess):
    """Poisson batches of a data set, one after the other. A batch that was not released is drawn
    again: nobody chooses among batches.

    Attributes:
        sampler: N and q.
        tape: of the micro-batch that is open; None between passes.
        is_last: whether it is the last of its batch.
        opened: the batch as the accountant sees it.
        optimizers: those that step on these batches.
        modules: wrapped models that are trained on them.
        passes: begun so far; only the latest goes on.
    """

    def __init__(
        self, sampler: PoissonSampler, accountant: QuietgradAccountant, batch_first: bool
    ) -> None:
        super().__init__()
        self.sampler = sampler
        self.accountant = accountant
        self.batch_first = batch_first
        self.tape: Tape | None = None
        self.is_last = True
        self.opened: OpenedBatch | None = None
        self.optimizers: list[Any] = []
        self.modules: list[Any] = []
        self._key = RandomKey.from_entropy()
        self._number = 0
        self.passes = 0
        self._readings = PassReadings()
        self._reads, self._draws = KeyedByStep(), KeyedByStep()
        self._drawing = contextlib.ExitStack()

    @property
    def training(self) -> bool:
        """Whether any of the models is in training mode."""
        return any(module.training for module in self.modules)

    @property
    def number(self) -> int:
        """Of the batch that comes next."""
        return self._number

    def indices(self, number: int) -> Indices:
        """Records of a batch. Private."""
        self._require_own_process()
        return self.sampler.indices(self._key, number)

    def seed(self, what: str, number: int = 0) -> int:
        """Of generators, for the pass that is on. Secret."""
        return self._key.words("model", number, f"{what} {self.passes}")[0] >> 1

    def reading(self, number: int) -> contextlib.AbstractContextManager[None]:
        """While records of a batch are read: generators from the source's secret."""
        return self._reads.of(number, lambda: self.seed("reading", number))

    def begin_pass(self) -> int:
        """Another pass over the batches takes the place of the one before; its number."""
        self.abandon()
        self.passes += 1
        self._readings.next_pass(self.sampler.steps_per_epoch, self.sampler.dataset_size)
        return self.passes

    def give_back(self) -> None:
        """The script's generators, as they were when the micro-batch was opened."""
        self._drawing.close()

    def open(self, number: int, records: int, is_first: bool, is_last: bool) -> Tape:
        """A micro-batch, the first of a new batch or a further one.

        Raises:
            RuntimeError: if the micro-batch before was not stepped on.
        """
        self._settle()
        if is_first:
            wrapped = [one.original_optimizer for one in self.optimizers]
            self._readings.require([*self.optimizers, *wrapped])
            self.opened = self.accountant.open(self.sampler.sample_rate)
            self._number = number
        self.is_last = is_last
        # What the loop draws for its records: torch.manual_seed would say it beforehand.
        keyed = self._draws.of(number, lambda: self.seed("loop", number), with_the_scripts=True)
        self._drawing.enter_context(keyed)
        self.tape = Tape(records, self.batch_first)
        for optimizer in self.optimizers:
            optimizer.begin_micro_batch(is_first)
        return self.tape

    def finish(self) -> None:
        """After the last micro-batch of a pass.

        Raises:
            RuntimeError: if it was not stepped on.
        """
        self._settle()
        self.abandon()

    def abandon(self) -> None:
        """A pass that was broken off: what is open is closed, and drawn again if it was not
        released.
        """
        if self.tape is not None:
            self.close(self.tape)
        if self.opened is not None:
            self._number += bool(self.opened.noise)
            self.accountant.close(self.opened)
        self.tape = self.opened = None

    def close(self, tape: Tape) -> None:
        """A micro-batch is over; what was read off it is remembered."""
        self.give_back()
        for optimizer in self.optimizers:
            optimizer.remember(tape.read)
        self._readings.note(tape.numbers, tape.records)
        tape.close()

    def _settle(self) -> None:
        if self.tape is None:
            return
        empty = self.tape.records == 0
        waiting = [o for o in self.optimizers if not o.stepped]
        if len(waiting) == len(self.optimizers) and waiting and not empty:
            raise RuntimeError(
                "optimizer.step() was not called for the last batch; call it for every batch "
                "of the loader: which batches are skipped would depend on the data (a batch that "
                "does not fit the memory is cut by BatchMemoryManager, a larger one is asked for "
                "by the DataLoader's batch_size; to look at records without training, call "
                "model.eval() before the loop begins, or loop over a DataLoader of your own)"
            )
        for optimizer in self.optimizers:
            if optimizer.stepped or len(waiting) == len(self.optimizers):
                optimizer.settle(empty, self.tape.read_at is not None)
        self.close(self.tape)
        if self.is_last:
            self.abandon()
