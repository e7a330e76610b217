"""Tables: rows are encoded by themselves and by public rows, and a small network learns from them
privately.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import config_of, interrupt_at, train

from quietgrad.checks import SettingsWarning
from quietgrad.clipping.verify import verify_clipping
from quietgrad.ledger import read_ledger
from quietgrad.training.prepare import prepare
from quietgrad.training.tasks.registry import load_task
from quietgrad.training.tasks.splits import IGNORED
from quietgrad.training.tasks.tables.data import FARTHEST, Encoding, LabelledRows, load_rows
from quietgrad.training.tasks.tables.task import load_saved_table

ROWS = 800
SEED = 5


def table(path: Path, rows: int = ROWS, extra: str = "") -> Path:
    """Income follows from age and trade; every tenth age is missing, hours say nothing."""
    draws = np.random.default_rng(1)
    lines = ["age,trade,hours,income"]
    for i in range(rows):
        age, trade = draws.integers(18, 80), ("smith", "baker", "clerk")[draws.integers(3)]
        rich = age > 45 if trade != "clerk" else age < 45
        shown = "" if i % 10 == 0 else str(age)
        lines.append(f"{shown},{trade},{draws.integers(10, 60)}.{i},{'high' if rich else 'low'}")
    path.write_text("\n".join(lines) + "\n" + extra, encoding="utf-8")
    return path


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return {
        "model.name": "table:mlp",
        "model.tune": "full",
        "data.source": str(table(tmp_path / "people.csv")),
        "data.label": "income",
        "data.public": True,
        "privacy.noise_multiplier": 0.6,
        "training.expected_batch_size": 120,
        "training.steps": 60,
        "training.eval_every": 0,
        "training.seed": SEED,
        "training.precision": "float32",  # whatever this machine would choose by itself
        "training.run_dir": str(tmp_path / "run"),
        "optimizer.learning_rate": 2e-2,
    }


@pytest.mark.parametrize("changed", ["labels", "scales"])
def test_a_run_does_not_go_on_with_rows_that_mean_something_else(
    changed: str, values: dict[str, Any]
) -> None:
    """Before: it did, as many records being there, and the weights were saved with the labels and
    scales of now.
    """
    file = Path(values["data.source"])
    before = file.read_text(encoding="utf-8")
    words = before.replace("high", "yes").replace("low", "no")
    minutes = "\n".join(_in_minutes(line) for line in before.splitlines()) + "\n"
    _, outcome, run_dir = train(values, report=interrupt_at(3))
    assert outcome.interrupted
    file.write_text(words if changed == "labels" else minutes, encoding="utf-8")
    with pytest.raises(ValueError, match=r"other labels by now.*put the data back as they were"):
        train(values, resume=True)
    assert read_ledger(run_dir.ledger).releases == 3
    file.write_text(before, encoding="utf-8")
    assert train(values, resume=True, report=interrupt_at(5))[1].result["steps"] == 5


def _in_minutes(line: str) -> str:
    age, trade, hours, income = line.split(",")
    return line if hours == "hours" else f"{age},{trade},{60 * float(hours)},{income}"


def test_a_network_learns_a_table_and_can_be_used_afterwards(values: dict[str, Any]) -> None:
    """Majority is near 0.5; the trade turns the rule round, so numbers alone cannot give 0.85."""
    prepared, outcome, run_dir = train(values)
    accuracy = outcome.result["metrics"]["accuracy"]
    assert accuracy > 0.75
    card = (run_dir.model / "README.md").read_text(encoding="utf-8")
    assert "Without Quietgrad: what `quietgrad export RUN_DIR -o model.pt2` writes" in card
    classifier, encoding, labels = load_saved_table(run_dir.model)
    rows = load_rows(values["data.source"], "income")
    held = prepared.task.splits.test
    encoded = encoding.encode(
        rows.subset(np.array([rows.texts.index(text) for text in held.texts]))
    )
    with torch.no_grad():
        logits = classifier(torch.from_numpy(encoded.numbers), torch.from_numpy(encoded.codes))
    truth = np.array([labels.index(held.label_names[i]) for i in held.labels])
    assert float((logits.argmax(1).numpy() == truth).mean()) == pytest.approx(accuracy)


def test_columns_of_numbers_with_commas_share_one_warning() -> None:
    cells = ("1,5", "2,5", "3")
    rows = LabelledRows({f"c{i}": cells for i in range(30)}, np.zeros(3, np.int64), ("a",), "x.csv")
    with pytest.warns(SettingsWarning) as warned:
        Encoding.of([rows])
    (warning,) = warned
    assert str(warning.message).startswith(
        "30 columns of 'x.csv', such as 'c0', hold numbers with a decimal comma; 3,14 is read as"
    )


def test_clipping_of_a_table_agrees_with_the_oracle(values: dict[str, Any]) -> None:
    prepared = prepare(config_of(values))
    batch = prepared.validation.collate(np.arange(5), prepared.device)
    torch.nn.init.normal_(prepared.model.classifier.head.weight, std=0.1)
    assert verify_clipping(prepared.model.classifier, prepared.loss(), batch) < 1e-4


def test_one_private_row_changes_how_no_other_is_read(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Neither a new category, nor a huge number, nor a word among numbers, nor a new label."""
    plain = load_task(config_of(values))
    strange = "1e9,astronaut,never,unheard-of\n"
    values["data.source"] = str(table(tmp_path / "more.csv", extra=strange))
    more = load_task(config_of(values))
    added = set(more.record_ids) - set(plain.record_ids)
    if not added:
        pytest.fail("the strange row has to be a training record for this test; change it")
    assert more.encoding == plain.encoding and more.label_names == plain.label_names
    theirs = more.encoding.encode(more.splits.train)
    place = more.record_ids.index(next(iter(added)))
    rest = np.delete(np.arange(len(theirs)), place)
    ours = plain.encoding.encode(plain.splits.train)
    assert np.array_equal(theirs.numbers[rest], ours.numbers) and np.array_equal(
        theirs.codes[rest], ours.codes
    )
    assert theirs.labels[place] == IGNORED
    assert theirs.codes[place].tolist() == [0]
    assert theirs.numbers[place].tolist() == [FARTHEST, 0.0, 0.0, 1.0]


def test_a_key_of_one_private_row_is_not_asked_of_test_rows(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """Before: "data.test_source lacks the column 'illness of bob'", and no run."""
    rows = [{"age": i % 50, "job": f"w{i % 7}", "income": "ab"[i % 2]} for i in range(200)]
    files = {
        "train": [{"illness of bob": 1, "age": 3, "job": "w9", "income": "a"}, *rows],
        "alone": [{"age": 3, "job": "w9", "income": "a"}, *rows],
        "test": rows[:40],
        "less": [{k: v for k, v in row.items() if k != "job"} for row in rows],
    }
    for name, held in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))

    def task(train: str, test: str) -> Any:
        sources = {"data.source": train, "data.test_source": test}
        named = {key: str(tmp_path / f"{name}.jsonl") for key, name in sources.items()}
        return load_task(config_of({**values, **named}))

    one, other = task("train", "test"), task("alone", "test")
    assert one.encoding == other.encoding
    assert one.record_ids == other.record_ids
    with pytest.raises(ValueError, match=r"lacks the column 'job' of data\.source; add it"):
        task("train", "less")


@pytest.mark.parametrize("written", ["with an index", "in another order", "as floats"])
def test_test_rows_are_not_trained_on_however_a_tool_wrote_them(
    values: dict[str, Any], tmp_path: Path, written: str
) -> None:
    """Before: whatever changed a row's text, and they were trained on and their scores told."""
    header, *lines = (tmp_path / "people.csv").read_text().splitlines()
    names, rows = header.split(","), [line.split(",") for line in lines[:100]]
    if written == "with an index":
        names, rows = ["", *names], [[str(i), *row] for i, row in enumerate(rows)]
    elif written == "in another order":
        names, rows = names[::-1], [row[::-1] for row in rows]
    else:  # a column with a gap
        rows = [[f"{row[0]}.0" if row[0] else "", *row[1:]] for row in rows]
    test = tmp_path / "test.csv"
    test.write_text("\n".join(",".join(row) for row in [names, *rows]) + "\n")
    task = load_task(config_of(values | {"data.test_source": str(test)}))
    hours = {line.split(",")[2] for line in lines[:100]}  # each row's own
    assert len(task.splits.test) == 100 and len(task.splits.train) > 500
    assert not hours & set(task.splits.train.columns["hours"])
    assert not hours & set(task.splits.validation.columns["hours"])


def test_a_key_of_one_private_row_that_test_rows_have_holds_no_other_back(
    values: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"age": i, "job": f"w{i % 7}", "income": "ab"[i % 2]} for i in range(200)]
    test = [row | {"ill": i % 3} for i, row in enumerate(rows[:40])]
    files = {"with": [{"age": 300, "job": "w9", "ill": 1, "income": "a"}, *rows], "less": rows}
    for name, held in {**files, "test": test}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held))
    parts = []
    for name in files:
        sources = {"data.source": name, "data.test_source": "test"}
        named = {key: str(tmp_path / f"{file}.jsonl") for key, file in sources.items()}
        parts.append(set(load_task(config_of(values | named)).splits.train.columns["age"]))
    assert parts[0] - {"300"} == parts[1]


def test_one_class_in_two_spellings_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    """Before: four classes, of which private records had two and test records the other two."""
    people, test = tmp_path / "people.csv", tmp_path / "test.csv"
    header, *lines = people.read_text().replace(",high", ",1").replace(",low", ",0").splitlines()
    people.write_text("\n".join([header, *lines]) + "\n")
    test.write_text("\n".join([header, *(f"{line}.0" for line in lines[:100])]) + "\n")
    with pytest.raises(ValueError, match=r"labels '0' and '0\.0' .* one number in two spellings"):
        load_task(config_of(values | {"data.test_source": str(test)}))


def test_encoding_survives_its_file(values: dict[str, Any]) -> None:
    encoding = load_task(config_of(values)).encoding
    assert Encoding.from_json(encoding.to_json()) == encoding
    assert set(encoding.numbers) == {"age", "hours"} and encoding.categories == {
        "trade": ("baker", "clerk", "smith")
    }


def test_numbers_are_standardised_by_public_rows() -> None:
    rows = LabelledRows(
        {"a": ("1", "3", "", "inf")}, np.zeros(4, dtype=np.int64), ("x",), "made up"
    )
    public = rows.subset(np.array([0, 1]))
    encoded = Encoding.of([public]).encode(rows)
    assert encoded.numbers.tolist() == [[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.tune": "lora"}, "model.tune='full'"),
        ({"model.name": "table:mlpp"}, "table:mlp"),
        ({"data.label": "incom"}, "income"),
        ({"model.random_head": True}, "says nothing to a classifier of rows"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_task(config_of(values | changes))
