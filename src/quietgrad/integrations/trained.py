"""Which run trained the parameters that are in memory: another run on them adds its epsilon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from quietgrad.accounting import epsilon_report
from quietgrad.plan import PrivacyPlan
from quietgrad.training.files.provenance import Record, provenance


@dataclass
class Trained:
    """What a run has done to a model in memory."""

    run: str
    plan: PrivacyPlan
    started_from: tuple[Record, ...]
    releases: int = 0

    def record(self) -> Record:
        """As it would be saved with the weights."""
        facts = {
            "epsilon": epsilon_report(
                self.plan.event.after(self.releases), self.plan.delta
            ).epsilon,
            "delta": self.plan.delta,
            "steps": self.releases,
            "neighbouring": self.plan.neighbouring,
            **self.plan.told_users(),
            **self.plan.told_beside(),
        }
        return provenance("train_dataset", facts, self.plan.data_are_public, self.started_from)


# Parameters -> the run that trained them last, as long as they are in memory.
_TRAINED: Any = WeakIdKeyDictionary()


def note_trained(model: nn.Module, trained: Trained) -> None:
    """After a release."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            _TRAINED[parameter] = trained


def runs_of(model: nn.Module) -> list[Trained]:
    """Those that trained parameters of a model last."""
    held = {id(t): t for p in model.parameters() if (t := _TRAINED.get(p)) is not None}
    return list(held.values())
