"""A run of a directory that starts, or goes on: refused with other privacy settings, in the words
of its configuration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quietgrad.distributed.together import Together
from quietgrad.ledger import LedgerContents, read_ledger
from quietgrad.plan import PrivateRun
from quietgrad.plan.by_step.changed import ChangedSettings, changes
from quietgrad.training.files.noise_state import start_private
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.settings.config import TrainConfig, load_config

if TYPE_CHECKING:
    from quietgrad.training.prepare import Prepared

# What a plan is built from; of the last, these keys.
TABLES = (
    "privacy",
    "schedules",
    "clipping",
    "noise",
    "training_loss",
    "adaptive_clipping",
    "users",
    "data",
    "training",
)
OF_TRAINING = ("expected_batch_size", "steps", "epochs")


def start_of(prepared: Prepared, run_dir: RunDir, resume: bool, together: Together) -> PrivateRun:
    """``start_private`` with the plan of a configuration.

    Raises:
        ValueError: as ``start_private``; for other settings than those that the run began with,
            naming those of the configuration.
    """
    assert prepared.plan is not None
    with _named_as_configured(prepared, run_dir):
        return start_private(prepared.plan, run_dir, resume, together, prepared.started_from)


def require_first_settings(
    prepared: Prepared, run_dir: RunDir, resume: bool, together: Together
) -> None:
    """What ``start_of`` refuses for its settings or records, before frozen layers run over all
    records for minutes. A ledger that cannot be read yet is the start's to judge.

    Raises:
        ValueError: for other settings or records than those that the run began with.
    """
    plan = prepared.plan
    trained = all(p.requires_grad for p in prepared.model.classifier.parameters())
    if not resume or plan is None or trained:  # nothing runs before: a checkpoint may say more
        return

    def require() -> None:
        contents = LedgerContents()
        with contextlib.suppress(ValueError, OSError):
            contents = read_ledger(run_dir.ledger)
        if contents.header:
            with _named_as_configured(prepared, run_dir):
                plan.require_same_mechanism(contents)

    together.by_first(require)


@contextlib.contextmanager
def _named_as_configured(prepared: Prepared, run_dir: RunDir) -> Iterator[None]:
    """Inside, settings that changed are named as in the configuration; others' records as in the
    ledger.
    """
    try:
        yield
    except ChangedSettings as error:
        found = changes(_of_plan(load_config(run_dir.config)), _of_plan(prepared.config))
        if not found:  # the data are others
            raise
        raise ChangedSettings(found) from error


def _of_plan(config: TrainConfig) -> dict[str, Any]:
    tables = config.to_dict()
    own = {name: tables[name] for name in TABLES}
    own["training"] = {k: own["training"].get(k) for k in OF_TRAINING}
    return own
