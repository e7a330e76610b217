"""The formats that a run's model is exported in; torch is not loaded for what is asked here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from quietgrad.durable import require_open_folder

ENDINGS = {"torch-export": ".pt2", "onnx": ".onnx"}
ONNX_PACKAGES = ("onnx", "onnxscript")


def format_of(output: Path) -> str:
    """The format that a file's ending stands for.

    Raises:
        ValueError: for another ending.
    """
    for form, ending in ENDINGS.items():
        if output.suffix.lower() == ending:
            return form
    told = " or ".join(f"{ending} ({form})" for form, ending in ENDINGS.items())
    raise ValueError(f"--output={str(output)!r} must end in {told}")


def require_format(form: str, output: Path) -> None:
    """Before any work: that the format is known, its packages are there, and the file can be made.

    Raises:
        ValueError: with the remedy.
    """
    if form not in ENDINGS:
        raise ValueError(f"--format={form!r} is none; use {' or '.join(ENDINGS)}")
    if output.suffix.lower() != ENDINGS[form]:
        raise ValueError(f"--output={str(output)!r} must end in {ENDINGS[form]} for {form}")
    if output.exists():
        raise ValueError(f"--output={str(output)!r} is there already; name another file")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"--output={str(output)!r}: no such folder; make it first")
    require_open_folder("--output", output)
    absent = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if form == "onnx" and absent:
        raise ValueError(
            f"--format='onnx' needs {' and '.join(absent)}: pip install 'quietgrad[onnx]', or use "
            "--format=torch-export"
        )
