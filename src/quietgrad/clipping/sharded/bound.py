"""A clipper bound to a model whose parameters are sharded by ``fully_shard``.

Each forward and each backward pass gathers parameters, so all ranks make the same passes in the
same order. What a rank does must not depend on its own records:

- Micro-batches come in rounds. In each the ranks tell how many rows they have; who has none left
  makes the pass with a record that counts nothing.
- The guard looks at the same records on every rank, given by the rank that has most in this round,
  so that it decides the same everywhere. For this records travel between ranks.
- Nothing is chosen by what memory is free here: micro-batches are as large as they are handed over,
  or as ``physical_batch_size`` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.capture.layout import Layout, layout_of
from quietgrad.clipping.capture.spread import Spread
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.clipping.engines.accumulator import Sums, zero_sum
from quietgrad.clipping.engines.summing import Summing
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.one_at_a_time import one_at_a_time
from quietgrad.clipping.out_of_range import naming_numbers
from quietgrad.clipping.planner.execution import ExecutionChoice
from quietgrad.clipping.sharded.company import Company
from quietgrad.clipping.sharded.passes import add_scattered, keep_company
from quietgrad.clipping.sharded.refusals import refuse_what_is_not_fully_sharded
from quietgrad.clipping.sharded.sums import ScatteredSums
from quietgrad.clipping.soundness.guard import is_guarded
from quietgrad.clipping.soundness.processes import refuse_wrapped_model
from quietgrad.clipping.soundness.refusals import refuse_model
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.tensors import (
    Batch,
    batch_size_of,
    is_spread,
    map_tensors,
    spread_like,
    to_device,
)

# Entries of per-example gradients of matrices that are kept until factors are known. Models whose
# micro-batches have more keep the factors of the rest, as one process would not: then the last bits
# of float64 sums may differ from that process's.
MOST_KEPT = 2**24


class ShardedClipper(BoundClipper):
    """Clips the batches of a run whose ranks hold a shard of the model each."""

    _spread: Spread | None = None
    _stand_in: Batch | None = None

    @one_at_a_time
    def clip_together(
        self,
        parts: Iterator[Batch],
        projections: Projections,
        step: int,
        summing: Summing,
        company: Company,
    ) -> ClippedSum:
        """Sum over all ranks of the clipped gradients of a batch, called by all of them.

        Args:
            parts: this rank's micro-batches, each as ``clip`` takes a batch; none for an empty
                share.
            projections: of this release.
            step: number of the release.
            summing: how micro-batches are added up.
            company: the ranks.

        Returns:
            Sharded parameters: this rank's shard of the sum over all ranks, as a DTensor. Others:
            this rank's own sum. Counts and numbers beside the gradients: this rank's own. Private.

        Raises:
            ValueError: as ``BoundClipper.clip``; for what only one example at a time could clip,
                and for parameters that are spread otherwise than by ``fully_shard``.
        """
        self._require_known_to(company)
        if self.clipper.engine == "one-example":
            raise ValueError(
                "engine='one-example' with parameters that are sharded by fully_shard: only "
                "captured gradients can be scattered; use engine='bookkeeping', or keep the whole "
                "model on every rank (docs/many_processes.md)"
            )
        refuse_model(self.model)
        layout = self._layout()
        self._limits(layout)
        work = replace(self._work(layout, projections), twice=is_guarded(step), most_kept=MOST_KEPT)
        apart = summing.apart(layout.parameters.values())
        spread = {name: p for name, p in layout.parameters.items() if is_spread(p)}
        shapes = {name: layout.shape_of(name) for name in spread}
        sums = ScatteredSums(company, dict(spread), summing.unit if apart else 0.0, shapes)
        plain: Sums = {}
        counts = PrivateCounts()
        try:
            for own, rows in self._rounds(parts, company):
                early = self._guard.is_early(self._subject(layout), max(rows), step)
                watching = self._watching(layout, own, rows, step, company)
                numbers = naming_numbers(self.model, own)
                with watching, numbers, unchanged(self.model, thorough=early):
                    size = self._size_of_passes(layout, own, rows, step, company)
                    times = self._guard.least_times(self.model, layout.parameters)  # once looked at
                    work = replace(work, least_times=times)
                    for part in self._cut(own, size, company):
                        counts += self._passed(work, part, sums, plain, summing)
        except NotCaptured as error:
            raise ValueError(
                f"{str(error).partition(';')[0]}; parameters that are sharded by fully_shard are "
                "clipped by captured gradients alone: freeze these parameters "
                "(requires_grad_(False)), or keep the whole model on every rank "
                "(docs/many_processes.md), where one example at a time is exact for every layer"
            ) from error
        shards = sums.all_shards()
        gradients = {
            name: spread_like(shards.pop(name), p)
            if name in spread
            else plain.pop(name)
            if name in plain
            else zero_sum(p)
            for name, p in layout.parameters.items()
        }
        return ClippedSum(gradients, self.clipper.claim, counts)

    def _require_known_to(self, company: Company) -> None:
        """That the model is one that is clipped here."""
        refuse_what_is_not_fully_sharded(self.model, company.size)

    def _has_in_this_round(self, own: Examples | None) -> None:
        """Told of this rank's micro-batch before any rank makes a pass."""

    def _was_examined(self, subject: Subject, records: Batch) -> None:
        """Told of the records that the guard has looked at, by all ranks."""

    def _passed(
        self,
        work: Work,
        part: Examples | None,
        sums: ScatteredSums,
        plain: Sums,
        summing: Summing,
    ) -> PrivateCounts:
        """One pass of this rank, with a micro-batch or in company of the others."""
        if part is None:
            assert self._stand_in is not None
            keep_company(work, self._stand_in, sums)
            return PrivateCounts()
        own: Sums = {} if sums.unit else plain
        observed = add_scattered(work, part, sums, own)
        seen = PrivateCounts.of(observed, self.clipper.beside, work.least_times)
        if sums.unit:
            summing.add(plain, own)
        return replace(seen, beside=summing.beside(seen.beside))

    def norms(
        self, batch: Batch, projections: Projections | None = None, step: int | None = None
    ) -> Tensor:
        """Raises ValueError: norms alone are for models that are whole."""
        refuse_wrapped_model(self.model)
        return super().norms(batch, projections, step)

    def _layout(self) -> Layout:
        if self._spread is None:
            self._spread = Spread(self.model)
        return layout_of(self.model, self._shared, self._spread)

    def _subject(self, layout: Layout) -> Subject:
        return Subject(self.model, layout, self.per_example_loss, self._checkpointing)

    def _choose(self, layout: Layout, batch: Examples) -> ExecutionChoice:
        asked = self.clipper.physical_batch_size or self.clipper.max_physical_batch_size
        size = asked or max(batch.record_count, 1)
        return ExecutionChoice("bookkeeping", size, math.nan, math.nan, "the same on all ranks")

    def _rounds(
        self, parts: Iterator[Batch], company: Company
    ) -> Iterator[tuple[Examples | None, list[int]]]:
        """This rank's next micro-batch, and how many rows of each rank are looked at in this
        round; until no rank has any.
        """
        while True:
            own = next((e for part in parts if len(e := self.examples_of(part))), None)
            self._has_in_this_round(own)
            count = 0 if own is None else batch_size_of(own.looked_at)
            known = f"{self._guard.told_of(self.model)} {self._stand_in is None}"
            rows = company.told("micro-batch", count, known, of="loss")
            if not any(rows):
                return
            yield own, rows

    def _size_of_passes(
        self,
        layout: Layout,
        own: Examples | None,
        rows: list[int],
        step: int,
        company: Company,
    ) -> int | None:
        """Most records in a pass, once the guard lets them through; None: as many as there are."""
        asked, limit = self.clipper.physical_batch_size, self.clipper.max_physical_batch_size
        if asked is None and limit is not None and max(rows) > limit * self.clipper.views:
            asked = limit  # a loader's micro-batches are no larger, and need not be cut
        donor = rows.index(max(rows))
        most = rows[donor] if asked is None else min(rows[donor], asked * self.clipper.views)
        size = 1 if asked == 1 else max(most, 2)
        subject = self._subject(layout)
        due = self._guard.is_due(subject, rows[donor], size, step, captures=True)
        usual = 1 if self._guard.takes_alone(subject) else asked
        begun = self._guard.has_begun(subject)
        if begun and not due and self._stand_in is not None:
            return usual
        shared = self._shared_rows(own, donor, company)
        mine = () if own is None else own.rows
        any_of = _asking(company)
        if not begun:
            self._guard.begin(subject, shared, mine, any_of)
            company.told("first records", 0, "looked at")
        if self._stand_in is None:
            self._stand_in = map_tensors(slice_batch(shared, 0, 1), torch.clone)
        if not due:
            return usual
        together = self._guard.examine(subject, shared, size, step, True, mine, any_of)
        self._was_examined(subject, shared)
        company.told("guard", 0, f"together {together}")
        return asked if together else 1

    def _watching(
        self,
        layout: Layout,
        own: Examples | None,
        rows: list[int],
        step: int,
        company: Company,
    ) -> AbstractContextManager[None]:
        """Of one round: what any rank's records switch for good, all ranks look at."""
        most = max(rows)
        shared = partial(self._shared_rows, own, rows.index(most), company)
        any_of = _asking(company)
        return self._guard.watching(self._subject(layout), most, shared, step, any_of=any_of)

    def _shared_rows(self, own: Examples | None, donor: int, company: Company) -> Batch:
        """The rows of one rank's micro-batch, on every rank; public ones where there are any."""
        if self._guard.public is not None:
            return self._guard.public
        mine = None if own is None else map_tensors(own.looked_at, lambda t: t.cpu())
        shared = company.given_by(donor, mine)
        return to_device(shared, next(iter(self.model.parameters())).device)

    def _cut(
        self, own: Examples | None, size: int | None, company: Company
    ) -> Iterator[Examples | None]:
        """This rank's passes of a round; None where it has none and others have."""
        if size is None:
            yield own
            return
        parts = [] if own is None else list(own.parts(size))
        passes = max(company.told("passes", len(parts)))
        for part, _ in zip_longest(parts, range(passes)):
            yield part


def _asking(company: Company) -> Callable[[bool], bool]:
    """Whether any rank says so; all ask alike. What a look finds may be of one rank alone, as its
    loss keeps a log there, or reads its own batch; the passes of the look are everybody's.
    """
    return lambda said: any(company.told("the guard's question", int(said)))
