"""Looks at a model after its run was started: where all ranks make its passes together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from quietgrad.distributed.sharded import meets_in_passes
from quietgrad.plan.session.drawing import DrawsForModels


class LooksTogether(DrawsForModels):
    """A run whose model is looked at by all of its ranks."""

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
