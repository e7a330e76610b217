"""``quietgrad predict``: what a finished run says of new records, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_tables import SEED, table
from tiny_images import CHEST, write_findings, write_picture
from tiny_runs import config_of, labelled_texts, train

from quietgrad.training.tasks.records import outputs

CPU = torch.device("cpu")


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize("head", ["mean", "auto"])
def test_labels_and_probabilities_of_texts(
    settings: dict[str, Any], quietgrad: Any, tmp_path: Path, head: str
) -> None:
    prepared, _, run_dir = train(settings | {"model.head": head, "training.steps": 2})
    test = prepared.task.splits.test
    texts = [*test.texts, " "]
    new = write_rows(tmp_path / "new.csv", [{"id": i, "text": t} for i, t in enumerate(texts)])
    out = tmp_path / "predictions.csv"
    code, said, err = quietgrad("predict", run_dir.path, new, "--output", out)
    assert (
        code == 0 and f"{len(texts)} records written" in said and "Without a label: 1 that" in said
    ), err
    found = rows_of(out)
    assert list(found[0]) == [
        "id", "text", "predicted", "probability", "probability_bad", "probability_good"
    ]  # fmt: skip
    assert [row["text"] for row in found] == texts and found[-1]["predicted"] == ""
    logits = outputs(prepared.model.classifier, prepared.test, 256, CPU)
    wanted = torch.from_numpy(logits).softmax(1).numpy()
    each = np.array(
        [[float(r["probability_bad"]), float(r["probability_good"])] for r in found[:-1]]
    )
    np.testing.assert_allclose(each, wanted, atol=1e-5)
    for row, p in zip(found[:-1], wanted, strict=True):
        assert row["predicted"] == ("bad", "good")[p.argmax()]
        assert float(row["probability"]) == pytest.approx(p.max(), abs=1e-5)


def test_without_an_output_the_first_rows_are_shown(
    settings: dict[str, Any], quietgrad: Any, tmp_path: Path
) -> None:
    _, _, run_dir = train(settings | {"training.steps": 1, "training.eval_every": 0})
    new = write_rows(tmp_path / "new.csv", [{"text": t} for t, _ in labelled_texts(14)])
    code, said, err = quietgrad("predict", run_dir.path, new)
    assert code == 0 and "10 of 14 records" in said and "--output predictions.csv" in said, err
    lines = tmp_path / "new.jsonl"
    lines.write_text(json.dumps({"text": "the film was great", "predicted": 3, "x": [1]}) + "\n")
    code, said, err = quietgrad("predict", run_dir.path, lines, "--json", "--no-probabilities")
    assert code == 0, err
    (row,) = json.loads(said)["predictions"]
    assert row["predicted"] == 3 and row["predicted_predicted"] in ("bad", "good")
    assert set(row) == {"text", "predicted", "x", "predicted_predicted", "probability"}


def test_an_empty_text_alone_in_its_row_is_a_row(
    settings: dict[str, Any], quietgrad: Any, tmp_path: Path
) -> None:
    """As csv and pandas write it; it was passed over, and later rows moved up by one."""
    _, _, run_dir = train(settings | {"training.steps": 1, "training.eval_every": 0})
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    new.write_text('text\na lovely film\n""\n\na dull plot\n')
    code, said, err = quietgrad("predict", run_dir.path, new, "--output", out)
    assert code == 0 and "3 records written" in said and "Without a label: 1 that" in said, err
    assert [row["text"] for row in rows_of(out)] == ["a lovely film", "", "a dull plot"]


def test_rows_of_tables(quietgrad: Any, tmp_path: Path) -> None:
    source = table(tmp_path / "people.csv")
    prepared, outcome, run_dir = train(
        {
            "model.name": "table:mlp", "model.tune": "full", "data.source": str(source),
            "data.label": "income", "data.public": True, "privacy.noise_multiplier": 0.6,
            "training.expected_batch_size": 120, "training.steps": 30, "training.eval_every": 0,
            "training.seed": SEED, "training.precision": "float32",
            "training.run_dir": str(tmp_path / "run"), "optimizer.learning_rate": 2e-2,
        }
    )  # fmt: skip
    test = prepared.task.splits.test
    names = list(test.columns)[::-1]  # in another order than in training, and beside another one
    rows = [
        {"number": i, **{name: test.columns[name][i] for name in names}} for i in range(len(test))
    ]
    out = tmp_path / "out.csv"
    code, _, err = quietgrad(
        "predict", run_dir.path, write_rows(tmp_path / "new.csv", rows), "--output", out
    )
    assert code == 0, err
    predicted = [row["predicted"] for row in rows_of(out)]
    truth = [test.label_names[i] for i in test.labels]
    right = np.mean([a == b for a, b in zip(predicted, truth, strict=True)])
    assert right == pytest.approx(outcome.result["metrics"]["accuracy"])
    odd = [rows[0] | {"age": "31,5"}, rows[1] | {"trade": "pilot"}, rows[2] | {"age": ""}]
    file = write_rows(tmp_path / "odd.csv", odd)
    code, said, err = quietgrad("predict", run_dir.path, file)
    assert code == 0 and "3 of 3 records; all" in said, err
    assert (
        "column 'age': 1 cell with no number, such as '31,5', read as an empty cell: write 3.14 in "
        "place of 3,14" in said
    )
    assert (
        "column 'trade': 1 cell with no category that the model knows, such as 'pilot', read as "
        '"others"' in said
    )
    assert said.count("note:") == 2
    code, said, err = quietgrad("predict", run_dir.path, file, "--json")
    assert code == 0 and len(json.loads(said)["notes"]) == 2, err
    one, other = write_rows(tmp_path / "one.csv", [rows[0]]), tmp_path / "other.csv"
    code, said, err = quietgrad("predict", run_dir.path, one, "--output", other)
    assert code == 0 and "1 record written" in said and "note:" not in said, err
    del rows[0][names[0]]
    rows = [{k: v for k, v in row.items() if k != names[0]} | {names[0] + "s": 1} for row in rows]
    code, _, err = quietgrad("predict", run_dir.path, write_rows(tmp_path / "less.csv", rows))
    assert (
        code == 2 and f"no column {names[0]!r}" in err and f"did you mean {names[0] + 's'!r}" in err
    )


def test_notes_on_a_wide_table_are_few_and_short(quietgrad: Any, tmp_path: Path) -> None:
    """A note a column, with a whole cell in it, was a screen for each column of a wide table; and
    what the model says was nowhere to be seen beside so many of the input's columns.
    """
    names = [f"c{i}" for i in range(12)]
    words = np.random.default_rng(3).choice(["a", "b"], (80, len(names)))
    rows = [dict(zip(names, row, strict=True)) | {"y": "no"[i % 2]} for i, row in enumerate(words)]
    _, _, run_dir = train(
        {
            "model.name": "table:linear", "model.tune": "full", "data.label": "y",
            "data.source": str(write_rows(tmp_path / "wide.csv", rows)), "data.public": True,
            "privacy.noise_multiplier": 1.0, "training.expected_batch_size": 20,
            "training.steps": 1, "training.eval_every": 0, "training.precision": "float32",
            "training.run_dir": str(tmp_path / "run"), "optimizer.learning_rate": 1e-2,
        }
    )  # fmt: skip
    code, said, err = quietgrad("predict", run_dir.path, write_rows(tmp_path / "new.csv", rows))
    heads = next(line for line in said.splitlines() if line.startswith("┃")).split()
    assert code == 0 and "predicted" in heads and heads[-1].startswith("probability"), err
    assert "┃c0" in heads and "c11" not in heads and not any("…" in head for head in heads)
    assert "of the 13 columns of FILE found no room here." in said
    odd = [dict.fromkeys(names, "z" * 4000), dict.fromkeys(names, "a") | {"c7": "q"}]
    file = write_rows(tmp_path / "odd.csv", odd)
    code, said, err = quietgrad("predict", run_dir.path, file, "--output", tmp_path / "out.csv")
    assert code == 0 and said.count("note: column") == 5 and len(said) < 1500, err
    assert said.index("note: column 'c7': 2 cells") < said.index("note: column 'c0': 1 cell")
    assert "note: and 7 columns more with such cells; --json lists them all" in said
    code, said, err = quietgrad("predict", run_dir.path, file, "--json")
    assert code == 0 and len(json.loads(said)["notes"]) == 12, err


@pytest.mark.parametrize("model", ["cnn:groupnorm", "vit"])
def test_a_folder_of_images(
    values: dict[str, Any], vit: Path, quietgrad: Any, tmp_path: Path, model: str
) -> None:
    name = f"image:{vit}" if model == "vit" else model
    tune = "lora" if model == "vit" else "full"
    _, outcome, run_dir = train(values | {"model.name": name, "model.tune": tune})
    folder, out = Path(values["data.source"]) / "test", tmp_path / "out.csv"
    code, _, err = quietgrad("predict", run_dir.path, folder, "--output", out)
    assert code == 0, err
    found = rows_of(out)
    right = np.mean([row["predicted"] == row["file"].split("/")[0] for row in found])
    assert len(found) == 24 and right == pytest.approx(outcome.result["metrics"]["accuracy"])
    picture = write_picture(tmp_path / "some" / "big.png", np.full((31, 20, 3), 9, dtype=np.uint8))
    (picture.parent / "broken.png").write_bytes(b"no image")
    code, said, err = quietgrad("predict", run_dir.path, picture.parent, "--json")
    assert code == 0, err
    big, broken = json.loads(said)["predictions"]
    assert broken["predicted"] is None and big["predicted"] in ("across", "down")
    assert json.loads(said)["unread"] == 1


def test_several_labels_an_image(values: dict[str, Any], quietgrad: Any, tmp_path: Path) -> None:
    folder = write_findings(tmp_path / "chest")
    changed = {
        "model.name": "cnn:groupnorm", "model.tune": "full", "data.source": str(folder),
        "data.text": CHEST.file, "data.label": CHEST.label, "data.label_separator": "|",
        "data.no_label": CHEST.no_label,
    }  # fmt: skip
    _, _, run_dir = train(values | changed)
    code, said, err = quietgrad("predict", run_dir.path, folder / "images_001", "--json")
    assert code == 0, err
    for row in json.loads(said)["predictions"]:
        has = [name for name in ("Across", "Down") if row[f"probability_{name}"] > 0.5]
        assert row["predicted"] == "|".join(has)


@pytest.mark.grid(1, "two files of prompts")
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_answers_to_prompts(
    settings: dict[str, Any],
    tiny_llama: Path,
    quietgrad: Any,
    tmp_path: Path,
    tune: str,
) -> None:
    changed = {
        "model.name": str(tiny_llama), "model.tune": tune, "task.kind": "generate",
        "task.prompt": "{text} :", "task.answer": "{label}", "task.max_answer_length": 3,
        "privacy.enabled": False, "training.steps": 60, "optimizer.learning_rate": 1e-2,
        "task.decoded": "exact_match", "task.decoded_records": 1000, "training.seed": 0,
    }  # fmt: skip
    settings.pop("privacy.target_epsilon")
    prepared, outcome, run_dir = train(settings | changed)
    test = prepared.task.splits.test
    rows = [{"text": prompt.removesuffix(" :"), "answer": "given"} for prompt in test.texts]
    out = tmp_path / "out.csv"
    new = write_rows(tmp_path / "new.csv", rows)
    code, _, err = quietgrad("predict", run_dir.path, new, "--output", out)
    assert code == 0, err
    found = rows_of(out)
    assert list(found[0]) == ["text", "answer", "predicted_answer"]
    right = np.mean([r["predicted_answer"] == a for r, a in zip(found, test.answers, strict=True)])
    # One prompt at a time there, batches here: padding in front changes rounding alone.
    assert right == pytest.approx(outcome.result["metrics"]["exact_match"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("text,label\n", "holds no records"),
        ("txt,label\na,b\n", "has no column 'text', which the run reads (data.text)"),
        (None, "no such file"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(
    settings: dict[str, Any], quietgrad: Any, tmp_path: Path, content: str | None, message: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(config_of(settings).to_toml())
    (run / "result.json").write_text("{}")
    (run / "model").mkdir()
    file = tmp_path / "new.csv"
    if content is not None:
        file.write_text(content)
    code, out, err = quietgrad("predict", run, file)
    assert code == 2 and message in err and err.count("\n") == 1
    begun = [] if content is None else [f"reading {file} with the model of {run}"]
    assert out.splitlines() == begun
    if content and "txt" in content:
        assert "did you mean 'txt'" in err


def test_a_directory_without_a_finished_run_is_refused(
    settings: dict[str, Any], quietgrad: Any, csv_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "my-run"
    run.mkdir()
    code, _, err = quietgrad("predict", tmp_path / "my-rum", csv_file)
    assert code == 2 and "no such run directory" in err and "did you mean 'my-run'" in err
    code, _, err = quietgrad("predict", run, csv_file)
    assert code == 2 and "holds no run" in err
    (run / "config.toml").write_text(config_of(settings).to_toml())
    code, _, err = quietgrad("predict", run, csv_file)
    assert code == 2 and "has not ended" in err and "--resume" in err
    for output, message in (("a.txt", "end in .csv"), ("no/a.csv", "no such folder")):
        code, _, err = quietgrad("predict", run, csv_file, "--output", tmp_path / output)
        assert code == 2 and message in err
    code, _, err = quietgrad("predict", run, csv_file, "--output", csv_file)
    assert code == 2 and "is FILE itself" in err
    there = tmp_path / "others.csv"
    there.write_text("kept")
    code, _, err = quietgrad("predict", run, csv_file, "--output", there)
    assert code == 2 and "is there already; name another file" in err
    assert there.read_text() == "kept"
