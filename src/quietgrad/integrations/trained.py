"""What is said of the runs that trained parameters in memory, as it would be saved with them."""

from __future__ import annotations

from quietgrad.plan.session.trained import Trained
from quietgrad.training.files.provenance import Record, provenance


def record_of(trained: Trained) -> Record:
    """Public facts of a run so far, and of those that its weights are from."""
    earlier = (_alone(one) if isinstance(one, Trained) else one for one in trained.started_from)
    return _alone(trained, tuple(earlier))


def _alone(trained: Trained, earlier: tuple[Record, ...] = ()) -> Record:
    facts = None if trained.given_up else trained.facts(trained.releases)
    return provenance("train_dataset", facts, trained.data_are_public, earlier, trained.run)
