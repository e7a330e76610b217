"""Whether what a command was given as a run's directory is one, before torch is loaded."""

from __future__ import annotations

from pathlib import Path

from quietgrad.checks import nearest

CONFIG = "config.toml"


def require_folder_of_a_run(path: Path) -> None:
    """Of a run that has begun; it may not have ended.

    Raises:
        ValueError: with the remedy.
    """
    if path.is_file():
        raise ValueError(
            f"RUN_DIR={str(path)!r} is a file; name the directory of a run (training.run_dir)"
        )
    if not path.is_dir():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ValueError(f"RUN_DIR={str(path)!r}: no such run directory{nearest(path.name, near)}")
    if not (path / CONFIG).is_file():
        raise ValueError(
            f"RUN_DIR={str(path)!r} holds no run (no {CONFIG}); name the training.run_dir of one"
        )
