"""A clipper bound to a model whose layers are cut over ranks by tensor parallel plans.

All ranks run the same records, and each forms its part of their gradients from what it has. What
is one number for a record is one number everywhere: partial squares, with what they may be wrong
by, meet once for every micro-batch (24 bytes a record), and are added up in the order of the ranks,
so that all ranks have the same norms, doubts and factors to the bit. Parameters that every rank
holds whole are measured and added by one rank each.

What is clipped on a rank is what it measured there, whatever the plan of the layers: a wrong plan
would train badly, and not less privately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture.cut import piece_of
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.capture.layout import Layout, layout_of
from quietgrad.clipping.clipped_sum import ClippedSum
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.cut.refusals import refuse_what_is_not_cut
from quietgrad.clipping.cut.sharing import cut_of, how_cut, over_ranks, require_whole_gradients
from quietgrad.clipping.engines.accumulator import zero_sum
from quietgrad.clipping.engines.summing import Summing
from quietgrad.clipping.engines.work import Work
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.planner.execution import ExecutionChoice
from quietgrad.clipping.soundness.processes import refuse_wrapped_model
from quietgrad.clipping.soundness.records import take
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch, batch_size_of, local_of, spread_like

Result = TypeVar("Result")


class CutClipper(BoundClipper):
    """Clips the batches of a run whose ranks hold a part of each layer and all records.

    Attributes:
        company: the ranks, while the run clips.
    """

    company: CutCompany | None = None

    def clip(
        self,
        batch: Batch,
        projections: Projections | None = None,
        step: int | None = None,
        summing: Summing = Summing(),  # noqa: B008
    ) -> ClippedSum:
        """See ``BoundClipper.clip``. Called by all ranks, with the same records.

        Returns:
            Of what is cut, this rank's part of the sum, as a DTensor; of what all ranks hold, the
            sum on one rank and zeros on the others. Private.
        """
        if self.company is not None:
            known = self._guard.told_of(self.model)
            self.company.require_same_records(batch, how_cut(self.model), known)
        return super().clip(batch, projections, step, summing)

    def norms(
        self, batch: Batch, projections: Projections | None = None, step: int | None = None
    ) -> Tensor:
        """Raises ValueError: norms alone are for models that are whole."""
        refuse_wrapped_model(self.model)
        return super().norms(batch, projections, step)

    def _require_known(self) -> None:
        company = self.company
        if company is None:
            refuse_wrapped_model(self.model)
            return
        refuse_what_is_not_cut(self.model, company.ranks)
        if self.clipper.engine == "one-example":
            raise ValueError(
                "engine='one-example' with layers that are cut over ranks (tensor parallel): only "
                "captured gradients are known part by part; use engine='bookkeeping' "
                "(docs/tensor_parallel.md)"
            )

    def _falling_back(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except NotCaptured as error:
            raise ValueError(
                f"{str(error).partition(';')[0]}; layers that are cut over ranks are clipped by "
                "captured gradients alone: freeze these parameters (requires_grad_(False)), or "
                "keep the whole model on every rank (docs/many_processes.md), where one example at "
                "a time is exact for every layer"
            ) from error

    def _layout(self) -> Layout:
        self._require_known()
        assert self.company is not None
        return layout_of(self.model, self._shared, cut=cut_of(self.model, self.company))

    def _work(self, layout: Layout, projections: Projections | None) -> Work:
        assert self.company is not None
        return over_ranks(super()._work(layout, projections), self.company)

    def _any_of(self, said: bool) -> bool:
        assert self.company is not None
        return bool(self.company.of_each(torch.tensor([float(said)], device="cpu")).any())

    def _choose(self, layout: Layout, batch: Examples) -> ExecutionChoice:
        asked = self.clipper.physical_batch_size or self.clipper.max_physical_batch_size
        size = asked or max(batch.record_count, 1)
        return ExecutionChoice("bookkeeping", size, math.nan, math.nan, "the same on all ranks")

    def _guarded(
        self, subject: Subject, batch: Examples, how: ExecutionChoice, step: int, always: bool
    ) -> ExecutionChoice:
        assert self.company is not None
        count = batch_size_of(batch.looked_at)
        early = always or self._guard.is_early(subject, count, step)
        chosen = super()._guarded(subject, batch, how, step, always)
        self.company.require_same("guard", f"{chosen.physical_batch_size} {early}")
        if early and count:
            records = batch.looked_at if self._guard.public is None else self._guard.public
            require_whole_gradients(subject, take(records, [0]), self.company)
        return chosen

    def _made(self, name: str, parameter: Tensor, found: Tensor | None) -> Tensor:
        assert self.company is not None
        here = local_of(parameter)
        own = zero_sum(here) if found is None else found
        whole = piece_of(parameter, name, self.company.ranks) is None
        return own if whole else spread_like(own, parameter)
