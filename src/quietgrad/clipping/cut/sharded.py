"""A clipper bound to a model whose layers are cut over ranks and whose parameters ``fully_shard``
shards over others.

Groups of ranks hold records of their own, as those do that shard a model, and the ranks of a group
hold the same records and a part of every layer each. Passes are made by all together; a record's
norm is the sum over its group; what a rank forms is the sum of its part, which is scattered over
the ranks that have the same part. What a whole group holds is measured and added by one of it.
"""

from __future__ import annotations

from typing import Any

from quietgrad.clipping.capture.examples import Examples, UserBatch
from quietgrad.clipping.capture.layout import Layout, layout_of
from quietgrad.clipping.capture.spread import Spread
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.cut.refusals import refuse_what_is_not_cut_and_sharded
from quietgrad.clipping.cut.sharing import cut_of, how_cut, over_ranks, require_whole_gradients
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.planner.execution import ExecutionChoice
from quietgrad.clipping.sharded.bound import ShardedClipper
from quietgrad.clipping.sharded.company import Company
from quietgrad.clipping.soundness.processes import refuse_wrapped_model
from quietgrad.clipping.soundness.records import take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch


class CutShardedClipper(ShardedClipper):
    """Clips the batches of a run whose ranks hold a shard of a part of each layer.

    Attributes:
        sharing: the ranks that share this one's records, while the run clips.
    """

    sharing: CutCompany | None = None

    def _require_known_to(self, company: Company) -> None:
        refuse_what_is_not_cut_and_sharded(self.model, self._shared_with())

    def _shared_with(self) -> CutCompany:
        if self.sharing is None:
            refuse_wrapped_model(self.model)  # not clipped by a run
        assert self.sharing is not None
        return self.sharing

    def _layout(self) -> Layout:
        if self._spread is None:
            self._spread = Spread(self.model)
        cut = cut_of(self.model, self._shared_with())
        return layout_of(self.model, self._shared, self._spread, cut)

    def _work(self, layout: Layout, projections: Projections | None) -> Work:
        return over_ranks(super()._work(layout, projections), self._shared_with())

    def _has_in_this_round(self, own: Examples | None) -> None:
        given: Any = ()
        if own is not None:
            given = own.records if own.sizes is None else UserBatch(own.records, own.sizes)
        known = self._guard.told_of(self.model)
        self._shared_with().require_same_records(given, how_cut(self.model), known)

    def _was_examined(self, subject: Subject, records: Batch) -> None:
        require_whole_gradients(subject, take(records, [0]), self._shared_with())

    def _guarded(
        self, subject: Subject, batch: Examples, how: ExecutionChoice, step: int, always: bool
    ) -> ExecutionChoice:
        chosen = super()._guarded(subject, batch, how, step, always)
        self._was_examined(subject, batch.rows)
        return chosen
