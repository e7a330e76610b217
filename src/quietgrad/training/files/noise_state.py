"""What a run keeps of its noise between sessions: the mixing matrix, and while it lasts the
secrets: seed, roots of streams, last rows.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from quietgrad.checks import SettingsWarning, listed
from quietgrad.distributed.together import Together
from quietgrad.keyring import forget_secrets, read_secrets, secret_files
from quietgrad.ledger import read_ledger
from quietgrad.ledger.removing import remove_if_unreleased
from quietgrad.noise.correlation.mixing import MixingMatrix, load_mixing, save_mixing
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.plan.seeds import key_of_seed
from quietgrad.training.files.provenance import Record
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.settings.config import TrainConfig

SPARING = 50


def start_private(
    plan: PrivacyPlan,
    run_dir: RunDir,
    resume: bool,
    together: Together,
    started_from: Iterable[Record] = (),
) -> PrivateRun:
    """Starts the plan, or goes on with it: correlated noise exactly where it was, as long as the
    secret file is there (or a seed is given). On several processes the first one writes.

    Args:
        plan, run_dir, resume, together: what, where, how, and of whom.
        started_from: records of the outputs of earlier runs that the weights are from, which the
            ledger says before a release is made.

    Raises:
        ValueError: as ``PrivacyPlan.start``, and for a run that gave up its privacy.
    """
    if resume:  # before the start is recorded
        together.by_first(lambda: _require_private(run_dir))
    if plan.mixing is not None and not resume:
        together.by_first(lambda: _keep_choice(plan, run_dir))
    run = plan.start(run_dir.ledger, run_dir.secrets, resume)
    try:
        together.by_first(lambda: run.starts.asked_for(started_from))
        if not together.first:  # which has no ledger to write to
            run.starts.asked_for(started_from)
    except BaseException:
        run.close()
        raise
    return run


def _require_private(run_dir: RunDir) -> None:
    """Results, logs and saved weights say an epsilon, and a run that gave up its privacy has none.

    Raises:
        ValueError: with the remedy.
    """
    reason = None
    with contextlib.suppress(ValueError):  # none there, or damaged: the start says so
        reason = read_ledger(run_dir.ledger).not_private
    if reason is not None:
        raise ValueError(
            f"cannot resume {str(run_dir.path)!r}: by its ledger this run gave up its privacy "
            f"({reason}), so that no epsilon could be told of what it makes; begin a new run "
            "directory, or go on in a loop of your own (plan.start with its ledger)"
        )


def _keep_choice(plan: PrivacyPlan, run_dir: RunDir) -> None:
    """A choice of one band is kept too: found again, within a limit of time, it could come out
    differently.
    """
    assert plan.mixing is not None
    save_mixing(plan.mixing, run_dir.mixing)
    draw_choice(plan, run_dir.bands_figure)


def without_seed(config: TrainConfig) -> TrainConfig:
    """The configuration as the run directory keeps it: the seed of a run on private data is a
    secret, and only the secret file has it.
    """
    if not config.privacy.enabled or config.data.public:
        return config
    return replace(config, training=replace(config.training, seed=None))


def with_kept_seed(config: TrainConfig, run_dir: RunDir) -> TrainConfig:
    """The configuration to resume with: a seed that is not given comes from the secret file of the
    run.

    Raises:
        ValueError: if a seed is given that is not the run's. No message holds a seed.
    """
    kept, given = read_secrets(run_dir.secrets).seed, config.training.seed
    if kept is None:
        return config
    if given is not None and key_of_seed(given) != key_of_seed(kept):
        raise ValueError(
            "resume with a changed setting: training.seed is not the one that the run began with; "
            "leave it out (the secret file of the run has it)"
        )
    return replace(config, training=replace(config.training, seed=kept))


def saved_mixing(run_dir: RunDir) -> MixingMatrix | None:
    """The mixing matrix that a run began with, bit by bit; None where there is none."""
    return load_mixing(run_dir.mixing) if run_dir.mixing.exists() else None


def draw_choice(plan: PrivacyPlan, path: Path) -> None:
    """The figure that explains the number of bands, where it was chosen here."""
    if plan.band_choice is None:
        return
    from quietgrad.report.bands import bands_figure

    tried = plan.band_choice.candidates
    bands_figure(
        [c.bands for c in tried],
        [c.noise_multiplier for c in tried],
        [c.mixing.objective for c in tried],
        plan.band_choice.chosen.bands,
        path,
    )


class NoiseKeeper:
    """Keeps the rows that correlated noise goes on from, in a secret file, no more often than costs
    a fiftieth of the time; at a stop always.
    """

    def __init__(self, private: PrivateRun | None) -> None:
        self._private = private
        self._next = 0.0

    def keep(self, stopping: bool) -> None:
        """Called at every checkpoint."""
        started = time.monotonic()
        if self._private is None or (started < self._next and not stopping):
            return
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # a full disk: without the rows a resume is slower, and the same
            self._private.keep_noise()
        ended = time.monotonic()
        self._next = ended + SPARING * (ended - started)


def forget_keys(run_dir: RunDir) -> None:
    """Removes what is secret once no release is left that needs it."""
    forget_secrets(run_dir.secrets)


def leave_keys(run_dir: RunDir, made: int, planned: int) -> None:
    """Where training has ended in good order: removes what is secret, or, before the plan's last
    release, warns. An early stop looks like an end, and whoever gets the folder could take the
    noise off.
    """
    if made >= planned:
        forget_keys(run_dir)
    kept = [path.name for path in secret_files(run_dir.secrets) if path.exists()]
    if made and kept:
        warnings.warn(
            f"training ended after {made} of {planned} releases, and may be gone on with: so "
            f"secrets stay in {str(run_dir.path)!r} ({listed(kept, 'and')}), by which its noise "
            "could be taken off, or records be known. If it is over (an early stop), remove them "
            "before anybody else gets the folder",
            SettingsWarning,
            stacklevel=2,
        )


def remove_unreleased(run_dir: RunDir) -> None:
    """Removes the ledger and the secrets of a run that has ended before its first release, such as
    one whose model was refused: nothing was spent, and its directory takes another run. A ledger
    that counts a release, or that says that privacy was given up, stays, and so does one that
    somebody else has opened by now.
    """
    remove_if_unreleased(run_dir.ledger, also=lambda: forget_keys(run_dir))
