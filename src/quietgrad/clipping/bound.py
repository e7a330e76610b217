"""A clipper bound to one model and one loss: owns what is found out about the two, and clips batch
after batch.

Nothing about models or losses is kept anywhere else: layout, traces, gradient checkpointing and the
guard's verdict live and die with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from quietgrad.clipping.asked import Settings
from quietgrad.clipping.capture.backward import Checkpointing, PerExampleLoss
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.capture.layout import Layout, Layouts, SharedInputs
from quietgrad.clipping.capture.layout.modules import walked_once
from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.clipping.engines.accumulator import zero_sum
from quietgrad.clipping.engines.bookkeeping import add_by_bookkeeping, group_norms
from quietgrad.clipping.engines.one_example import add_one_by_one, gradients_of_one, norms_of_one
from quietgrad.clipping.engines.summing import Summing, Total
from quietgrad.clipping.engines.thresholds import Split, Thresholds, thresholds
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.cost import modelled_throughput
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors.sums.scratch import Scratch
from quietgrad.clipping.one_at_a_time import one_at_a_time
from quietgrad.clipping.out_of_range import naming_numbers
from quietgrad.clipping.planner.execution import ExecutionChoice, Planned, engines_for, free_bytes
from quietgrad.clipping.planner.tracing import trace
from quietgrad.clipping.soundness.guard import Guard, is_guarded
from quietgrad.clipping.soundness.processes import refuse_process_group, refuse_wrapped_model
from quietgrad.clipping.soundness.records import entries_of
from quietgrad.clipping.soundness.refusals import refuse_model
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.generators import keyed_afresh
from quietgrad.tensors import (
    Batch,
    accumulation_dtype,
    batch_size_of,
    tensors_of,
    trainable_parameters,
)

TAKEN_ALONE = "undecided whether examples mix, or they would share random numbers"
SHARE_OF_FREE_MEMORY = 0.8  # that a step may take when no budget is given

Result = TypeVar("Result")


class BoundClipper:
    """A ``Clipper`` for one (model, loss) pair; made by ``Clipper.bind``.

    The guard (``quietgrad.clipping.soundness.guard``) runs before the first batch is clipped,
    whatever it holds, and again at guarded steps. Trainable parameters may be frozen and unfrozen,
    and modes switched, between calls: each combination is guarded on its own.
    """

    def __init__(
        self, clipper: Settings, model: nn.Module, per_example_loss: PerExampleLoss
    ) -> None:
        self.clipper = clipper
        self.model = model
        self.per_example_loss = per_example_loss
        self._checkpointing = Checkpointing()
        self._scratch = Scratch()
        self._shared, self._layouts = SharedInputs(), Layouts()
        self._guard = Guard()
        # (trainable parameters, size class of an example) -> its plan.
        self._traces: dict[tuple[frozenset[str], int], Planned] = {}
        # Trainable parameters -> why they cannot be captured.
        self._not_captured: dict[frozenset[str], str] = {}
        self._calls = 0

    @one_at_a_time
    def check(self, public_batch: Batch) -> None:
        """Runs the guard now, on records that need no protection; from here on it examines these in
        place of private ones.

        Args:
            public_batch: two or more public or made-up records, as varied and as many as a usual
                micro-batch where possible.

        Raises:
            ValueError: with fewer than two records, or naming what cannot be clipped per example.
        """
        if batch_size_of(public_batch) < 2:
            raise ValueError(
                "guard_batch holds fewer than two records, so nothing can be seen of losses that "
                "compare records; pass two or more"
            )
        public = Examples.each(public_batch, self.clipper.views)
        self._guard.public = public.rows
        self._falling_back(lambda: self._check(public))

    def _check(self, public: Examples) -> None:
        with self._prepared(public, 0, always=True):
            pass

    @one_at_a_time
    @keyed_afresh()
    def clip(
        self,
        batch: Batch,
        projections: Projections | None = None,
        step: int | None = None,
        summing: Summing = Summing(),  # noqa: B008
    ) -> ClippedSum:
        """Sum of clipped per-example gradients of a batch, micro-batch by micro-batch. What model
        and loss draw is from a run's secret, or from numbers of the operating system.

        Args:
            batch: nested containers of tensors with the example as first dimension, or a
                ``UserBatch``; may be empty.
            projections: of this release, for sketches: the same for every part of a batch; None
                draws fresh ones, for one call.
            step: number of the release that the batch is for, from 0: says when the guard runs
                again; None counts calls.
            summing: how micro-batches are added up.

        Returns:
            The clipped sum. Private until noise is added.

        Raises:
            ValueError: for cross-example layers, losses that are not one per example or depend on
                other examples, buffers and parameters that change while the loss is computed,
                models spread over devices, models that cannot be captured where book-keeping or
                sketches are asked for.
            RuntimeError: under a process group of several ranks, unless ``summing`` is over them.
        """
        if not summing.over_ranks:
            refuse_process_group()
        with walked_once(self.model):
            self._require_known()
            examples = self.examples_of(batch)
            return self._falling_back(lambda: self._clip(examples, projections, step, summing))

    def _clip(
        self,
        batch: Examples,
        projections: Projections | None,
        step: int | None,
        summing: Summing,
    ) -> ClippedSum:
        looked_at = is_guarded(self._calls if step is None else step)
        with self._prepared(batch, step) as (layout, how):
            work = replace(self._work(layout, projections), twice=looked_at)
            add = add_one_by_one if how.engine == "one-example" else add_by_bookkeeping
            parts = list(batch.parts(how.physical_batch_size))
            total = Total.of(summing, layout.parameters.values(), len(parts))
            counts = PrivateCounts()
            for part in parts:
                observed = total.add(partial(add, work, part))
                seen = PrivateCounts.of(observed, self.clipper.beside, work.least_times)
                counts += replace(seen, beside=summing.beside(seen.beside))
            sums = total.finished()
        gradients = {
            name: self._made(name, p, sums.pop(name, None)) for name, p in layout.parameters.items()
        }
        return ClippedSum(gradients, self.clipper.claim, counts)

    def _made(self, name: str, parameter: Tensor, found: Tensor | None) -> Tensor:
        """A parameter's sum, of what was found of it."""
        return zero_sum(parameter) if found is None else found

    def _require_known(self) -> None:
        """That the model is one that is clipped here."""
        refuse_wrapped_model(self.model)

    def _any_of(self, said: bool) -> bool:
        """Whether a process says so, of those that make every pass together."""
        return said

    @one_at_a_time
    def norms(
        self, batch: Batch, projections: Projections | None = None, step: int | None = None
    ) -> Tensor:
        """[examples] norms (not squared) of the whole per-example gradients. Private."""
        examples = self.examples_of(batch)
        return self._falling_back(lambda: self._norms(examples, projections, step))

    def _norms(self, batch: Examples, projections: Projections | None, step: int | None) -> Tensor:
        with self._prepared(batch, step) as (layout, how):
            work = self._work(layout, projections)
            parts = []
            for part in batch.parts(how.physical_batch_size):
                with torch.no_grad():
                    one = how.engine == "one-example"
                    norms = (
                        norms_of_one(work, gradients_of_one(work, part), part.divisor).estimate
                        if one
                        else group_norms(work, part)
                    )
                    parts.append(
                        norms if len(norms) == 1 else norms.square().sum(dim=0, keepdim=True).sqrt()
                    )
        like = next(iter(layout.parameters.values()))
        norms = torch.cat(parts, dim=1)[0] if parts else like.new_zeros(0)
        return norms.to(accumulation_dtype(like.dtype))

    @one_at_a_time
    def execution_choice(self, batch: Batch) -> ExecutionChoice:
        """Engine and micro-batch size for a batch like this one; nothing is clipped."""
        examples = self.examples_of(batch)
        return self._falling_back(lambda: self._execution_choice(examples))

    def _execution_choice(self, batch: Examples) -> ExecutionChoice:
        with self._prepared(batch, None) as (_, how):
            return how

    def _falling_back(self, work: Callable[[], Result]) -> Result:
        """``work``; once more, one example at a time, where the planner chooses, capture fails, and
        it changes nothing of what a record contributes: then it may depend on the batch.
        """
        calls = self._calls
        try:
            return work()
        except NotCaptured as error:
            if self.clipper.engine != "auto" or self._one_way(trainable_parameters(self.model)):
                raise
            self._calls = calls
            names = frozenset(trainable_parameters(self.model))
            self._not_captured[names] = str(error).partition(";")[0]
            self._traces = {key: found for key, found in self._traces.items() if key[0] != names}
        return work()

    def planned(self, layout: Layout, batch: Batch) -> Planned:
        """Of the first example, or of an earlier one of up to twice its size: shapes
        change from batch to batch, choices need not.
        """
        entries = sum(t[:1].numel() for t in tensors_of(batch))
        key = (frozenset(layout.parameters), max(entries, 1).bit_length())
        if key not in self._traces:
            captured = key[0] not in self._not_captured
            found = trace(
                self.model, layout, self.per_example_loss, batch, self._checkpointing, captured
            )
            self._traces[key] = Planned(found)
        return self._traces[key]

    @contextmanager
    def _prepared(
        self, batch: Examples, step: int | None, always: bool = False
    ) -> Iterator[tuple[Layout, ExecutionChoice]]:
        """Layout and execution choice, once the guard lets the batch through; it watches on."""
        refuse_model(self.model)
        layout = self._layout()
        self._limits(layout)
        if step is None:
            step, self._calls = self._calls, self._calls + 1
        subject = Subject(self.model, layout, self.per_example_loss, self._checkpointing)
        guard, count = self._guard, batch_size_of(batch.looked_at)
        thorough = always or guard.is_early(subject, count, step)
        looked_at, any_of = batch.looked_at, self._any_of
        watching = guard.watching(subject, count, lambda: looked_at, step, always, any_of)
        with watching, naming_numbers(self.model, batch), unchanged(self.model, thorough=thorough):
            self._guard.begin(subject, looked_at, batch.rows, any_of)
            how = self._choose(layout, batch)
            yield layout, self._guarded(subject, batch, how, step, always)

    def _guarded(
        self, subject: Subject, batch: Examples, how: ExecutionChoice, step: int, always: bool
    ) -> ExecutionChoice:
        rows, own = batch.looked_at, batch.rows
        captures = how.engine != "one-example"
        # Records that never run together cannot mix. A batch of one says nothing of how many will
        # run together next time.
        alone = not captures or self.clipper.physical_batch_size == 1
        count, entries = batch_size_of(rows), entries_of(rows)
        size = 1 if alone else max(min(how.physical_batch_size * self.clipper.views, count), 2)
        if always or self._guard.is_due(subject, count, size, step, captures, entries):
            together = self._guard.examine(subject, rows, size, step, captures, own, self._any_of)
        else:
            together = not self._guard.takes_alone(subject)
        # Half precision is seen by looking, and then there is one engine alone.
        again = how if captures else self._choose(subject.layout, batch)
        if again.engine != how.engine:
            return self._guarded(subject, batch, again, step, always)
        if together or how.physical_batch_size == 1:
            return how
        return replace(how, physical_batch_size=1, why=TAKEN_ALONE)

    def _choose(self, layout: Layout, batch: Examples) -> ExecutionChoice:
        settings = self.clipper
        n = min(batch.record_count, settings.max_physical_batch_size or batch.record_count)
        why = self._not_captured.get(frozenset(layout.parameters))
        if why is not None:
            why = f"one example at a time, since {why}"
            return ExecutionChoice("one-example", 1, math.nan, math.nan, why)
        sketched, engine = self.clipper.sketched, settings.engine
        if engine == "auto" and settings.physical_batch_size is not None:
            alone = settings.physical_batch_size == 1 and not sketched
            engine = "one-example" if alone else "bookkeeping"
        if engine == "one-example" or settings.physical_batch_size is not None or n < 2:
            size = 1 if engine == "one-example" else settings.physical_batch_size or max(n, 1)
            return ExecutionChoice(
                "bookkeeping" if engine == "auto" else engine, size, math.nan, math.nan, "asked for"
            )
        device = next(iter(layout.parameters.values())).device
        speed = settings.speed or modelled_throughput(device)
        how = self.planned(layout, batch.rows).choose(
            lambda: settings.policies(layout),
            n * settings.views,
            speed,
            SHARE_OF_FREE_MEMORY * free_bytes(device),
            engines_for(engine, self._one_way(layout.parameters)),
            settings.memory_budget,
        )
        return replace(how, physical_batch_size=-(-how.physical_batch_size // settings.views))

    def _one_way(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether two engines would give a record two norms, or two gradients."""
        return self.clipper.sketched or self._guard.least_times(self.model, parameters) != 1.0

    def examples_of(self, batch: Batch) -> Examples:
        """A batch as what is clipped: records, or users."""
        return Examples.of(batch, self.clipper.views, self.clipper.combined)

    def _layout(self) -> Layout:
        return self._layouts.of(self.model, self._shared)

    def _limits(self, layout: Layout) -> Thresholds:
        return thresholds(
            list(layout.parameters), self.clipper.max_grad_norm, cast(Split, self.clipper.groups)
        )

    def _work(self, layout: Layout, projections: Projections | None) -> Work:
        return Work(
            self.model,
            self.per_example_loss,
            layout,
            self.clipper.policies(layout),
            self._limits(layout),
            self.clipper.scaling,
            Projections.fresh() if projections is None else projections,
            self.clipper.sketched,
            self._checkpointing,
            scratch=self._scratch,
            least_times=self._guard.least_times(self.model, layout.parameters),
        )
