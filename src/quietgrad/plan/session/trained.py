"""Which run trained the parameters that are in memory: another run on them adds its epsilon."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from quietgrad.accounting import epsilon_report
from quietgrad.averaging import averages_in_memory
from quietgrad.checks import SettingsWarning
from quietgrad.ledger import LedgerWriter
from quietgrad.ledger.earlier import RUN, starts_of, tells_of
from quietgrad.plan.session.copies import (
    digest_of,
    moved,
    note_before,
    note_values,
    runs_of_values,
    some_of,
)
from quietgrad.tensors import is_spread

Facts = Callable[[int], Mapping[str, Any]]

# For who loads other weights into a model that a run has trained: what they were made of is not
# known, and an optimiser of that run may still hold its releases. So they count as that run's, and
# copies of them too.
NEW_MODEL = (
    "begin with new weights in a new model (what is loaded into a trained one counts as its run's, "
    "for its copies too; where that is a mistake, in a new process)"
)


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
        given_up: whether it gave up privacy: then it has no epsilon, and nothing protects its
            records.
    """

    run: str
    facts: Facts
    data_are_public: bool = False
    started_from: tuple[Any, ...] = ()
    releases: int = 0
    given_up: bool = False


def facts_of(plan: Any) -> Facts:
    """Of a plan's run. It does not hold the plan, which knows whose records are whose."""
    event, delta = plan.event, plan.delta
    told = {"neighbouring": plan.neighbouring, **plan.told_users(), **plan.told_beside()}

    def facts(releases: int) -> dict[str, Any]:
        spent = epsilon_report(event.after(releases), delta).epsilon
        return {"epsilon": spent, "delta": delta, "steps": releases, **told}

    return facts


def said_of(trained: Trained) -> dict[str, Any]:
    """For a ledger: public facts of a run so far, without those that it began with."""
    facts = {"steps": trained.releases} if trained.given_up else trained.facts(trained.releases)
    kind = {"private": not trained.given_up, "data_declared_public": trained.data_are_public}
    return {**kind, **facts, RUN: trained.run}


# Parameters -> the run that trained them last, as long as they are in memory.
_TRAINED: Any = WeakIdKeyDictionary()
# Frozen ones -> the run that trained adapters beside them, and some of their entries then: merging
# adapters writes what was trained into them.
_BESIDE: Any = WeakIdKeyDictionary()


def note_trained(model: nn.Module, trained: Trained) -> None:
    """After a release, or where one is about to be made."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            last = _TRAINED.get(parameter)
            if last is None or last.run != trained.run:
                if last is not None and is_private(last):
                    note_values([(parameter, last)])
                note_before(parameter)
            _TRAINED[parameter] = trained
        elif not (parameter.is_meta or is_spread(parameter)):
            before = _BESIDE.get(parameter)
            if before is None or before[0] is not trained:
                _BESIDE[parameter] = trained, some_of(parameter)


def note_set_back(model: nn.Module) -> None:
    """The trained parameters hold what they held before any run."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            _TRAINED.pop(parameter, None)


def note_copies(parameters: Iterable[Tensor]) -> None:
    """Copies of what trained parameters hold now, and of their averages, will be known by their
    values.
    """
    found = {id(p): (p, _TRAINED[p]) for p in parameters if p in _TRAINED}
    private = {place: one for place, one in found.items() if is_private(one[1])}
    note_values(private.values())
    for parameter, average in averages_in_memory() if private else ():
        if id(parameter) in private:
            note_values([private[id(parameter)]], average)


def largest_of(model: nn.Module) -> list[Tensor]:
    """The largest trained parameter, if there is one: at every step it alone is noted."""
    trained = [p for p in model.parameters() if p.requires_grad and not is_lazy(p)]
    return [max(trained, key=lambda p: p.numel())] if trained else []


def _items(kept: Any) -> Iterator[tuple[Tensor, Any]]:
    """Of what is still in memory, while other threads add to it."""
    for ref, value in kept.data.copy().items():
        parameter = ref()
        if parameter is not None:
            yield parameter, value


def _held_now() -> Iterator[tuple[bytes, Trained]]:
    """Digests of what is in memory and was trained, or had adapters merged into it, and by whom."""
    for parameter, trained in _items(_TRAINED):
        digest = moved(parameter)
        if digest is not None:
            yield digest, trained
    for parameter, average in averages_in_memory():
        digest = moved(parameter, average) if parameter in _TRAINED else None
        if digest is not None:
            yield digest, _TRAINED[parameter]
    for parameter, (trained, entries) in _items(_BESIDE):
        if entries != some_of(parameter):
            digest = digest_of(parameter)
            if digest is not None:
                yield digest, trained


def runs_of(model: nn.Module, copies: bool = True) -> list[Trained]:
    """Those that released something and trained parameters of a model last, or what these are
    copies of, or adapters that were merged into them since.

    Args:
        copies: False: the parameters themselves, not what has the same values.
    """
    held: dict[int, Trained] = {}
    for parameter in model.parameters():
        trained = [_TRAINED[parameter]] if parameter in _TRAINED else []
        merged, entries = _BESIDE.get(parameter, (None, None))
        if merged is not None and entries != some_of(parameter):
            trained.append(merged)
        for last in trained:
            # Of a run that ended before its first release the weights are what it began with.
            for one in (last,) if last.releases else last.started_from:
                if isinstance(one, Trained):
                    held[id(one)] = one
    names = {one.run for one in held.values()}
    for one in runs_of_values(model.parameters(), _held_now()) if copies else ():
        if one.run not in names:
            held[id(one)] = one
    return list(held.values())


def earlier_runs(model: nn.Module, own: Trained) -> tuple[Any, ...]:
    """Those whose output a model is and that ``own`` does not know of yet, each once: as they are
    here, or as records of files.
    """
    # Of an earlier session of its own, and of other runs of its name (runs on public records that
    # a seed fixes have one): not these, but what they began with.
    found = with_starts((), runs_of(model))
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
        writer: of its ledger, which says which runs these were; None where there is none here.
        given_up: whether it gave up privacy, in an earlier session.

    Attributes:
        known: whether earlier runs were asked for already, so that none is said here.
        trains: whether anything steps on what is released; an audit looks at it alone.
    """

    def __init__(
        self, run: str, plan: Any, writer: LedgerWriter | None = None, given_up: bool = False
    ) -> None:
        told = () if writer is None else writer.contents.started_from  # of earlier sessions
        self._trained = Trained(run, facts_of(plan), plan.data_are_public, told, given_up=given_up)
        self._writer = writer
        self._met: list[list[TensorWeakRef]] = []  # what it trains of each of its models
        self._largest: list[TensorWeakRef] = []  # of each
        self.known = False
        self.trains = True

    def give_up(self) -> None:
        """Its weights are those of a run without privacy from now on."""
        self._trained.given_up = True

    def asked_for(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Records of the outputs of earlier runs that the weights are from, as files say."""
        for record in records:
            if record not in self._trained.started_from:
                self._trained.started_from += (record,)
            self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._writer is not None and starts_of(record):
            self._writer.started_from(record)

    def met(self, model: nn.Module) -> bool:
        """Records are clipped for a model. Says once if another private run trained it.

        Returns:
            Whether the run trains parameters that it did not train before.
        """
        trains = [p for p in model.parameters() if p.requires_grad]
        if not self.trains or any(_are_these(some, trains) for some in self._met):
            return False
        self._met = [some for some in self._met if len(_alive(some)) == len(some)]
        self._met.append([TensorWeakRef(p) for p in trains])
        self._largest = [TensorWeakRef(p) for p in (*_alive(self._largest), *largest_of(model))]
        ours = self._trained
        others = earlier_runs(model, ours)
        new = tuple(one for one in others if not self._is_told(one))
        ours.started_from += new
        for one in new if self._writer is not None else ():  # an epsilon takes a moment
            self._write(said_of(one) if isinstance(one, Trained) else one)
        # An earlier session of this run, in this process.
        same = (one.releases for one in runs_of(model) if one.run == ours.run)
        ours.releases = max(ours.releases, *same, 0)
        note_trained(model, ours)
        if any(map(is_private, new)) and not (ours.data_are_public or self.known):
            warnings.warn(
                "the model was trained by another private run of this process, and epsilon is "
                "this run's alone: for records that both use the epsilons and deltas add; "
                f"{NEW_MODEL}, or go on with the first run by its ledger",
                SettingsWarning,
                stacklevel=6,
            )
        return True

    def _is_told(self, one: Any) -> bool:
        """Whether the record of a file is of a run that is known here, too."""
        told = [other for other in self._trained.started_from if not isinstance(other, Trained)]
        return isinstance(one, Trained) and any(tells_of(r, one.run, one.releases) for r in told)

    def released(self, releases: int) -> None:
        """So many in all, those of earlier sessions counted. The weights are still those that the
        releases before made.
        """
        self._trained.releases = releases
        note_copies(_alive(self._largest))

    def over(self) -> None:
        """Nothing more is released."""
        for some in self._met:
            note_copies(_alive(some))


def _alive(some: Iterable[TensorWeakRef]) -> list[Tensor]:
    return [p for ref in some if (p := ref()) is not None]


def _are_these(some: Sequence[TensorWeakRef], trains: Sequence[Tensor]) -> bool:
    """Whether they are the same tensors, in order: an address alone may be another's by now."""
    return len(some) == len(trains) and all(ref() is p for ref, p in zip(some, trains, strict=True))
