"""Bad inputs of docs/notes/bad_input.md that crashed, ran all the same, or were answered vaguely:
one line, exit code 2, no folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import labelled_texts

from quietgrad.training.settings.tables import ModelTable
from quietgrad.training.tasks.text.batches import tokens_kept

NOTE = Path(__file__).parents[2] / "docs" / "notes" / "bad_input.md"
Run = Callable[..., tuple[int, str, str]]
RECORDS = labelled_texts()
GOOD = "text,label\n" + "".join(f"{text},{label}\n" for text, label in RECORDS)
JSONL = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in RECORDS)


def with_labels(label: Callable[[int], str]) -> str:
    return "text,label\n" + "".join(f"{t},{label(i)}\n" for i, (t, _) in enumerate(RECORDS))


FILES = {
    "empty": ("a.csv", "", "it is empty"),
    "utf-16": ("a.csv", GOOD.encode("utf-16"), "UTF-16"),
    "latin-1": ("a.csv", GOOD.encode() + b"caf\xe9,good\n", "rows of it are broken"),
    "workbook": ("a.csv", b"PK\x03\x04", "workbook"),
    "gzip": ("a.csv", b"\x1f\x8b\x08", "gzip"),
    "too-many": ("a.csv", GOOD + "a,b,c\n", "rows of it are broken"),
    "too-few": ("a.csv", GOOD + "alone\n", "data.skip_bad=true"),
    "open-quote": ("a.csv", GOOD + '"open,good\n', "not closed"),
    "twice": ("a.csv", "text,text\na,b\n", "two columns of one name"),
    "behind": ("a.csv", GOOD.replace("good\n", "good,\n"), "rows of it are broken"),
    "jsonl": ("a.jsonl", JSONL + '{"text": "a"', "quietgrad check"),
    "objects": (
        "a.jsonl",
        JSONL.replace('"label": ', '"label": {"is": ').replace("}", "}}"),
        "objects",
    ),
    "list": ("a.jsonl", "[" + JSONL.strip().replace("\n", ",\n") + "]", "name it .json"),
    "lines": ("a.json", JSONL, "name it .jsonl"),
    "names-alone": ("a.csv", "text,label\n", "column names, and none below it"),
    "no-text": ("a.csv", "text,label\n" + ",good\n,bad\n" * 60, "no cell in the column"),
    "number-texts": ("a.jsonl", '{"text": 5, "label": "a"}\n' * 60, "no cell in the column"),
    "fractions": ("a.csv", with_labels(lambda i: f"{i % 12 * 0.37:.2f}"), "with fractions"),
    "gaps": ("a.csv", with_labels(lambda i: "x" if i % 3 else ""), "data.skip_bad=true"),
    "all-broken": ("a.csv", "text,label\n" + "a,b,c\n" * 9, "rows of it are broken"),
}


def assert_refused(outcome: tuple[int, str, str], part: str, settings: dict[str, Any]) -> None:
    code, _, err = outcome
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, outcome
    assert part in err, err
    assert not Path(settings["training.run_dir"]).exists()


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, quietgrad: Run, settings, write_config, tmp_path: Path) -> None:
    file, content, part = FILES[name]
    path = tmp_path / file
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    config = write_config(settings | {"data.source": str(path)})
    assert_refused(quietgrad("train", config), part, settings)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"data.text": "label"}, "is the column of the text too"),
    ({"data.labels": ["good", "good", "bad"]}, "has 'good' twice"),
    ({"data.user": "label"}, "is data.label, too"),
    ({"training.steps": 0}, "training.steps=0 is below 1"),
    ({"training.steps": -1}, "training.steps=-1 is below 1"),
    ({"training.expected_batch_size": 0}, "training.expected_batch_size=0 is below 1"),
    ({"model.dropout": 1.5}, "model.dropout=1.5"),
    ({"model.dropout": 1.0}, "leaves nothing of a layer"),
    ({"model.max_length": 25}, "exceeds the 24 positions"),
    ({"model.max_length": 2}, "leaves no room for a text"),
    ({"model.name": "/nowhere/model"}, "no such folder"),
    ({"model.name": "no-such-org/no-such-model"}, "is no folder here"),
    (
        {"task.kind": "generate", "model.tune": "full", "task.max_answer_length": 4},
        "needs a causal language model",
    ),
]


@pytest.mark.parametrize(("changes", "part"), SETTINGS, ids=[p for _, p in SETTINGS])
def test_settings(changes: dict, part: str, quietgrad: Run, settings, write_config) -> None:
    assert_refused(quietgrad("train", write_config(settings | changes)), part, settings)


def test_files_and_folders_that_are_each_other(quietgrad: Run, csv_file, tmp_path) -> None:
    (tmp_path / "config.toml").write_text("[training]\n")
    for arguments, part in (
        (("train", tmp_path), f"is a folder; name a TOML file, such as '{tmp_path}/config.toml'"),
        (("plan", csv_file.parent), "is a folder; name a TOML file"),
        (("predict", csv_file, csv_file), "is a file; name the directory of a run"),
    ):
        code, _, err = quietgrad(*arguments)
        assert code == 2 and err.count("\n") == 1 and part in err


def test_texts_may_be_as_long_as_the_positions(quietgrad: Run, settings, write_config) -> None:
    config = write_config(settings | {"model.max_length": 24, "training.steps": 1})
    assert quietgrad("train", config)[0] == 0


def test_the_default_length_is_cut_at_the_positions(
    quietgrad: Run, settings: dict[str, Any], write_config: Any, tmp_path: Path
) -> None:
    """It was refused, though nobody had asked for more tokens than positions."""
    long = tmp_path / "long.csv"
    long.write_text("text,label\n" + f"{'the film was lovely ' * 30},good\n")
    left_out = {k: v for k, v in settings.items() if k != "model.max_length"}
    config = write_config(left_out | {"training.steps": 1})
    for command in ("plan", "train"):
        code, out, err = quietgrad(command, config)
        assert code == 0, err
        told = " ".join((out + err).split())
        assert (
            "has 24 positions, so texts are cut at 24 tokens in place of model.max_length=64"
            in told
        )
    run_dir = settings["training.run_dir"]
    code, _, err = quietgrad("predict", run_dir, long, "--output", tmp_path / "found.csv")
    assert code == 0, err


@pytest.mark.parametrize("kind", ["Bart", "OPT", "Roberta"])
def test_positions_that_begin_with_an_offset_are_not_counted(kind: str) -> None:
    """The longest text that is kept runs, and one token more does not."""
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "d_model": 8, "max_position_embeddings": 20}
    sizes |= {"num_hidden_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"num_attention_heads": 2, "intermediate_size": 8, "ffn_dim": 8}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**sizes)).eval()
    kept = tokens_kept(model, ModelTable.max_length)
    assert kept in (18, 20)
    ids = torch.full((1, kept + 1), 7)
    with torch.no_grad():
        model(ids[:, :kept])
        with pytest.raises((IndexError, RuntimeError)):
            model(ids)


def test_the_test_file_is_not_the_training_file(quietgrad: Run, settings, write_config) -> None:
    config = write_config(settings | {"data.test_source": settings["data.source"]})
    assert_refused(quietgrad("train", config), "is the source itself", settings)


def test_a_key_outside_of_tables(quietgrad: Run, settings, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("steps = 3\n")
    outcome = quietgrad("train", tmp_path / "a.toml")
    assert_refused(outcome, "key 'steps' stands outside of a table", settings)


BROKEN_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights": (lambda f: (f / "model.safetensors").write_bytes(b"no"), "cannot be loaded"),
    "config": (lambda f: (f / "config.json").write_text("{"), "not a valid JSON file"),
    "tokenizer": (lambda f: [p.unlink() for p in f.glob("tok*")], "knows no words"),
    "everything": (lambda f: [p.unlink() for p in f.iterdir()], "the folder holds no model"),
}


@pytest.mark.parametrize("name", BROKEN_MODELS)
def test_model_folders(
    name: str, quietgrad: Run, settings, write_config, tiny_bert: Path, tmp_path: Path
) -> None:
    broken, part = BROKEN_MODELS[name]
    folder = shutil.copytree(tiny_bert, tmp_path / "model")
    broken(folder)
    config = write_config(settings | {"model.name": str(folder)})
    assert_refused(quietgrad("train", config), part, settings)


def test_skip_bad_for_pictures(quietgrad: Run, values: dict, write_config) -> None:
    pictures = values | {"model.name": "cnn:groupnorm", "model.tune": "full"}
    config = write_config(pictures | {"data.skip_bad": True})
    assert_refused(quietgrad("train", config), "is for texts and tables", values)


def test_a_private_row_is_named_by_check_alone(
    quietgrad: Run, settings, write_config, tmp_path: Path
) -> None:
    path = tmp_path / "patients.csv"
    path.write_text(GOOD + "syphilis,seen,in,1987\n")
    config = write_config(settings | {"data.source": str(path)})
    for command in ("train", "plan"):
        _, out, err = quietgrad(command, config)
        said = (out + err).replace(str(tmp_path), "").replace(str(config), "")
        assert "syphilis" not in said and str(len(RECORDS) + 2) not in said and "line" not in said
    assert f"line {len(RECORDS) + 2}: 4 cells" in quietgrad("check", path)[1]


def test_the_note_lists_them() -> None:
    rows = [x for x in NOTE.read_text(encoding="utf-8").splitlines() if x.startswith("| ")][2:]
    assert len(rows) >= 100
    assert all(row.count(" | ") == 1 for row in rows)
