"""The parts of Lightning's loops that privacy rests on, looked for before anything is built on
them.
"""

from __future__ import annotations

from typing import Any

# Each one has to be there, or what is set in its place is never read: the Trainer would draw
# batches itself, or count others than releases.
PARTS = (
    "fit_loop._data_source.instance",
    "fit_loop.epoch_progress.current.processed",
    "fit_loop.reset_restart_stage",
    "fit_loop._restart_stage",
    "fit_loop.epoch_loop.max_steps",
    "fit_loop.epoch_loop.reset_restart_stage",
    "fit_loop.epoch_loop._restart_stage",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed",
    "_detect_anomaly",
)


def require_parts(trainer: Any) -> None:
    """Refuses a version of Lightning whose Trainer works otherwise.

    Raises:
        ImportError: naming what is missing.
    """
    for path in PARTS:
        found = trainer
        for name in path.split("."):
            if not hasattr(found, name):
                raise ImportError(
                    f"this version of Lightning has no Trainer.{path}, which a private module has "
                    "to set; install lightning 2.6"
                )
            found = getattr(found, name)
