"""One run of a trainer in its output directory: ledger, secrets, lock, and which checkpoints are
its own. The files are those of the run directories of ``quietgrad train``.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from quietgrad.clipping.capture.spread import put_away
from quietgrad.distributed.together import Together, here
from quietgrad.durable import make_folder, write_whole
from quietgrad.events import unit_of
from quietgrad.integrations.reporting import shown_epsilon, spent_name
from quietgrad.integrations.trained import record_of
from quietgrad.ledger import LedgerContents, holds_records, read_ledger
from quietgrad.ledger.earlier import tells_of
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.plan.session.trained import NEW_MODEL, Trained, facts_of, note_trained, runs_of
from quietgrad.training.files.card import CARD, add_privacy, is_blank
from quietgrad.training.files.noise_state import (
    NoiseKeeper,
    leave_keys,
    remove_unreleased,
    start_private,
)
from quietgrad.training.files.provenance import (
    FILE,
    KEY,
    WITHOUT_PRIVACY,
    Record,
    check_start,
    read_provenance,
    records_of_adapters,
    stamp_weights,
    starts_of,
)
from quietgrad.training.files.run_dir import RunDir

# In a checkpoint, where the generators' states would be: of which run it is, and how many
# releases its weights have seen.
MARK = "quietgrad_release.json"
STATE = "trainer_state.json"  # the last file of a checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to go on from.

    Attributes:
        path: its folder.
        releases: that its weights have seen.
        started_from: records of the outputs of earlier runs that its run began with.
    """

    path: Path
    releases: int
    started_from: tuple[Record, ...] = ()


class TrainerSession:
    """A plan in an output directory, while ``open`` and after it.

    Attributes:
        plan: what runs.
        run: None before the first start.
        resumed: the checkpoint that the run went on from, if any.
        together: the processes of the run.
    """

    def __init__(self, plan: PrivacyPlan, output_dir: str, accept_start: str = "") -> None:
        self.plan = plan
        self.accept_start = accept_start
        self._starts: dict[str, tuple[Record, ...]] = {}
        self._trained: Trained | None = None
        self.files = RunDir(Path(output_dir))
        self.run: PrivateRun | None = None
        self.resumed: Checkpoint | None = None
        self._keeper = NoiseKeeper(None)
        self.together = Together()
        self._name = ""
        self._ledger = LedgerContents()
        self.coarse_told = False  # see PrivateRun

    @property
    def started_from(self) -> tuple[Record, ...]:
        """Records of the outputs of earlier runs that the weights are from, each once."""
        found: list[Record] = []
        for records in self._starts.values():
            found += [record for record in records if record not in found]
        return tuple(found)

    def starts_from(self, model: Any, bare: Any, name: str = "model") -> None:
        """Keeps the records of the runs that a model's weights are from now, where that is known
        and asked for, in place of what was known of it.

        Args:
            model: as it is trained.
            bare: without adapters.
            name: of the argument that it was given as.

        Raises:
            ValueError: for the output of an earlier run that was not asked for.
        """
        place = str(getattr(getattr(bare, "config", None), "_name_or_path", "") or "")
        protect, accepted = not self.plan.data_are_public, self.accept_start
        try:
            found = check_start(place, "", accepted, protect, records_of_adapters(model))
        except ValueError as error:
            said = (
                str(error)
                .replace("model.name", "model")
                .replace("model.accept_start = ", "accept_start=")
            )
            raise ValueError(said) from None
        put_away(model)  # else parameters that an evaluation left gathered are not those trained
        held = runs_of(model)
        here = self._run_here() if held else ""
        # Weights that were read from a run's file are copies of what it trained here, if it did.
        others = (t for t in held if not any(tells_of(one, t.run, t.releases) for one in found))
        records = tuple(record_of(t) for t in others if t.run != here)
        kinds: set[str] = set().union(*map(starts_of, records))
        if protect and kinds and accepted not in (WITHOUT_PRIVACY, *kinds):
            raise ValueError(
                "model was trained by another private run of this process, whose epsilon adds to "
                f"this one's in {str(self.files.path)!r} for every record that both use; "
                f"{NEW_MODEL}, go on with that run by resume_from_checkpoint=True in its own "
                'output_dir, or, where both are meant, set accept_start="epsilons-add"'
            )
        # What this directory's own run has begun with was asked for when it began.
        own = (record_of(t)["started_from"] for t in held if t.run == here)
        self._starts[name] = (*found, *records, *(one for before in own for one in before))

    def _run_here(self) -> str:
        if not holds_records(self.files.ledger):
            return ""
        return read_ledger(self.files.ledger).sessions[0].name

    def trained(self, model: Any) -> None:
        """After a release: these weights are from this run."""
        assert self.run is not None
        if self._trained is None or self._trained.run != self._name:
            self._trained = self._as_trained()
        self._trained.started_from = self.started_from
        self._trained.releases = self.run.released
        note_trained(model, self._trained)

    @contextlib.contextmanager
    def open(
        self,
        resume: bool | str,
        require: Callable[[Path], None] = lambda _: None,
        together: Together | None = None,
    ) -> Iterator[str | None]:
        """Starts the run, or goes on with it; gives the checkpoint to load, if there is one. On
        several processes all of them call it, and are one run. What is refused counts no start.

        Args:
            resume: as ``Trainer.train``'s ``resume_from_checkpoint``: False begins, True goes on
                from the newest checkpoint of this run that is whole, a path from that one.
            require: refuses a checkpoint that the trainer cannot read.
            together: the processes, where they have met already.

        Raises:
            ValueError: for a directory with a run that is not gone on with, or without the one that
                is; a checkpoint of another run; a ledger that holds fewer releases than it; and
                what ``PrivacyPlan.start`` refuses.
        """
        self.together = here() if together is None else together
        with contextlib.ExitStack() as held:
            # The first process alone locks, looks and, at the end, removes what is secret.
            self.together.by_first(lambda: self._take(held, resume))
            # Before the start is recorded.
            self.resumed = self.together.by_first(lambda: self._checkpoint(resume, require))
            self._starts["checkpoint"] = self.resumed.started_from if self.resumed else ()
            writes = self.together.first
            if writes and resume is False:
                held.callback(remove_unreleased, self.files)  # once the run has let go of it
            goes_on = resume is not False
            given = self.plan, self.files, goes_on, self.together, self.started_from
            with start_private(*given) as run:
                self._ledger = self.together.by_first(lambda: read_ledger(self.files.ledger))
                self._name = self._ledger.sessions[0].name
                self.run, self._keeper, run.coarse_told = run, NoiseKeeper(run), self.coarse_told
                run.starts.known = True  # asked for, or refused, by ``starts_from``
                yield None if self.resumed is None else str(self.resumed.path)
                if writes:
                    leave_keys(self.files, run.released, self.plan.steps)

    def _take(self, held: contextlib.ExitStack, resume: bool | str) -> None:
        """Locks the directory, and looks whether it is what ``resume`` says."""
        make_folder(self.files.path)
        try:
            held.enter_context(self.files.locked())
        except ValueError as error:
            raise ValueError(str(error).replace("training.run_dir", "args.output_dir")) from None
        begun = holds_records(self.files.ledger)
        place = f"args.output_dir={str(self.files.path)!r}"
        if begun and resume is False:
            raise ValueError(
                f"{place} holds a private run already; go on with it by "
                "trainer.train(resume_from_checkpoint=True), or choose another directory (the "
                "epsilons of two runs on the same records add)"
            )
        if not begun and resume is not False:
            raise ValueError(
                f"{place} holds no ledger, so there is no private run to go on with; restore "
                "it, or begin one with trainer.train()"
            )

    def _checkpoint(self, resume: bool | str, require: Callable[[Path], None]) -> Checkpoint | None:
        """What is gone on from, as the ledger has it."""
        if resume is False or not self.files.ledger.is_file():  # that it is gone its start says
            return None
        ledger = self._ledger = read_ledger(self.files.ledger)
        # A stop before the first start was written down leaves none.
        self._name, released = next((s.name for s in ledger.sessions), ""), ledger.releases
        if isinstance(resume, str):
            found = self._marked(Path(resume))
            if found is None:
                raise ValueError(
                    f"resume_from_checkpoint={resume!r} is no whole checkpoint of the private run "
                    f"in {str(self.files.path)!r} ({MARK} names its run; save_only_model leaves it "
                    "out); go on from one that is, or with resume_from_checkpoint=True"
                )
        else:
            found = next(iter(sorted(self._all(), key=lambda c: -c.releases)), None)
        if found is None:
            if released:
                warnings.warn(
                    f"{str(self.files.path)!r} holds no whole checkpoint of its run: training "
                    f"begins anew, after the {released} releases that the ledger counts",
                    stacklevel=6,
                )
            return None
        if found.releases > released:
            raise ValueError(
                f"cannot resume: {found.path.name} is at release {found.releases}, but the ledger "
                f"counts {released}: it is not the ledger of this run, or lost lines, and "
                "nothing can be claimed; restore it, or begin in a new directory"
            )
        require(found.path)
        return found

    def _all(self) -> Iterator[Checkpoint]:
        for path in self.files.path.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            found = self._marked(path)
            if found is not None:
                yield found

    def _marked(self, folder: Path) -> Checkpoint | None:
        """The checkpoint in a folder, if it is whole and of this run."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
            json.loads((folder / STATE).read_text(encoding="utf-8"))
            made_by = self._ledger.makers(int(mark["releases"]))
            # A copy of the run that went on by itself has the same first start.
            if mark["run"] == self._name and tuple(mark.get("starts", made_by)) == made_by:
                said = read_provenance(folder) or {}  # whatever model the trainer is given now
                began = mark.get("started_from", said.get("started_from", ()))
                return Checkpoint(folder, int(mark["releases"]), tuple(began))
        return None

    def look_seed(self) -> int:
        """Secret, of looks at a few records: one for all processes, as those that hold shards of a
        model make every pass together.
        """
        assert self.run is not None
        seed: int = self.together.of_first(self.run.model_seed())
        return seed

    def mark(self, folder: Path, releases: int) -> None:
        """Writes into a checkpoint of which run it is, how many releases its weights have seen, and
        what they began with.
        """
        if not self.together.first:
            return
        make_folder(folder)
        starts = list(self._ledger.makers(releases))
        mark = {"run": self._name, "releases": releases, "starts": starts}
        mark["started_from"] = list(self.started_from)
        write_whole(folder / MARK, (json.dumps(mark) + "\n").encode())

    def keep_noise(self) -> None:
        """At a checkpoint: rows of correlated noise, in the secret files."""
        self._keeper.keep(stopping=False)

    def stamp(self, folder: Path, model: Any = None) -> None:
        """Saved weights say what they were trained on and how; public facts alone. Nothing before a
        first release. ``model``: whose adapters are saved, too.
        """
        record = self._record()
        if record is None or not folder.is_dir():
            return
        beside = json.dumps({KEY: record}, indent=2) + "\n"
        write_whole(folder / FILE, beside.encode())
        stamp_weights(folder, record, getattr(model, "peft_config", None) or ())
        if is_blank(folder / CARD):
            add_privacy(folder / CARD, record)

    def describe(self, card: Path) -> None:
        """A model card says what is guaranteed, once something was released."""
        record = self._record()
        if record is not None and card.is_file():
            add_privacy(card, record)

    def _as_trained(self, releases: int = 0) -> Trained:
        plan = self.plan
        started = self.started_from
        return Trained(self._name, facts_of(plan), plan.data_are_public, started, releases)

    def _record(self) -> Record | None:
        """Of the run so far, for the process that writes."""
        if not self.together.first or self.run is None or not self.run.released:
            return None
        return record_of(self._as_trained(self.run.released))

    def shown(self) -> dict[str, Any]:
        """What a line of the log says of privacy: epsilon so far, rounded up, and what was released
        beside the gradients.
        """
        if self.run is None:
            return {}
        name = spent_name(unit_of(self.plan.neighbouring))
        shown: dict[str, Any] = {name: shown_epsilon(self.run.epsilon())}
        shown |= self.run.shown()
        return shown | ({"data_declared_public": True} if self.plan.data_are_public else {})

    def epsilon(self) -> float:
        """Privacy spent so far in the output directory, at the plan's delta.

        Raises:
            RuntimeError: for a run of an earlier trainer that this one has not gone on with.
        """
        if self.run is not None:
            return self.run.epsilon()
        if holds_records(self.files.ledger):
            raise RuntimeError(
                f"{str(self.files.path)!r} holds a run that this trainer has not gone on with; "
                "quietgrad epsilon --ledger tells what it has spent"
            )
        return 0.0
