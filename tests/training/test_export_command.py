"""A run's model as one file: the same logits in any batch size and length, and what is needed to
call it.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import labelled_texts, train, write_records

from quietgrad.training.exporting import program
from quietgrad.training.exporting.exportable import with_shape
from quietgrad.training.settings.config import load_config
from quietgrad.training.tasks.registry import kind_of

Run = Callable[..., tuple[int, str, str]]


def exported(quietgrad: Run, run_dir: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(loaded program, metadata in the file, what the command said)."""
    file = run_dir.parent / "model.pt2"
    code, out, err = quietgrad("export", run_dir, "-o", file, "--json")
    assert (code, err) == (0, ""), err
    extra = {program.METADATA: ""}
    loaded = torch.export.load(file, extra_files=extra)
    with zipfile.ZipFile(file) as whole:  # tracebacks of the export named files of the machine
        told = b"".join(whole.read(name) for name in whole.namelist())
    assert str(Path(torch.__file__).parents[1]).encode() not in told
    assert str(Path(program.__file__).parents[3]).encode() not in told
    return loaded.module(), json.loads(extra[program.METADATA]), json.loads(out)


def agree(run_dir: Path, module: Any) -> None:
    config = load_config(run_dir / "config.toml")
    given = kind_of(config).exportable(config, run_dir / "model")
    for batch, length in ((1, 2), (2, 8), (7, 3), (4, 19)):
        inputs = with_shape(given, batch, length)
        assert inputs[0].shape[0] == batch
        with torch.no_grad():
            expected, found = given.module(*inputs), module(*inputs)
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.grid(1, "heads of one encoder, each an export of seconds")
@pytest.mark.parametrize(
    "changes",
    [{"model.tune": "head"}, {"model.tune": "lora"}, {"model.tune": "full", "model.head": "auto"}],
    ids=["head", "lora", "auto"],
)
def test_texts(changes: dict, quietgrad: Run, settings: dict) -> None:
    run_dir = train(settings | changes | {"training.eval_every": 0})[2].path
    module, metadata, said = exported(quietgrad, run_dir)
    agree(run_dir, module)
    assert metadata["labels"] == ["bad", "good"]
    assert metadata["head"] == changes.get("model.head", "mean")
    assert metadata["inputs"] == [
        {"name": name, "dtype": "int64", "shape": ["batch", "length"]}
        for name in ("input_ids", "attention_mask")
    ]
    assert metadata["quietgrad_trained_on"]["private"] is True
    assert said["largest_difference"] <= program.AGREEMENT


@pytest.mark.slow("ten seconds: an export of a language model; test_texts has the same code")
def test_answers(quietgrad: Run, settings: dict, tiny_llama: Path) -> None:
    answers = {
        "model.name": str(tiny_llama),
        "model.tune": "full",
        "task.kind": "generate",
        "task.max_answer_length": 3,
        "training.eval_every": 0,
        "training.steps": 2,
    }
    run_dir = train(settings | answers)[2].path
    module, metadata, _ = exported(quietgrad, run_dir)
    agree(run_dir, module)
    assert metadata["labels"] == []


def test_tables(quietgrad: Run, settings: dict, tmp_path: Path) -> None:
    file = write_records(tmp_path / "table.csv", [(f"{i % 5}", w) for i, (_, w) in
                                                  enumerate(labelled_texts())])  # fmt: skip
    table = {
        "model.name": "table:mlp",
        "model.tune": "full",
        "data.source": str(file),
        "data.validation_fraction": 0.3,
        "data.test_fraction": 0.3,
    }
    for of_texts in ("model.lora_rank", "model.max_length"):
        settings.pop(of_texts)
    file.write_text(
        "text,colour,label\n" + "".join(f"{i},{'rgb'[i % 3]},{'xy'[i % 2]}\n" for i in range(120))
    )
    run_dir = train(settings | table | {"training.expected_batch_size": 10})[2].path
    module, metadata, _ = exported(quietgrad, run_dir)
    agree(run_dir, module)
    assert metadata["encoding"]["categories"]["colour"] == ["b", "g", "r"]
    assert [i["name"] for i in metadata["inputs"]] == ["numbers", "codes"]
    # By the metadata alone the program says what predict says, of odd cells too.
    file.write_text("text,colour\n7,r\n,g\n999999,none\n-3.5,\n")
    assert "counted from 1" in metadata["encoded"]["codes"]
    mean, deviation = metadata["encoding"]["numbers"]["text"]
    numbers = [[(7 - mean) / deviation, 0], [0, 1], [10, 0], [(-3.5 - mean) / deviation, 0]]
    with torch.no_grad():
        logits = module(torch.tensor(numbers), torch.tensor([[3], [2], [0], [0]]))
    assert quietgrad("predict", run_dir, file, "--output", tmp_path / "found.csv")[0] == 0
    with (tmp_path / "found.csv").open() as found:
        told = [[float(row[f"probability_{x}"]) for x in "xy"] for row in csv.DictReader(found)]
    torch.testing.assert_close(logits.softmax(1), torch.tensor(told), rtol=1e-4, atol=1e-5)


@pytest.mark.grid(1, "two bodies, each an export of seconds")
@pytest.mark.parametrize("name", ["cnn:groupnorm", "vit"])
def test_images(name: str, quietgrad: Run, values: dict, vit: Path) -> None:
    model = {"model.name": f"image:{vit}" if name == "vit" else name,
             "model.tune": "lora" if name == "vit" else "full"}  # fmt: skip
    run_dir = train(values | model)[2].path
    module, metadata, _ = exported(quietgrad, run_dir)
    agree(run_dir, module)
    assert metadata["inputs"][0]["shape"][0] == "batch" and len(metadata["labels"]) >= 2


@pytest.mark.slow("a second export, by another library, of what test_texts exports")
def test_onnx_where_its_packages_are(quietgrad: Run, settings: dict, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    run_dir = train(settings | {"model.tune": "lora", "training.eval_every": 0})[2].path
    file = tmp_path / "model.onnx"
    code, _, err = quietgrad("export", run_dir, "-o", file)  # the ending says what it is to be
    assert (code, err) == (0, "")
    session = runtime.InferenceSession(str(file))

    def module(*inputs: torch.Tensor) -> torch.Tensor:
        named = zip(("input_ids", "attention_mask"), inputs, strict=True)
        return torch.from_numpy(session.run(None, {n: v.numpy() for n, v in named})[0])

    agree(run_dir, module)
    (found,) = onnx.load(file).metadata_props
    assert json.loads(found.value)["labels"] == ["bad", "good"]


def test_what_cannot_be_exported_is_one_line(
    quietgrad: Run, settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there.pt2"
    there.write_bytes(b"mine")
    for arguments, part in (
        (["--format", "tflite", "-o", tmp_path / "a.pt2"], "use torch-export or onnx"),
        (["-o", tmp_path / "a.bin"], "must end in .pt2 (torch-export) or .onnx (onnx)"),
        (["--format", "torch-export", "-o", tmp_path / "a.onnx"], "must end in .pt2"),
        (["-o", there], "is there already"),
        (["-o", tmp_path / "no" / "a.pt2"], "no such folder"),
        (["-o", tmp_path / "a.pt2"], "no such run directory"),
    ):
        code, _, err = quietgrad("export", tmp_path / "none", *arguments)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and part in err
    assert there.read_bytes() == b"mine"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = quietgrad("export", tmp_path, "--format", "onnx", "-o", tmp_path / "a.onnx")
    assert code == 2 and "quietgrad[onnx]" in err and err.count("\n") == 1


def test_a_file_that_computes_something_else_is_not_written(
    quietgrad: Run, settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = train(settings | {"model.tune": "head", "training.steps": 2})[2].path
    monkeypatch.setattr(program, "_difference", lambda given, module: 1e-2)
    code, _, err = quietgrad("export", run_dir, "-o", tmp_path / "a.pt2")
    assert code == 1 and "other logits" in err and err.count("\n") == 1
    assert not (tmp_path / "a.pt2").exists()
