"""Which run trained the parameters that are in memory: another run on them adds its epsilon."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from quietgrad.accounting import epsilon_report
from quietgrad.checks import SettingsWarning
from quietgrad.tensors import is_spread

LOOKED_AT = 64  # entries of a frozen tensor
Facts = Callable[[int], Mapping[str, Any]]


@dataclass(eq=False)
class Trained:
    """What a run has done to a model in memory.

    Attributes:
        run: its name; a run that goes on keeps it.
        facts: releases made -> what may be said of them: epsilon, delta. Public.
        data_are_public: whether its records were declared to need no protection.
        started_from: earlier runs of these weights, each once: as they are here, or as records of
            files.
        releases: made so far.
    """

    run: str
    facts: Facts
    data_are_public: bool = False
    started_from: tuple[Any, ...] = ()
    releases: int = 0


def facts_of(plan: Any) -> Facts:
    """Of a plan's run."""
    return lambda releases: {
        "epsilon": epsilon_report(plan.event.after(releases), plan.delta).epsilon,
        "delta": plan.delta,
        "steps": releases,
        "neighbouring": plan.neighbouring,
        **plan.told_users(),
        **plan.told_beside(),
    }


# Parameters -> the run that trained them last, as long as they are in memory.
_TRAINED: Any = WeakIdKeyDictionary()
# Frozen ones -> the run that trained adapters beside them, and some of their entries then: merging
# adapters writes what was trained into them.
_BESIDE: Any = WeakIdKeyDictionary()


def note_trained(model: nn.Module, trained: Trained) -> None:
    """After a release, or where one is about to be made."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            _TRAINED[parameter] = trained
        elif not (parameter.is_meta or is_spread(parameter)):
            before = _BESIDE.get(parameter)
            if before is None or before[0] is not trained:
                _BESIDE[parameter] = trained, _some_of(parameter)


def note_set_back(model: nn.Module) -> None:
    """The trained parameters hold what they held before any run."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            _TRAINED.pop(parameter, None)


def runs_of(model: nn.Module) -> list[Trained]:
    """Those that released something and trained parameters of a model last, or adapters that were
    merged into them since.
    """
    held: dict[int, Trained] = {}
    for parameter in model.parameters():
        trained = [_TRAINED[parameter]] if parameter in _TRAINED else []
        merged, entries = _BESIDE.get(parameter, (None, None))
        if merged is not None and entries != _some_of(parameter):
            trained.append(merged)
        for last in trained:
            # Of a run that ended before its first release the weights are what it began with.
            for one in (last,) if last.releases else last.started_from:
                if isinstance(one, Trained):
                    held[id(one)] = one
    return list(held.values())


def earlier_runs(model: nn.Module, own: Trained) -> tuple[Any, ...]:
    """Those whose output a model is and that ``own`` does not know of yet, each once: as they are
    here, or as records of files.
    """
    found = with_starts((), (one for one in runs_of(model) if one.run != own.run))
    return tuple(
        one
        for one in found
        if one not in own.started_from and not (isinstance(one, Trained) and one.run == own.run)
    )


def is_private(run: Any) -> bool:
    """Whether a run, or one that it began with, had records that need protection; ``run``: as it is
    here, or its record.
    """
    if isinstance(run, Trained):
        return not run.data_are_public
    before = run.get("started_from", ())
    return not run.get("data_declared_public") or any(map(is_private, before))


def _some_of(parameter: Tensor) -> tuple[str, ...]:
    """A few entries as text, in which what is no number equals itself; none of a library's own
    layout.
    """
    try:
        entries = parameter.detach().reshape(-1)
        some = entries[:: max(1, entries.numel() // LOOKED_AT)][:LOOKED_AT]
        return tuple(repr(value) for value in some.cpu().tolist())
    except (RuntimeError, NotImplementedError, TypeError):
        return ()


def with_starts(known: tuple[Any, ...], others: Iterable[Trained]) -> tuple[Any, ...]:
    """Earlier runs, and those that they started from themselves: no chain that grows with them."""
    found = list(known)
    for one in others:
        found += [earlier for earlier in (one, *one.started_from) if earlier not in found]
    return tuple(found)


class Starts:
    """What one run knows of its models: which runs trained them before, and that it does now.

    Args:
        run: its name.
        plan: what it carries out.

    Attributes:
        known: whether earlier runs were asked for already, so that none is said here.
        trains: whether anything steps on what is released; an audit looks at it alone.
    """

    def __init__(self, run: str, plan: Any) -> None:
        self._trained = Trained(run, facts_of(plan), plan.data_are_public)
        self._met: list[int] = []
        self.known = False
        self.trains = True

    def met(self, model: nn.Module) -> None:
        """Records are clipped for a model. Says once if another private run trained it."""
        trains = [id(p) for p in model.parameters() if p.requires_grad]
        if trains == self._met or not self.trains:
            return
        self._met = trains
        ours = self._trained
        others = earlier_runs(model, ours)
        ours.started_from += others
        # An earlier session of this run, in this process.
        same = (one.releases for one in runs_of(model) if one.run == ours.run)
        ours.releases = max(ours.releases, *same, 0)
        note_trained(model, ours)
        if any(map(is_private, others)) and not (ours.data_are_public or self.known):
            warnings.warn(
                "the model was trained by another private run of this process, and epsilon is "
                "this run's alone: for records that both use the epsilons and deltas add; "
                "begin with new weights, or go on with the first run by its ledger",
                SettingsWarning,
                stacklevel=5,
            )

    def released(self, releases: int) -> None:
        """So many in all, those of earlier sessions counted."""
        self._trained.releases = releases
