"""What the owner of a file sees of it, and the configuration that is written for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import labelled_texts, write_records

from quietgrad.sampling.users import Users
from quietgrad.training.settings.config import load_config
from quietgrad.training.sources.guess import describe, guess
from quietgrad.training.sources.proposal import delta_for
from quietgrad.training.sources.rows import read_rows

Run = Callable[..., tuple[int, str, str]]

BROKEN = """text,label
"a lovely
film, really it was",good
awful film with dull plot,bad
too,many,cells here
short
a great film with music,Good
,good
a text without a label here,
"""


def test_check_shows_every_broken_row_with_its_line(quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / "reviews.csv"
    file.write_text(BROKEN)
    code, out, err = quietgrad("check", file, "--text", "text", "--label", "label")
    assert code == 1 and err == ""
    assert out.startswith("This output is private")
    assert "2 rows that cannot be read:" in out and "2 rows without something:" in out
    for line in (
        "line 5: 3 cells",
        "line 6: 1 cell in place of 2",
        "line 8: no text",
        "line 9: no label",
    ):
        assert line in out
    assert "UTF-8" in out and "comma" in out and "differ in case alone" in out
    code, out, _ = quietgrad("check", file, "--text", "text", "--label", "label", "--json")
    found = json.loads(out)
    assert code == 1 and found["private"].startswith("This output is private")
    (facts,) = found["files"]
    assert [row["first"] for row in facts["broken"]] == [5, 6]
    assert [row["first"] for row in facts["gaps"]] == [8, 9]
    assert facts["labels"] == {"good": 2, "Good": 1, "bad": 1} and len(facts["rare"]) == 3


def test_a_file_of_which_no_row_can_be_read_is_not_offered_to_be_left_out(
    quietgrad: Run, tmp_path: Path
) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(b"text,label\n" + b"caf\xe9 au lait,good\n" * 3)
    code, out, _ = quietgrad("check", path)
    assert code == 1 and "not UTF-8" in out and "line 4: bytes" in out
    assert "No row can be read: mend the file" in out and "leaves out" not in out
    assert "no column looks like a label" not in out


def test_check_prints_all_of_many_rows(quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / "many.csv"
    file.write_text("text,label\n" + "a,b,c\n" * 300)
    out = quietgrad("check", file)[1]
    assert "lines 2 to 301: 3 cells" in out  # of all that are broken alike, in one line
    file.write_text("text,label\n" + "a,b,c\n" * 20)
    out = quietgrad("check", file)[1]
    assert all(f"line {n}: 3 cells" in out for n in range(2, 22))


def test_check_of_a_clean_file_and_of_a_configuration(
    quietgrad: Run, csv_file: Path, settings, write_config
) -> None:
    code, out, _ = quietgrad("check", csv_file)
    assert code == 0 and "Every row can be read" in out and "60" in out
    code, out, _ = quietgrad("check", write_config(settings))
    assert code == 0 and "good" in out
    code, out, _ = quietgrad("check", write_config(settings | {"data.text": "txt"}))
    assert "has no column 'txt'" in out


@pytest.mark.parametrize(
    ("labels", "note"),
    [
        ([f"{i * 0.37:.2f}" for i in range(120)], "numbers with fractions"),
        ([f"name {i}" for i in range(120)], "names or numbers, not classes"),
        (["x"] * 120, "nothing can be learnt"),
    ],
)
def test_check_says_what_is_odd_about_labels(
    labels: list[str], note: str, quietgrad: Run, tmp_path: Path
) -> None:
    records = [(text, label) for (text, _), label in zip(labelled_texts(), labels, strict=True)]
    file = write_records(tmp_path / "a.csv", records)
    found = quietgrad("check", file, "--label", "label", "--text", "text")[1]
    assert note in found and "labels: column label" in found


def test_check_of_files_that_cannot_be_read(quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('text,label\na,b\n"c,d\n')
    code, out, _ = quietgrad("check", file)
    assert code == 1 and "not closed" in out and "begins in line 3" in out
    for name in ("none.csv", "a.xyz", ""):
        if name == "a.xyz":
            (tmp_path / name).write_text("x")
        code, _, err = quietgrad("check", tmp_path / name)
        assert code == 2 and err.count("\n") == 1 and err.startswith("error: FILE=")
    assert quietgrad("check", file.with_name("b.csv"))[0] == 2


def test_check_of_pictures(quietgrad: Run, pictures: Path, tmp_path: Path) -> None:
    code, out, _ = quietgrad("check", pictures)
    assert code == 0 and "train" in out and "Every image can be opened" in out
    import shutil

    copy = shutil.copytree(pictures, tmp_path / "copy")
    damaged = next((copy / "train").rglob("*.png"))
    damaged.write_bytes(b"\x89PNG broken")
    code, out, _ = quietgrad("check", copy)
    assert code == 1 and damaged.name in out and "1 image that cannot be opened" in out


def test_check_of_pictures_says_which_labels_are_not_learnt(
    quietgrad: Run, pictures: Path, tmp_path: Path, write_config
) -> None:
    """Which labels there are follows from the test part; `check` said nothing of it."""
    import shutil

    copy = shutil.copytree(pictures, tmp_path / "copy")
    shutil.copytree(copy / "train" / "down", copy / "train" / "askew")
    code, out, _ = quietgrad("check", copy)
    words = " ".join(out.split())
    assert code == 0 and "no test image has the label 'askew': training images with it" in words
    shutil.rmtree(copy / "test" / "down")
    code, out, _ = quietgrad("check", copy)
    assert code == 1 and "every test image has the label 'across'" in " ".join(out.split())
    source = {"model.name": "cnn:groupnorm", "data.source": str(copy), "data.image_size": 8}
    code, _, err = quietgrad("train", write_config(source))
    assert code == 2 and "the test part has the single label 'across'" in err
    listed = write_config(source | {"data.labels": ["across", "down"]})
    assert quietgrad("check", listed)[0] == 0


# init


def written(path: Path, columns: dict[str, list[str]]) -> Path:
    rows = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


TEXTS = [text for text, _ in labelled_texts()]
CLASSES = [label for _, label in labelled_texts()]
NUMBERS = [f"{i * 0.37:.2f}" for i in range(len(TEXTS))]
NAMES = [f"name{i}" for i in range(len(TEXTS))]


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"text": TEXTS, "label": CLASSES}, ("text", "label", "text", "")),
        ({"id": NAMES, "stars": CLASSES, "body": TEXTS}, ("text", "stars", "body", "")),
        ({"age": NUMBERS, "job": CLASSES, "income": CLASSES}, ("table", "income", "", "")),
        ({"target": CLASSES, "b": CLASSES, "x": NUMBERS}, ("table", "target", "", "")),
        ({"question": TEXTS, "answer": TEXTS}, ("answers", "answer", "question", "")),
        ({"question": TEXTS, "answer": NAMES}, ("answers", "answer", "question", "")),
        ({"question": TEXTS, "answer": CLASSES}, ("text", "answer", "question", "")),
        (
            {"premise": TEXTS, "hypothesis": TEXTS, "label": CLASSES},
            ("text", "label", "premise", "hypothesis"),
        ),
    ],
    ids=lambda value: "-".join(value),
)
def test_what_is_learnt_is_guessed(columns: dict, found: tuple, tmp_path: Path) -> None:
    known = describe(read_rows(written(tmp_path / "a.csv", columns)))
    guessed = guess(known)
    assert (guessed.task, guessed.label, guessed.text, guessed.pair) == found


def test_columns_that_are_named_are_taken(tmp_path: Path) -> None:
    columns = {"a": TEXTS, "b": list(reversed(TEXTS)), "x": CLASSES, "y": CLASSES}
    known = describe(read_rows(written(tmp_path / "a.csv", columns)))
    assert guess(known, "b", "x").text == "b" and guess(known, "b", "x").label == "x"
    with pytest.raises(ValueError, match="--label='z' is not a column"):
        guess(known, label="z")
    with pytest.raises(ValueError, match="no column looks like a label"):
        guess({name: known[name] for name in ("a", "b")})


def test_train_accepts_what_init_writes(
    quietgrad: Run, csv_file: Path, tiny_bert, tmp_path
) -> None:
    config = tmp_path / "config.toml"
    code, out, err = quietgrad("init", csv_file, "-o", config)
    assert (code, err) == (0, "") and str(config) in out
    whole = load_config(config, ())
    assert whole.data.source == str(csv_file) and whole.privacy.target_epsilon == 2.0
    assert whole.privacy.target_delta < 1 / (0.6 * 120)
    lines = [x for x in config.read_text().splitlines() if str(csv_file) not in x]
    assert max(map(len, lines)) < 100
    # As it stands it would load MiniLM; everything else is as written.
    run = ["--set", f"model.name={tiny_bert}", "--set", "model.max_length=16"]
    run += ["--set", f"training.run_dir={tmp_path / 'run'}"]
    code, out, err = quietgrad("train", config, *run, "--json")
    assert code == 0, err
    assert json.loads(out)["epsilon"] <= 2.0


def test_a_table_and_its_configuration_run_as_they_stand(
    quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "people.csv", {"age": NUMBERS, "job": CLASSES, "income": CLASSES})
    assert quietgrad("init", "people.csv")[0] == 0
    assert quietgrad("train", "config.toml", "--set", "training.steps=3")[0] == 0


def test_pictures_and_their_configuration_run_as_they_stand(
    quietgrad: Run, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert quietgrad("init", pictures, "-o", "pictures.toml")[0] == 0
    few = ["--set", "training.steps=2", "--set", "expected_batch_size=16"]
    code, _, err = quietgrad("train", "pictures.toml", *few)
    assert code == 0, err


def test_answers_get_a_configuration(quietgrad: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", {"question": TEXTS, "answer": TEXTS})
    assert quietgrad("init", file, "-o", tmp_path / "a.toml")[0] == 0
    config = load_config(tmp_path / "a.toml", ())
    assert config.task.prompt == "{question}\n" and config.task.answer == "{answer}"


def test_init_overwrites_nothing_and_refuses_in_one_line(quietgrad: Run, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.csv", labelled_texts())
    there = tmp_path / "there.toml"
    there.write_text("mine")
    few = write_records(tmp_path / "few.csv", labelled_texts(12))
    for source, output, part in (
        (file, there, "is there already"),
        (file, tmp_path / "a.txt", "must end in .toml"),
        (file, tmp_path / "no" / "a.toml", "no such folder"),
        (few, tmp_path / "b.toml", "has 12 records"),
        (tmp_path, tmp_path / "b.toml", "folder without train/"),
        (tmp_path / "none.csv", tmp_path / "b.toml", "no such file"),
    ):
        code, _, err = quietgrad("init", source, "-o", output)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and part in err
    assert there.read_text() == "mine" and not (tmp_path / "b.toml").exists()


def test_init_of_a_file_in_other_bytes(quietgrad: Run, tmp_path: Path) -> None:
    """No row can be read, and that is what is wrong: not that no column looks like a label."""
    file = tmp_path / "old.csv"
    file.write_bytes(b"text,label\n" + b"caf\xe9 au lait,good\n" * 50)
    for more in ([], ["--skip-bad"]):
        code, _, err = quietgrad("init", file, "-o", tmp_path / "config.toml", *more)
        assert code != 0 and "no row of it can be read; `quietgrad check" in err
        assert "label" not in err
    assert not (tmp_path / "config.toml").exists()


def test_init_of_a_broken_file(quietgrad: Run, tmp_path: Path) -> None:
    file = write_records(tmp_path / "a.csv", labelled_texts())
    with file.open("a") as more:
        more.write("too,many,cells\n")
    config = tmp_path / "a.toml"
    code, _, err = quietgrad("init", file, "-o", config)
    assert code == 2 and "quietgrad check" in err and "--skip-bad" in err and not config.exists()
    assert quietgrad("init", file, "-o", config, "--skip-bad")[0] == 0
    assert load_config(config, ()).data.skip_bad is True


# Whose a row is

OWNERS = [f"p{i % 45}" for i in range(len(TEXTS))]


def test_people_with_several_rows_get_a_configuration_that_runs(
    quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"age": NUMBERS, "who": OWNERS, "job": CLASSES, "income": CLASSES}
    written(tmp_path / "people.csv", columns)
    code, out, _ = quietgrad("check", "people.csv", "--user", "who")
    assert code == 0 and "users whose they are" in out and " 45" in out
    assert quietgrad("init", "people.csv", "--user", "who")[0] == 0
    text = Path("config.toml").read_text()
    assert text.startswith("# Written by `quietgrad init people.csv --user who`.")
    assert 'user = "who"' in text and "below 1 / (training users)" in text
    assert all(len(line) < 100 for line in text.splitlines())
    config = load_config(Path("config.toml"), ())
    assert config.data.user == "who" and config.data.label == "income"
    assert config.users == Users()  # what it writes are the defaults, said
    assert config.privacy.target_delta == delta_for(27)
    few = ["--set", "training.steps=2", "--set", "training.run_dir=run"]
    code, out, err = quietgrad("train", "config.toml", *few, "--json")
    assert code == 0, err
    assert json.loads(out)["neighbouring"] == "add-remove-user"
    inputs = json.loads(Path("run/model/quietgrad.json").read_text())
    assert "p1" not in json.dumps(inputs)  # nothing is learnt of whose a row is


def test_rows_without_an_owner_are_listed_and_refused(quietgrad: Run, tmp_path: Path) -> None:
    """Training refused them, and `check` said that every row could be read."""
    owners = [*OWNERS]
    owners[3], owners[7] = "", "nan"
    file = written(tmp_path / "a.csv", {"age": NUMBERS, "who": owners, "income": CLASSES})
    config = tmp_path / "a.toml"
    code, _, err = quietgrad("init", file, "--user", "who", "-o", config)
    assert code == 2 and "rows without an owner" in err and "quietgrad check" in err
    assert err.count("\n") == 1 and not config.exists()
    assert quietgrad("init", file, "-o", config)[0] == 0
    config.write_text(config.read_text().replace('# user = "COLUMN"', 'user = "who"'))
    for asked in ([file, "--user", "who"], [config]):
        code, out, _ = quietgrad("check", *asked)
        assert code == 1 and "2 rows without an owner:" in out
        assert "line 5: no owner: column 'who' is empty" in out
        assert "line 9: no owner: column 'who' says 'nan'" in out
        assert "data.skip_bad leaves out none of them" in " ".join(out.split())
        assert "Every row" not in out and "without something" not in out


@pytest.mark.parametrize(
    ("owners", "asked", "message"),
    [
        (OWNERS, ["--user", "whom"], "--user='whom' is not a column of"),
        (OWNERS, ["--user", "job", "--label", "job"], "--user='job' is --label, too"),
        ([f"p{i % 7}" for i in range(len(TEXTS))], ["--user", "who"], "are of 7 users; with fewer"),
        (NUMBERS, ["--user", "who"], ""),
        ([*OWNERS[1:], "1.2e+18"], ["--user", "who"], "floats so large that two numbers may be"),
    ],
    ids=["none", "label", "few", "numbers", "rounded"],
)
def test_owners_that_are_none(
    owners: list[str], asked: list[str], message: str, quietgrad: Run, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.csv", {"age": NUMBERS, "who": owners, "job": CLASSES})
    code, _, err = quietgrad("init", file, *asked, "-o", tmp_path / "a.toml")
    assert (code == 2) == bool(message) and message in err and err.count("\n") <= 1


def test_images_and_configurations_take_no_owners(
    quietgrad: Run, pictures: Path, settings: dict, write_config, tmp_path: Path
) -> None:
    for command, source in (("init", pictures), ("check", pictures)):
        code, _, err = quietgrad(command, source, "--user", "who")
        assert code == 2 and err.startswith("error: --user='who'") and err.count("\n") == 1
    assert quietgrad("check", write_config(settings), "--user", "who")[0] == 2


# Labels, separators, marks in names

AGES = [str(17 + 3 * (i % 30)) for i in range(len(TEXTS))]


@pytest.mark.parametrize(
    ("labels", "refused"),
    [
        (AGES, "are 30 different numbers"),
        ([str(1000 + i) for i in range(len(TEXTS))], "are 120 different numbers"),
        (NUMBERS, "numbers with fractions"),
        (NAMES, "names or numbers, not classes"),
        ([str(i % 2) for i in range(len(TEXTS))], ""),
        ([str(1 + i % 5) for i in range(len(TEXTS))], ""),
        ([str(i % 10 / 2) for i in range(len(TEXTS))], ""),  # half stars
        ([str(i % 26) for i in range(len(TEXTS))], ""),  # classes, counted
    ],
    ids=["ages", "incomes", "fractions", "names", "two", "stars", "half-stars", "counted"],
)
def test_a_column_of_measurements_is_no_label(
    labels: list[str], refused: str, quietgrad: Run, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.csv", {"job": CLASSES, "value": NUMBERS, "label": labels})
    config = tmp_path / "a.toml"
    code, _, err = quietgrad("init", file, "--label", "label", "-o", config)
    assert (code == 2) == bool(refused) == ("no class to learn" in err) and err.count("\n") <= 1
    assert config.exists() != bool(refused) and not (refused and refused in err)
    assert refused in " ".join(quietgrad("check", file, "--label", "label")[1].split())


def test_semicolons_from_check_to_predictions(
    quietgrad: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    columns = {"age": AGES, "rate": [n.replace(".", ",") for n in NUMBERS], "job": CLASSES}
    rows = [";".join(columns), *map(";".join, zip(*columns.values(), strict=True))]
    Path("people # 1.csv").write_text("\n".join(rows) + "\n")
    code, out, _ = quietgrad("check", "people # 1.csv")
    assert code == 0 and "semicolon" in out
    assert quietgrad("init", "people # 1.csv", "--label", "job")[0] == 0
    assert "# its columns are separated by a semicolon" in Path("config.toml").read_text()
    few = ["--set", "training.steps=2", "--set", "training.run_dir=run"]
    code, out, err = quietgrad("train", "config.toml", *few)
    told = "holds numbers with a decimal comma; 3,14 is read as 3.14"
    assert (code, err) == (0, "") and "column 'rate' of" in out and told in " ".join(out.split())
    assert quietgrad("predict", "run", "people # 1.csv", "--output", "out.csv")[0] == 0
    assert len(Path("out.csv").read_text().splitlines()) == len(rows)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_column_names_alone_are_no_records(name: str, quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / name
    if name == "a.csv":
        file.write_text("text,label\n")
    else:
        pandas = pytest.importorskip("pandas")
        pandas.DataFrame({"text": [], "label": []}).to_parquet(file)
    code, out, _ = quietgrad("check", file)
    assert code == 1 and "holds no records" in out and "Every row" not in out
    code, _, err = quietgrad("init", file, "-o", tmp_path / "a.toml")
    assert code == 2 and "holds no records" in err and err.count("\n") == 1


NAMELESS = {
    "texts": "".join(f"{text},{label}\n" for text, label in labelled_texts()),
    "numbers": "".join(f"{20 + i % 41},{'low' if i % 3 else 'high'}\n" for i in range(90)),
    "words": "".join(
        f"{('nurse', 'smith')[i % 2]},{'low' if i % 3 else 'high'}\n" for i in range(90)
    ),
}


@pytest.mark.parametrize("kind", NAMELESS)
def test_a_record_is_no_line_of_names(kind: str, quietgrad: Run, tmp_path: Path) -> None:
    file, config = tmp_path / "nameless.csv", tmp_path / "nameless.toml"
    file.write_text(NAMELESS[kind])
    code, _, err = quietgrad("init", file, "-o", config)
    assert code == 2 and "first line looks like a record" in err and not config.exists()
    assert file.read_text().splitlines()[0].split(",")[0] not in err.replace(str(file), "")
    code, out, _ = quietgrad("check", file)
    assert code == 1 and "first line looks like a record" in out


def test_a_column_may_be_called_as_one_of_its_labels(quietgrad: Run, tmp_path: Path) -> None:
    mails = [(text, "spam" if label == "bad" else "ham") for text, label in labelled_texts()]
    file = tmp_path / "mails.csv"
    file.write_text("text,spam\n" + "".join(f"{text},{label}\n" for text, label in mails))
    assert quietgrad("init", file, "-o", tmp_path / "mails.toml")[0] == 0
    assert quietgrad("check", file)[0] == 0


def test_numbers_in_a_column_called_label_are_looked_at(quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    texts = [text for text, _ in labelled_texts()]
    file.write_text("text,label\n" + "".join(f"{t},{i * 0.37:.2f}\n" for i, t in enumerate(texts)))
    code, out, _ = quietgrad("check", file)
    assert code == 1 and "numbers with fractions" in out
    code, _, err = quietgrad("init", file, "-o", tmp_path / "scores.toml")
    assert code == 2 and "no class to learn" in err


@pytest.mark.parametrize("label", [["good"], {"is": "good"}])
def test_lists_and_objects_are_no_labels(label: object, quietgrad: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        {"text": text, "label": label if i % 2 else "bad"}
        for i, (text, _) in enumerate(labelled_texts())
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = quietgrad("check", file)
    assert code == 1 and "lists or objects" in out
    code, _, err = quietgrad("init", file, "-o", tmp_path / "a.toml")
    assert code == 2 and "no class to learn" in err


def test_a_key_of_one_private_row_is_in_no_configuration_and_no_message(
    quietgrad: Run, tmp_path: Path
) -> None:
    """Before: it was the text that is learnt from, and one of the columns that messages list."""
    rows = [{"age": i % 40, "job": f"job{i % 3}", "pay": "ab"[i % 2]} for i in range(200)]
    private = {"words of the doctor": "seen three times in March for a depression", **rows[0]}
    source, written = tmp_path / "a.jsonl", tmp_path / "a.toml"
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, private]))
    code, out, err = quietgrad("init", source, "-o", written)
    assert (code, err) == (0, "") and "a classifier of rows" in out
    assert "doctor" not in out + written.read_text()
    code, out, err = quietgrad("init", source, "--label", "words", "-o", tmp_path / "b.toml")
    assert code != 0 and "is not a column" in err and "doctor" not in err
    named = guess(describe(read_rows(source)), "words of the doctor", "pay")
    assert (named.text, named.label) == ("words of the doctor", "pay")
