"""A finished run at work: what its model says of new records."""

from __future__ import annotations

from pathlib import Path

from quietgrad.training.files.named import require_folder_of_a_run
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.precision import device_of, precision_context
from quietgrad.training.settings.config import load_config
from quietgrad.training.sources.hub import require_model
from quietgrad.training.tasks.predictions import Predictions
from quietgrad.training.tasks.registry import kind_of


def predict(run_dir: Path, file: Path) -> Predictions:
    """What the model of a finished run says of the records of a file, on the run's device and in
    its precision. Costs no privacy: the model is released.

    Args:
        run_dir: the run's directory.
        file: records of the run's kind, without labels: a table, or a folder of images.

    Raises:
        ValueError: for a directory without a finished run, or records that do not fit it.
    """
    run = finished_run(run_dir)
    config = load_config(run.config)
    device = device_of(config.training.device)
    require_model("model.name", config.model.name, str(run.model))
    with precision_context(config, device):
        return kind_of(config).predict(config, run.model, file, device)


def finished_run(path: Path) -> RunDir:
    """The run directory.

    Raises:
        ValueError: if there is none, or its run has not ended.
    """
    require_folder_of_a_run(path)
    run = RunDir(path)
    if not run.result.is_file() or not run.model.is_dir():
        raise ValueError(
            f"RUN_DIR={str(path)!r}: this run has not ended; go on with it: quietgrad train "
            f"--resume --set training.run_dir={path}"
        )
    return run
