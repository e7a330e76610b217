"""Looks at a model, and at records, after the run was started: where all ranks do it together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from quietgrad.distributed.alike import records_digest
from quietgrad.distributed.sharded import meets_in_passes
from quietgrad.distributed.shares import Shares
from quietgrad.plan.session.drawing import DrawsForModels


class LooksTogether(DrawsForModels):
    """A run whose model and records are looked at by all of its ranks."""

    _shares: Shares
    _closed: bool

    def _require_running(self) -> None:
        """Raises RuntimeError where the run is over, or another process's."""
        self._require_own_process()
        if self._closed:
            raise RuntimeError(
                "the run is closed; loop over its batches before its with block ends, or start it "
                "again with its ledger"
            )

    @contextlib.contextmanager
    def looking(self, model: nn.Module) -> Iterator[None]:
        """Inside, public records are run through the model on all ranks. What one refuses alone
        stops the others, who would wait for it in the middle of a pass.

        Args:
            model: as it is trained.
        """
        meets_in_passes(self._team, model)
        with self._team.stopping_all():
            yield

    def _look_first(self, dataset: Any, cut: str) -> None:
        """Of a loader that is made: all ranks have these records, and they lie where they lay."""
        self._shares.records = self._team.same_records(dataset, self._session.key, cut)
        self._session.require_places(dataset)

    def _look_again(self, dataset: Any) -> None:
        """Before a pass: a script may have shuffled them since. What other ranks find is compared
        at the next release, as one rank may begin a pass where another goes on with its own.
        """
        with self._team.stopping_all():
            self._session.require_places(dataset)
            if self._team.size > 1:
                self._shares.records = records_digest(dataset, self._session.key)[0]
