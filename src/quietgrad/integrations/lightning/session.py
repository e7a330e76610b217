"""One run of a Trainer in its ``default_root_dir``: ledger, secrets, lock, and which checkpoints
are its own. The files are those of the run directories of ``quietgrad train``.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import nn

from quietgrad.distributed.together import Together, here
from quietgrad.durable import make_folder
from quietgrad.integrations.trained import record_of
from quietgrad.ledger import LedgerContents, holds_records, read_ledger
from quietgrad.ledger.earlier import RUN, tells_of
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.plan.session.trained import NEW_MODEL, Trained, facts_of, note_trained, runs_of
from quietgrad.training.files.noise_state import (
    NoiseKeeper,
    leave_keys,
    remove_unreleased,
    start_private,
)
from quietgrad.training.files.provenance import EPSILONS_ADD, KEY, Record, provenance, starts_of
from quietgrad.training.files.run_dir import RunDir

MARK = "quietgrad"  # in a checkpoint: of which run it is, and how many releases it has seen


def check_start(record: Record | None, accepted: str, plan: PrivacyPlan) -> tuple[Record, ...]:
    """Refuses weights of an earlier run as a start, unless that is asked for.

    Args:
        record: what the checkpoint says that the weights were loaded from.
        accepted: ``PrivateLightningModule.accept_start``.
        plan: of the run that begins.

    Raises:
        ValueError: with the remedy.
    """
    if record is None:
        return ()
    if not plan.data_are_public and starts_of(record) and accepted != EPSILONS_ADD:
        raise ValueError(
            "these weights are from a private run, whose epsilon adds to this one's for every "
            f"record that both use; go on with that run (ckpt_path=), {NEW_MODEL}, or, where "
            f"the cost is accepted, set accept_start = {EPSILONS_ADD!r}"
        )
    return (record,)


class Session:
    """A plan in a directory, from ``open`` to ``close``, and what it has spent after that.

    Attributes:
        plan: what runs.
        run: None before it was opened.
    """

    def __init__(self, plan: PrivacyPlan, folder: str) -> None:
        if "://" in folder:
            raise ValueError(
                f"Trainer(default_root_dir={folder!r}): the ledger needs a local directory, whose "
                "files can be locked and synced; give dirpath= to ModelCheckpoint for the others"
            )
        self.plan = plan
        self.run: PrivateRun | None = None
        self.files = RunDir(Path(folder))
        self._place = f"Trainer(default_root_dir={folder!r})"
        self._open = contextlib.ExitStack()
        self._keeper = NoiseKeeper(None)
        self._together = Together()
        self._ledger = LedgerContents()
        self._started_from: tuple[Record, ...] = ()
        self.coarse_told = False  # see PrivateRun
        self._trained: Trained | None = None

    def trained(self, module: nn.Module) -> None:
        """After a release: these weights are from this run."""
        assert self.run is not None
        if self._trained is None:
            name = self._ledger.sessions[0].name
            public, started = self.plan.data_are_public, self._started_from
            self._trained = Trained(name, facts_of(self.plan), public, started)
        self._trained.releases = self.run.released
        note_trained(module, self._trained)

    def open(
        self,
        checkpoint: dict[str, Any] | None,
        record: Record | None,
        accepted: str,
        module: nn.Module | None = None,
        loaded_run: str = "",
    ) -> int:
        """Starts the run, or goes on with it after a checkpoint. On several processes all of them
        call it, and are one run.

        Args:
            checkpoint: ``MARK`` of the one that was loaded; {} for one without; None to begin.
            record: what an earlier checkpoint says, that the weights were loaded from.
            accepted: as for ``check_start``.
            module: whose parameters other runs of this process may have trained.
            loaded_run: name of the run that ``record`` is of.

        Returns:
            Releases that the weights have seen.

        Raises:
            ValueError: for a directory with a run that is not gone on with, or without the one that
                is; a checkpoint of another run; a ledger that holds fewer releases than it; and
                what ``PrivacyPlan.start`` refuses.
        """
        self._together = here()

        def told(one: Trained) -> bool:
            """Weights of a checkpoint are copies of what its run trained here, if it did."""
            return tells_of({RUN: loaded_run, **(record or {})}, one.run, one.releases)

        with contextlib.ExitStack() as opened:
            # The first process alone locks, looks and, at the end, removes what is secret.
            begun = self._together.by_first(lambda: self._take(opened, checkpoint is not None))
            if checkpoint is None:
                held = [] if module is None else runs_of(module)
                others = (record_of(one) for one in held if not told(one))
                begins = (record, *others)
                self._started_from += self._together.all_of(
                    lambda: sum((check_start(one, accepted, self.plan) for one in begins), ()),
                    "begin from these weights",
                )
                seen = 0
            else:  # before the start is recorded
                seen = self._together.by_first(lambda: self._seen(checkpoint))
                self._started_from = tuple(checkpoint.get(KEY, {}).get("started_from", ()))
            if self._together.first and not begun:
                opened.callback(remove_unreleased, self.files)  # once the run has let go of it
            given = self.plan, self.files, begun, self._together, self._started_from
            run = opened.enter_context(start_private(*given))
            self._ledger = self._together.by_first(lambda: read_ledger(self.files.ledger))
            self.run, self._keeper, run.coarse_told = run, NoiseKeeper(run), self.coarse_told
            run.starts.known = True  # asked for, or refused, above
            self._open = opened.pop_all()
        return seen

    def _take(self, held: contextlib.ExitStack, resume: bool) -> bool:
        """Locks the directory; whether it holds a run, as it has to."""
        make_folder(self.files.path)
        held.enter_context(self.files.locked())
        begun = holds_records(self.files.ledger)
        if begun and not resume:
            raise ValueError(
                f"{self._place} holds a private run already; go on with it by "
                "trainer.fit(..., ckpt_path=), or choose another directory (the epsilons of "
                "two runs on the same records add)"
            )
        if not begun and resume:
            raise ValueError(
                f"{self._place} holds no ledger, so there is no private run to go on with; "
                "restore it, or begin one without ckpt_path"
            )
        return begun

    def _seen(self, checkpoint: dict[str, Any]) -> int:
        """Releases that a checkpoint has seen, as the ledger has it."""
        if not self.files.ledger.is_file():  # its start says so
            return 0
        ledger = read_ledger(self.files.ledger)
        if checkpoint.get("run") not in [start.name for start in ledger.sessions[:1]]:
            raise ValueError(
                f"ckpt_path is no checkpoint of the private run in {self._place} (its {MARK!r} "
                "names its run; one with save_weights_only cannot be gone on from); give one that "
                "is"
            )
        seen = int(checkpoint["releases"])
        if seen > ledger.releases:
            raise ValueError(
                f"cannot resume: ckpt_path is at release {seen}, but the ledger counts "
                f"{ledger.releases}: it is not the ledger of this run, or lost lines, and nothing "
                "can be claimed; restore it, or begin in a new directory"
            )
        made_by = ledger.makers(seen)
        if tuple(checkpoint.get("starts", made_by)) != made_by:
            raise ValueError(
                f"cannot resume: ckpt_path was made from other releases than the ledger in "
                f"{self._place} counts, of a copy of this run that went on by itself; give one "
                "that was saved beside this ledger"
            )
        return seen

    def close(self, error: BaseException | None = None) -> None:
        """Ends the session; once the plan's releases are made, nothing of it stays secret.

        Args:
            error: that ends it, which the other processes hear of.
        """
        try:
            released = 0 if self.run is None else self.run.released
            ended = error is None or released >= self.plan.steps
            if ended and self._together.first:
                leave_keys(self.files, released, self.plan.steps)
        finally:
            self._open.__exit__(None if error is None else type(error), error, None)

    def mark(self, releases: int) -> dict[str, Any]:
        """For a checkpoint: of which run it is, and how many releases its weights have seen; public
        facts alone.
        """
        assert self.run is not None
        facts = {
            "epsilon": self.run.epsilon(),
            "delta": self.plan.delta,
            "steps": self.run.released,
            "neighbouring": self.plan.neighbouring,
            **self.plan.told_users(),
            **self.plan.told_beside(),
        }
        name, starts = self._ledger.sessions[0].name, list(self._ledger.makers(releases))
        public, began = self.plan.data_are_public, self._started_from
        made = provenance("train_dataset", facts, public, began, name)
        return {"run": name, "releases": releases, "starts": starts, KEY: made}

    def keep_noise(self) -> None:
        """At a checkpoint: rows of correlated noise, in the secret files."""
        self._keeper.keep(stopping=False)
