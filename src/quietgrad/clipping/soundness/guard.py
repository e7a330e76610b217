"""The guard of one (model, loss) pair: before the first release, and again by a public rule, it
sees that no example's contribution depends on others.

It examines public records where it was given any, else examples of the batch that is about to be
clipped, together with made-up ones where the batch holds a single record. Until it has decided,
examples are taken one at a time, which is exact whatever the model. What it cannot see is stated in
docs/clipping/guard.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from torch import nn

from quietgrad.clipping.capture.layout.modules import tensors_in
from quietgrad.clipping.norms.coarseness import least_times, standing
from quietgrad.clipping.soundness.checking import require_capture
from quietgrad.clipping.soundness.company.differences import Mixes
from quietgrad.clipping.soundness.company.own_numbers import share_numbers
from quietgrad.clipping.soundness.company.rule_padding import require_rules_ignore_padding
from quietgrad.clipping.soundness.kept.lazily import (
    AnyOf,
    Places,
    look_at_the_first,
    require_no_other_records,
    require_unread,
)
from quietgrad.clipping.soundness.kept.own_seeds import require_draws_still_of_the_run
from quietgrad.clipping.soundness.mixing import (
    FIRST,
    LATER,
    require_each_alone,
    require_no_memory,
)
from quietgrad.clipping.soundness.records import entries_of, spread, take, with_companions
from quietgrad.clipping.soundness.subject import Subject, SubjectKey, key_of
from quietgrad.clipping.soundness.switches.switched import Switches
from quietgrad.clipping.soundness.unchanged import unchanged
from quietgrad.tensors import Batch, batch_size_of, trainable_parameters

# After the powers of two, every so many releases: the average cost of a look vanishes beside the
# training (docs/clipping/guard.md, "Cost").
PERIOD = 512

# Examples of so many times the entries of those that were looked at are looked at themselves.
LONGER = 2


def is_guarded(step: int) -> bool:
    """Whether release number ``step`` (from 0) is examined again: the 1st, 2nd, 4th, 8th, ... and
    every 512th. A public rule.
    """
    number = step + 1
    return number & (number - 1) == 0 or number % PERIOD == 0


@dataclass
class _Verdict:
    """What was decided for one set of trainable parameters and training modes.

    Attributes:
        together: most examples in one pass for which mixing is ruled out; 0: undecided.
        entries: most entries of one example that was looked at.
        captured: whether the capture was compared with autograd.
        remembers_nothing: whether it was seen that nothing is kept between calls.
        kept: names of places that keep something of records which nothing read when they were
            looked at; None before that.
        shares_numbers: whether records that are taken together meet one random number, so that they
            are taken one at a time.
        one_seen: whether a single record, alone and beside made-up ones, gave no reason to refuse.
        last_step, last_step_of_one: the release that was examined last, with several records and
            with one.
        roundoff: of the coarsest precision that took part when it was looked at; None before that.
    """

    together: int = 0
    entries: int = 0
    captured: bool = False
    remembers_nothing: bool = False
    kept: Places | None = None
    shares_numbers: bool = False
    one_seen: bool = False
    last_step: int | None = None
    last_step_of_one: int | None = None
    roundoff: float | None = None


@dataclass
class Guard:
    """Decides what may be clipped together; holds the verdicts of one (model, loss) pair.

    Attributes:
        public: records that need no protection, examined in place of the batch's own.
        switches: what calls change in plain Python.
    """

    public: Batch | None = None
    _verdicts: dict[SubjectKey, _Verdict] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)

    def watching(
        self,
        subject: Subject,
        count: int,
        records: Callable[[], Batch],
        step: int,
        always: bool = False,
        any_of: AnyOf = bool,
    ) -> AbstractContextManager[None]:
        """``Switches.watching`` for a block of release ``step``; ``always``: of public records."""
        public = self.public
        looked_at = records if public is None else lambda: public
        guarded_step = step if is_guarded(step) else None
        return self.switches.watching(subject, count, looked_at, guarded_step, always, any_of)

    def verdict_of(self, subject: Subject) -> _Verdict:
        """Of the trainable parameters and modes as they are now."""
        return self._verdicts.setdefault(subject.key, _Verdict())

    def told_of(self, model: nn.Module) -> str:
        """What is known of the pair, in a word: ranks that make all passes together look when it is
        the same on all of them.
        """
        known = self._known_of(model)
        return repr((self.public is None, replace(known, kept=known.kept and ())))

    def begin(
        self, subject: Subject, batch: Batch, own: Batch | None = None, any_of: AnyOf = bool
    ) -> None:
        """Before anything of the batch meets the pair: sees that nothing is made of the first
        records and kept. On public records it may be: those fill it.

        Args:
            subject, batch: as for ``examine``.
            own, any_of: as for ``examine``.

        Raises:
            ValueError: naming what is kept, with the remedy.
        """
        known = self.verdict_of(subject)
        if not self.has_begun(subject) and batch_size_of(batch):
            public = self.public is not None
            records = self.public if public else batch
            known.kept = look_at_the_first(subject, records, public)
            reached = batch if own is None else own
            require_no_other_records(subject, take(records, [0]), reached, any_of)
            self.switches.begin(subject)

    def has_begun(self, subject: Subject) -> bool:
        """Whether ``begin`` has seen what it looks for."""
        return self.verdict_of(subject).kept is not None

    def is_due(
        self, subject: Subject, count: int, size: int, step: int, captures: bool, entries: int = 0
    ) -> bool:
        """Whether this call, of ``count`` records of so many entries, is examined: undecided, a
        guarded release, more examples together than ever before, or ones of twice the length: an
        expert of limited room was never full until then.
        """
        if not count:
            return False  # nothing is run and nothing is clipped: the sum of no records is zero
        known = self.verdict_of(subject)
        if self.is_early(subject, count, step):
            return True
        if self._is_alone(count):
            return False  # exact whatever the model; the verdict stays open for the next batch
        longer = self._are_longer(known, entries)
        return (captures and not known.captured) or (
            size > 1 and (self._wants(known, size) or longer)
        )

    def is_early(self, subject: Subject, count: int, step: int) -> bool:
        """Whether nothing is decided yet about ``count`` records, or the step is a guarded one that
        was not examined.
        """
        known = self.verdict_of(subject)
        if self._is_alone(count):
            guarded = is_guarded(step) and step not in (known.last_step, known.last_step_of_one)
            return guarded or not (known.remembers_nothing or known.one_seen)
        return (is_guarded(step) and step != known.last_step) or not known.remembers_nothing

    def takes_alone(self, subject: Subject) -> bool:
        """Whether it is decided that examples are taken one at a time."""
        return self.verdict_of(subject).shares_numbers

    def _is_alone(self, count: int) -> bool:
        return count == 1 and self.public is None

    def _are_longer(self, known: _Verdict, entries: int) -> bool:
        if self.public is not None or known.shares_numbers:
            return False
        return entries >= LONGER * known.entries > 0

    def _wants(self, known: _Verdict, size: int) -> bool:
        if known.shares_numbers:
            return False
        return size > known.together

    def least_times(self, model: nn.Module, trained: Iterable[str] | None = None) -> float:
        """What least divisors are multiplied by, in the precision that takes part; ``trained``:
        names of the model's trainable parameters, where they are known.
        """
        seen = self._known_of(model, trained).roundoff or 0.0
        return least_times(max(standing(tensors_in(model)), seen))

    def _known_of(self, model: nn.Module, trained: Iterable[str] | None = None) -> _Verdict:
        key = key_of(model, trainable_parameters(model) if trained is None else trained)
        return self._verdicts.get(key, _Verdict())

    def _note_precision(self, subject: Subject) -> None:
        """Keeps the precision that was seen first.

        Raises:
            ValueError: where it follows from records, or changes.
        """
        known, stands = self.verdict_of(subject), standing(tensors_in(subject.model))
        seen = {least_times(max(stands, roundoff)) for roundoff in subject.coarsest}
        coarsest = max(subject.coarsest_back, *subject.coarsest, 0.0)
        before = coarsest if known.roundoff is None else known.roundoff
        if len(seen) > 1 or least_times(max(stands, before)) < least_times(coarsest):
            raise ValueError(
                "the model runs in half precision at times, and otherwise not: whether it does "
                "must not follow from records; run the whole step in torch.autocast, or in float32"
            )
        known.roundoff = before

    def examine(
        self,
        subject: Subject,
        batch: Batch,
        size: int,
        step: int,
        captures: bool,
        own: Batch | None = None,
        any_of: AnyOf = bool,
    ) -> bool:
        """Runs the checks that this call needs, and notes in which precision the model runs.

        Args:
            subject: model and loss.
            batch: the call's records, at least one.
            size: most examples that may run together, by the clipper's settings.
            step: number of the release.
            captures: whether gradients are captured (else plain autograd forms them, one example at
                a time).
            own: what this process was handed over, where ``batch`` is another process's; an empty
                tuple for nothing. None: ``batch``.
            any_of: asks the processes that make every pass together.

        Returns:
            Whether several examples may be taken together; one at a time is exact in any case.

        Raises:
            ValueError: naming what mixes examples, escapes the capture or keeps something between
                calls. The remedy is in it.
        """
        public = self.public is not None
        with self.switches.filled_by_public() if public else nullcontext():
            decided = self._examined(subject, batch, size, step, captures, own, any_of)
        self._note_precision(subject)
        return decided

    def _examined(
        self,
        subject: Subject,
        batch: Batch,
        size: int,
        step: int,
        captures: bool,
        own: Batch | None,
        any_of: AnyOf,
    ) -> bool:
        known = self.verdict_of(subject)
        at_most = LATER if known.remembers_nothing else FIRST
        records = batch if self.public is None else self.public
        count = batch_size_of(records)
        longer = self._are_longer(known, entries_of(records))
        if not known.remembers_nothing:
            with unchanged(subject.model, thorough=True):  # first, so that what changes is named
                subject.losses(take(records, range(min(size, count, at_most))))
        else:
            first = take(records, [0])
            require_unread(subject, first, known.kept or (), any_of)
            require_no_other_records(subject, first, batch if own is None else own, any_of)
            require_draws_still_of_the_run(subject, first)
        if size > 1 and not known.shares_numbers:  # at every look: a rate may grow from zero
            known.shares_numbers = share_numbers(subject, records)
        if captures:
            known.captured = require_capture(subject, take(records, spread(count, at_most)))
        if count == 1:
            self._examine_one(subject, records, captures and size > 1)
            known.one_seen, known.last_step_of_one = True, step
            return size == 1
        if size == 1 or known.shares_numbers:
            require_no_memory(subject, take(records, spread(count, 3)))
        if size > 1:  # what mixes is refused, too, where it will be taken alone
            decided = require_each_alone(
                subject,
                records,
                size,
                thorough=not known.together,
                crowded=longer or size > known.together,
            )
            known.together = size if decided else 0
        known.entries = max(known.entries, entries_of(records))
        if captures and not known.remembers_nothing:  # last, so that what reads others is named
            require_rules_ignore_padding(subject, take(records, [0]))
        known.remembers_nothing = True
        known.last_step = step
        return size == 1 or (known.together > 0 and not known.shares_numbers)

    def _examine_one(self, subject: Subject, one: Batch, together: bool) -> None:
        """One record and made-up ones: can refuse, but leaves the verdict open
        for the next batch.
        """
        require_no_memory(subject, one)
        made = with_companions(one, 3)
        if made is None:
            return
        try:
            if together:
                require_each_alone(subject, made, 3, thorough=True)
            else:
                require_no_memory(subject, made)
        except Mixes:
            raise
        except (
            Exception
        ):  # a made-up record may be impossible for the model; the next batch decides
            return
