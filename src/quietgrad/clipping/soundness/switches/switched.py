"""A switch in plain Python that a record throws for good: an attribute, an option, a list, a
variable of the loss, a hook that a forward pass registers.

All records that come later find it thrown, alone and in company, so no comparison of records shows
it. Compared is, therefore, with the state from before: what model and loss keep is noted at every
call, and where a call changes a place for the first, second, fourth, ... time, to a kind of value
that the place never held, or a few thousand records after the place was looked at, some records go
through both states. If their losses or gradients differ, the batch is refused before it is
released, and the old state put back. Else the change stays: counts, lists and tables that nobody
reads are the user's.

Cost: a millisecond a call for two hundred layers. A look is some forty passes of one record,
and a place that changes at every call is looked at after every ``PAUSE`` records.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import cast

from torch import Tensor

from quietgrad.clipping.soundness.company.differences import close
from quietgrad.clipping.soundness.company.lengths import longest, positions_of
from quietgrad.clipping.soundness.held_still import CommonRandomness
from quietgrad.clipping.soundness.kept.holders import HeldArray, HeldTensor
from quietgrad.clipping.soundness.kept.lazily import (
    REMEDY,
    TOO_LARGE,
    AnyOf,
    KeepsFirst,
    Passes,
    named,
)
from quietgrad.clipping.soundness.kept.snapshot import Snapshot
from quietgrad.clipping.soundness.records import spread, take, with_companions
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.clipping.soundness.switches.news import news_of
from quietgrad.clipping.soundness.switches.standing import Change, Standing, with_changes_of
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.tensors import Batch, batch_size_of, map_tensors

# Records that are looked at; of them, by their gradients and cut to half their length, too.
MANY = 8
FEW = 3
# Records after which a change is looked at again, however often the place changes: some forty
# passes are half a per cent of them.
PAUSE = 8_000
# Kinds of value of one name that are each looked at, names of one place that are told apart.
MOST_KINDS = 32
MOST_NAMES = 64
# Calls of a single record, beside made-up ones, after which a change stays without a second record.
MOST_ALONE = 8


class Switches:
    """What was changed by records, of one model and loss, and not looked at yet."""

    def __init__(self) -> None:
        self._standing: Standing | None = None
        self._public = False
        self._open: dict[Hashable, Change] = {}
        self._times: Counter[tuple[str, str]] = Counter()
        self._kinds: defaultdict[tuple[str, str], set[Hashable]] = defaultdict(set)
        self._names: defaultdict[str, set[str]] = defaultdict(set)
        self._records = 0
        self._looked_at: dict[tuple[str, str], int] = {}  # number of records that had come by then
        self._waiting: set[tuple[str, str]] = set()
        self._due = False
        self._alone = 0
        self._guarded_step: int | None = None

    def begin(self, subject: Subject) -> None:
        """Notes what is there before the first record."""
        if self._standing is None:
            self._standing = Standing(subject.model, subject.per_example_loss)

    @contextlib.contextmanager
    def watching(
        self,
        subject: Subject,
        count: int,
        records: Callable[[], Batch],
        guarded_step: int | None,
        public: bool = False,
        any_of: AnyOf = bool,
    ) -> Iterator[None]:
        """Sees that what the block's records change for good matters to nobody's contribution; from
        ``begin`` on, which may be in the block.

        Args:
            subject: model and loss.
            count: of records that go through in the block.
            records: those that are looked at, some of them or public ones; the same for all
                processes that make every pass together.
            guarded_step: number of the release if it is a guarded one: all changes that wait are
                looked at.
            public: whether the block's records may change what they like.
            any_of: asks these processes.

        Raises:
            KeepsFirst: naming the place, which was put back.
        """
        self._accept()
        self._public = public
        try:
            yield
        finally:
            guarded = guarded_step is not None and guarded_step != self._guarded_step
            self._note(thorough=guarded)
        self._records += count
        if any_of(bool(self._open and count) and (guarded or self._is_due())):
            self._guarded_step = guarded_step if guarded else self._guarded_step
            self._look(subject, records(), any_of)

    def _is_due(self) -> bool:
        long_ago = self._records - PAUSE
        return self._due or any(self._looked_at.get(key, 0) < long_ago for key in self._waiting)

    @contextlib.contextmanager
    def filled_by_public(self) -> Iterator[None]:
        """What the block changes was made of public records, and stays."""
        self._note()
        try:
            yield
        finally:
            self._accept()

    def _changes(self, by_caller: bool = False, thorough: bool = False) -> dict[Hashable, Change]:
        return {} if self._standing is None else self._standing.changes(by_caller, thorough)

    def _accept(self) -> None:
        """What changed outside of calls is the caller's, and stays; but where a record's change of
        the same place waits, and the two cannot be told apart, both are looked at.
        """
        for key, change in self._changes(by_caller=True).items():
            waiting = self._open.get(key)
            if waiting is not None:
                before = with_changes_of(waiting.before, change)
                if before is not None:
                    self._open[key] = waiting._replace(before=before)
                elif isinstance(waiting.before, HeldTensor) and not waiting.before.is_copied:
                    del self._open[key]  # refused until its owner puts it back, as it did

    def _note(self, thorough: bool = False) -> None:
        """What changed while records went through."""
        if self._public:
            return self._accept()
        for key, change in self._changes(thorough=thorough).items():
            waiting = self._open.get(key, change)
            self._open[key] = change._replace(before=waiting.before)
            self._due = self._is_news(change) or self._due

    def _is_news(self, change: Change) -> bool:
        kinds_by_name: defaultdict[str, set[Hashable]] = defaultdict(set)
        for name, kind in news_of(change.before, change.now):
            kinds_by_name[self._told_apart(change.place, name)].add(kind)
        found = False
        for name, kinds in (kinds_by_name or {"": set()}).items():
            key = (change.place, name)
            self._waiting.add(key)
            self._times[key] += 1
            new = kinds - self._kinds[key] if len(self._kinds[key]) < MOST_KINDS else set()
            self._kinds[key] |= new
            found = found or bool(new) or self._times[key].bit_count() == 1
        return found

    def _told_apart(self, place: str, name: str) -> str:
        names = self._names[place]
        if len(names) < MOST_NAMES:
            names.add(name)
        return name if name in names else ""

    def _look(self, subject: Subject, records: Batch, any_of: AnyOf) -> None:
        """Sees that losses and gradients are the same as they would be with the state from before.

        Args:
            subject: model and loss.
            records: at least one.
            any_of: asks the processes that make every pass together.

        Raises:
            KeepsFirst: naming the place; the state from before was put back.
        """
        changes = list(self._open.values())
        places = tuple(dict.fromkeys(change.place for change in changes))
        after = Snapshot(subject.model, subject.per_example_loss)
        message = _SWITCHED.format(named(places))
        try:
            lost = [change.place for change in changes if not _is_put_back(change)]
            # Asked before any pass: all processes make the same ones, or none.
            matters = any_of(bool(lost))
            if lost:
                message = TOO_LARGE.format(lost[0])
            if not matters:
                with CommonRandomness():
                    matters = any(
                        any_of(not _are_same(subject, passes, changes, after))
                        for passes in _passes_of(subject, records)
                    )
        finally:
            after.put_back()
        if matters:
            self._put_back(changes)
            raise KeepsFirst(message)
        self._walk()
        self._looked_at |= dict.fromkeys(self._waiting, self._records)
        self._alone = self._alone + 1 if batch_size_of(records) == 1 else MOST_ALONE
        if self._alone >= MOST_ALONE:
            self._settled()

    def _put_back(self, changes: list[Change]) -> None:
        """What cannot be put back is refused again by the next call, until its owner does it."""
        lost = [change for change in changes if not _is_put_back(change)]
        self._walk()
        if lost:
            self._due = True
        else:
            self._settled()

    def _walk(self) -> None:
        if self._standing is not None:
            self._standing.walk()

    def _settled(self) -> None:
        self._open, self._waiting, self._due, self._alone = {}, set(), False, 0


def _passes_of(subject: Subject, records: Batch) -> Iterator[Callable[[], Tensor | Passes]]:
    """Some records, each alone: a few by loss and gradient, whole and cut to half of their length,
    others by loss; and the few together, as what is read in company alone moves later records no
    less. Of a single record also others that are made of it.
    """
    count = batch_size_of(records)
    made = with_companions(records, FEW) if count == 1 else None
    some = take(records, spread(count, MANY)) if made is None else made
    for row in range(batch_size_of(some)):
        one = take(some, [row])
        if row >= FEW:
            yield partial(subject.losses, one)
            continue
        half = _half(one)
        for each in (one,) if half is None else (one, half):
            yield partial(Passes.of, each, subject)
    if batch_size_of(some) > 1:
        yield partial(subject.losses, take(some, range(min(FEW, batch_size_of(some)))))


def _is_put_back(change: Change) -> bool:
    return change.before.put_back() or not isinstance(change.before, HeldTensor | HeldArray)


def _half(one: Batch) -> Batch | None:
    whole = longest(one)
    if whole < 2:
        return None

    def cut(t: Tensor) -> Tensor:
        axis = positions_of(t)
        return t.narrow(axis, 0, whole // 2) if axis and t.shape[axis] == whole else t

    return map_tensors(one, cut)


def _are_same(
    subject: Subject,
    passes: Callable[[], Tensor | Passes],
    changes: list[Change],
    after: Snapshot,
) -> bool:
    """Whether passes give the same in both states. Those of a made-up or shorter record may be
    impossible in both, which shows nothing.
    """
    after.put_back()
    now = _result(subject, passes)
    after.put_back()
    for change in changes:
        change.before.put_back()
    before = _result(subject, passes)
    if now is None or before is None:
        return now is before
    if isinstance(now, Passes) and isinstance(before, Passes):
        return now.agree(before, subject)
    again = subject.tolerance(cast(Tensor, now)).again
    return close(cast(Tensor, now), cast(Tensor, before), again, again)


def _result(subject: Subject, passes: Callable[[], Tensor | Passes]) -> Tensor | Passes | None:
    try:
        with unchanged(subject.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return passes()
    except Exception:
        return None


_SWITCHED = (
    "the loss of one example depends on earlier ones: {} was changed while records went through, "
    "and would stay so for all later ones, whose losses or gradients are others with what it held "
    f"before; {REMEDY}. It was put back as it was"
)
