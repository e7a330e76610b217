"""A run's model as a file that torch, or an ONNX runtime, calls without this library and without
the model's Python code. Costs no privacy: the model is released.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quietgrad.durable import replacing
from quietgrad.training.exporting.exportable import BATCH, SHORTEST, Exportable, with_shape
from quietgrad.training.exporting.formats import require_format
from quietgrad.training.files.provenance import FILE as DESCRIPTION_FILE
from quietgrad.training.prediction import finished_run
from quietgrad.training.settings.config import load_config
from quietgrad.training.tasks.registry import kind_of

METADATA = "quietgrad.json"  # file inside a .pt2; of ONNX the key "quietgrad"
AGREEMENT = 1e-4  # of logits, relative to the largest
TRIED = ((1, SHORTEST), (3, 5), (5, 13))  # batch sizes and lengths that the file is tried with


def export_run(run_dir: Path, form: str, output: Path) -> dict[str, Any]:
    """Writes the model of a finished run, checked against the model itself.

    Args:
        run_dir: of a finished run.
        form: "torch-export" (torch.export, loaded by ``torch.export.load``) or "onnx".
        output: the file.

    Returns:
        What was written: the metadata, and the largest relative difference of logits.

    Raises:
        ValueError: for what ``require_format`` refuses, or a run that has not ended.
        RuntimeError: if torch cannot export the architecture, or what it exported differs.
    """
    require_format(form, output)
    run = finished_run(run_dir)
    config = load_config(run.config)
    given = kind_of(config).exportable(config, run.model)
    metadata = metadata_of(given, run.model)
    with _quiet():
        try:
            program = _exported(given)
        except Exception as error:  # torch.export raises many kinds
            raise RuntimeError(
                f"torch.export cannot export {config.model.name!r} "
                f"({type(error).__name__}: {_first_line(error)}); RUN_DIR/model has its weights"
            ) from error
        difference = _difference(given, program.module())
        if not difference <= AGREEMENT:
            raise RuntimeError(
                f"what torch.export made of {config.model.name!r} gives other logits (relative "
                f"difference {difference:.1e}); nothing was written"
            )
        if form == "onnx":
            _write_onnx(program, metadata, output)
            difference = max(difference, _difference_of_onnx(given, output))
        else:
            # In memory first: torch's writer ends the whole process, after an error that it met
            # (a full disk), when it is thrown away.
            held = io.BytesIO()
            torch.export.save(program, held, extra_files={METADATA: json.dumps(metadata)})
            with replacing(output) as file:
                file.write(held.getbuffer())
    return {**metadata, "format": form, "output": str(output), "largest_difference": difference}


def metadata_of(given: Exportable, folder: Path) -> dict[str, Any]:
    """What a caller needs: inputs with their axes, labels, the head, and the privacy statement."""
    described = json.loads((folder / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    inputs = [
        {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [*given.axes[name], *value.shape[len(given.axes[name]) :]],
        }
        for name, value in given.inputs.items()
    ]
    kept = {key: described[key] for key in ("head", "quietgrad_trained_on") if key in described}
    return {"inputs": inputs, "output": "logits", "labels": given.labels, **kept, **given.facts}


def _exported(given: Exportable) -> Any:
    sizes: dict[str, Any] = {BATCH: torch.export.Dim(BATCH, min=1)}
    if given.longest:
        sizes["length"] = torch.export.Dim("length", min=SHORTEST, max=given.longest)
    shapes = tuple(
        {i: sizes[axis] for i, axis in enumerate(given.axes[name])} for name in given.inputs
    )
    inputs = tuple(given.inputs.values())
    with torch.no_grad():
        program = torch.export.export(given.module, inputs, dynamic_shapes=(shapes))
    for part in program.graph_module.modules():
        for node in getattr(getattr(part, "graph", None), "nodes", ()):
            node.meta.pop("stack_trace", None)  # paths of this machine, and so its user's name
    return program


def _difference(given: Exportable, exported: Any) -> float:
    """The largest difference of logits over the largest logit, in other batch sizes and lengths
    than it was traced with.
    """
    largest = 0.0
    with torch.no_grad():
        for batch, length in TRIED:
            inputs = with_shape(given, batch, min(length, given.longest or length))
            expected: Tensor = given.module(*inputs)
            found: Tensor = exported(*inputs)
            scale = expected.abs().max().clamp_min(1e-6)
            largest = max(largest, float((found - expected).abs().max() / scale))
    return largest


def _write_onnx(program: Any, metadata: dict[str, Any], output: Path) -> None:
    made: Any = torch.onnx.export(
        program, input_names=[i["name"] for i in metadata["inputs"]], output_names=["logits"]
    )
    made.model.metadata_props["quietgrad"] = json.dumps(metadata)
    made.save(str(output))


def _difference_of_onnx(given: Exportable, output: Path) -> float:
    """As ``_difference``, of the file itself; 0 where nothing here can run it.

    Raises:
        RuntimeError: for other logits; the file is gone then.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return 0.0
    import onnxruntime

    session = onnxruntime.InferenceSession(str(output))

    def call(*inputs: Tensor) -> Tensor:
        named = {name: value.numpy() for name, value in zip(given.inputs, inputs, strict=True)}
        return torch.from_numpy(session.run(None, named)[0])

    difference = _difference(given, call)
    if not difference <= AGREEMENT:
        output.unlink()
        raise RuntimeError(
            f"the ONNX file gives other logits (relative difference {difference:.1e}) and was "
            "removed; use --format=torch-export"
        )
    return difference


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own reports."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
