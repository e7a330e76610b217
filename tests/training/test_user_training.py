"""``data.user``: users are split, drawn, clipped and named from a file to the model's card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import config_of, interrupt_at, labelled_texts, train

from quietgrad.clipping import UserBatch
from quietgrad.randomness import RandomKey
from quietgrad.report.words import what_stands_for_a_user
from quietgrad.training import forecast
from quietgrad.training.prepare import prepare
from quietgrad.training.settings.config import TrainConfig
from quietgrad.training.tasks.registry import load_task

PEOPLE = 40


def owner(record: int) -> str:
    """The first ten people write most of it."""
    return f"person {record % PEOPLE if record % 3 else record % 10}"


@pytest.fixture
def owned_file(tmp_path: Path) -> Path:
    """200 texts of 40 people."""
    rows = [f'"{t}",{label},{owner(i)}' for i, (t, label) in enumerate(labelled_texts(200))]
    path = tmp_path / "owned.csv"
    path.write_text("\n".join(["text,label,who", *rows]) + "\n")
    return path


@pytest.fixture
def of_users(settings: dict[str, Any], owned_file: Path) -> dict[str, Any]:
    return settings | {
        "data.source": str(owned_file),
        "data.user": "who",
        "users.records_per_user": 3,
        "training.expected_batch_size": 8,
        "training.seed": 5,
    }


def owners_of(config: TrainConfig) -> list[set[bytes]]:
    splits = load_task(config).splits
    return [set(part.owners) for part in (splits.train, splits.validation, splits.test)]


def test_no_user_is_in_two_parts(of_users: dict[str, Any]) -> None:
    train_users, validation, test = owners_of(config_of(of_users))
    assert len(train_users) + len(validation) + len(test) == PEOPLE
    assert not train_users & validation and not train_users & test and not validation & test


def test_a_user_of_the_test_file_under_another_spelling_has_none_either(
    of_users: dict[str, Any], tmp_path: Path
) -> None:
    """White space after a comma made two users of one, whose test records were published."""
    file = tmp_path / "test.csv"
    rows = ["the film was lovely,good, person 1", "a dull plot,bad,person 2 "]
    file.write_text("\n".join(["text,label,who", *rows]) + "\n")
    train_users, validation, test = owners_of(config_of(of_users | {"data.test_source": str(file)}))
    assert len(test) == 2 and len(train_users) + len(validation) == PEOPLE - 2


def test_how_many_records_all_users_have_is_in_no_message_and_no_forecast(
    of_users: dict[str, Any], owned_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen layers are computed once for every record: a time in proportion to them told it."""
    with pytest.raises(ValueError, match="has records of 40 users, too few") as refused:
        load_task(config_of(of_users | {"data.validation_fraction": 1e-9}))
    assert "200" not in str(refused.value)

    def counted() -> int:
        return prepare(config_of(of_users)).records_to_cache

    before = counted()
    lines = owned_file.read_text().splitlines()
    owned_file.write_text("\n".join([*lines, *lines[1:]]) + "\n")
    assert counted() == before


def test_the_memory_that_is_told_does_not_grow_with_the_private_records(
    of_users: dict[str, Any],
) -> None:
    """It was the largest that the process ever held, all private records among it."""
    prepared = prepare(config_of(of_users))
    told = forecast.forecast(prepared)["predicted_memory_mib"]
    records = b"x" * (96 << 20)  # as a private file of this size would be
    assert forecast.forecast(prepared)["predicted_memory_mib"] == told > 0
    assert len(records)


def test_a_user_of_the_test_file_has_no_private_record(
    of_users: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "test.csv"
    rows = ["the film was lovely,good,person 1", "a dull plot,bad,somebody new"]
    file.write_text("\n".join(["text,label,who", *rows]) + "\n")
    values = of_users | {"data.test_source": str(file)}
    train_users, validation, test = owners_of(config_of(values))
    assert len(test) == 2 and len(train_users) + len(validation) == PEOPLE - 1
    assert not test & (train_users | validation)
    file.write_text("text,label\nlovely,good\ndull,bad\n")
    with pytest.raises(ValueError, match=r"data.user='who' is not a column of data.test_source"):
        load_task(config_of(values))


def test_from_a_file_to_a_model_that_names_the_unit(
    quietgrad: Any, write_config: Any, of_users: dict[str, Any]
) -> None:
    path = write_config(of_users)
    code, out, err = quietgrad("plan", path)
    assert code == 0, err
    words = re.sub(r"[\s│]+", " ", out)
    assert "add or remove one user, with all records" in words and "at most about" in words
    assert "at most 3 records of each a step (always the same ones)" in words
    assert "of the mean of a user's gradients" in words
    assert re.search(r"tuning: .* would cost epsilon = [\d.]+ per user in place of", words)

    code, out, err = quietgrad("train", path)
    assert code == 0, err
    words = re.sub(r"[\s│]+", " ", out)
    assert "(add or remove one user, with all records)" in words and " per user" in words
    run_dir = Path(of_users["training.run_dir"])
    result = json.loads((run_dir / "result.json").read_text())
    assert result["neighbouring"] == "add-remove-user" and result["records_per_user"] == 3
    assert result["users"] < PEOPLE and "train" not in result["records"]
    card = (run_dir / "model" / "README.md").read_text()
    stands = (
        "ne user of the training data, with all records of that user: at most 3 of them are used "
        "in a step, always the same ones, and the mean of their gradients is clipped."
    )
    assert f": o{stands}" in card and "clipped per user" in card
    statement = run_dir.parent / "card.md"
    assert quietgrad("report", run_dir, "--card", statement)[0] == 0
    text = statement.read_text()  # it said "summed gradient" of a mean
    assert f"O{stands}" in text and "Each user's mean gradient is cut to length 1" in text
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(record["unit"] == "user" for record in metrics if "epsilon" in record)

    code, out, err = quietgrad("epsilon", "--ledger", run_dir)
    assert code == 0 and "one user, with all records" in re.sub(r"[\s│]+", " ", out)
    assert "person" not in (run_dir / "ledger.jsonl").read_text()


def test_a_card_says_what_it_knows_of_what_stands_for_a_user() -> None:
    facts = {"neighbouring": "add-remove-user", "records_per_user": 4, "choice": "fresh"}
    whole = what_stands_for_a_user(facts | {"combined": "sum"})
    assert "at most 4 of them" in whole and "drawn anew in every step" in whole
    assert whole.endswith("the sum of their gradients is clipped")
    # Of before there was more to say.
    assert what_stands_for_a_user({"neighbouring": "add-remove-user"}) == (
        ", with all records of that user"
    )
    assert what_stands_for_a_user({"neighbouring": "add-remove"}) == ""


def test_epsilon_and_calibrate_name_the_unit(quietgrad: Any) -> None:
    sizes = ("--dataset-size", 100, "--batch-size", 10, "--steps", 3, "--delta", 1e-3)
    for command in (("epsilon", "--noise-multiplier", 1.0), ("calibrate", "--epsilon", 2.0)):
        for flag, unit in ((("--users",), "add-remove-user"), ((), "add-remove")):
            code, out, err = quietgrad(*command, *sizes, *flag, "--json")
            assert code == 0, err
            assert json.loads(out)["neighbouring"] == unit


@pytest.mark.grid(3, "kinds of runs that share the loop")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"users.combined": "sum", "users.choice": "fresh"},
        {"noise.method": "banded", "noise.bands": 2},
        {"clipping.estimator": "hutch"},
        {"denoising.method": "published"},
        {"model.tune": "head"},
        {"privacy.enabled": False, "privacy.target_epsilon": None},
    ],
    ids=str,
)
def test_every_kind_of_run_trains_on_users(
    of_users: dict[str, Any], changes: dict[str, Any]
) -> None:
    values = {k: v for k, v in (of_users | changes).items() if v is not None}
    prepared, outcome, _ = train(values)
    assert outcome.result["steps"] == 6 and prepared.sampler.users is not None
    assert all(p.isfinite().all() for p in prepared.model.classifier.parameters())


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    of_users: dict[str, Any], tmp_path: Path
) -> None:
    values = of_users | {"users.choice": "fresh"}
    whole, _, _ = train(values)
    again = values | {"training.run_dir": str(tmp_path / "stopped")}
    train(again, report=interrupt_at(2))
    resumed, outcome, _ = train(again, resume=True)
    assert outcome.made == 4
    ends = zip(
        whole.model.classifier.parameters(), resumed.model.classifier.parameters(), strict=True
    )
    assert all(torch.equal(one, two) for one, two in ends)


def test_micro_batches_hold_whole_users(of_users: dict[str, Any]) -> None:
    values = of_users | {"performance.max_physical_batch_size": 4}
    prepared = prepare(config_of(values))
    indices = prepared.sampler.batch(RandomKey.from_seed(1), 0)
    parts = list(prepared.micro_batches(indices, None))
    assert len(parts) > 1 and all(isinstance(part, UserBatch) for part in parts)
    assert [n for part in parts for n in part.sizes] == list(indices.sizes)  # type: ignore[union-attr]
    for part in parts:
        assert len(part.sizes) * max(part.sizes) <= 4 or len(part.sizes) == 1
    empty = indices.span(slice(0, 0))  # type: ignore[union-attr]
    (none,) = prepared.micro_batches(empty, None)
    assert none.sizes == () and len(none.records["labels"]) == 0


def test_answers_have_owners_too(of_users: dict[str, Any], tiny_llama: Path) -> None:
    prepared, outcome, _ = train(
        of_users
        | {
            "model.name": str(tiny_llama),
            "task.kind": "generate",
            "task.prompt": "{text} :",
            "task.answer": "{label}",
            "task.max_answer_length": 4,
        }
    )
    assert outcome.result["neighbouring"] == "add-remove-user"
    assert len(owners_of(prepared.config)[0]) == outcome.result["users"]


def test_a_table_learns_nothing_from_the_column_of_owners(
    of_users: dict[str, Any], tmp_path: Path
) -> None:
    draws = np.random.default_rng(0)
    lines = ["person,age,rich"]
    for i in range(200):
        age = int(draws.integers(20, 80))
        lines.append(f"{i % 30},{age},{'yes' if age > 50 else 'no'}")
    file = tmp_path / "people.csv"
    file.write_text("\n".join(lines) + "\n")
    changed = {"data.source": str(file), "data.user": "person", "data.label": "rich"}
    model = {"model.name": "table:linear", "model.tune": "full"}
    for of_texts in ("model.lora_rank", "model.max_length"):
        of_users.pop(of_texts)
    prepared, outcome, _ = train(of_users | changed | model)
    encoding = prepared.task.encoding  # type: ignore[attr-defined]
    assert "person" not in {**encoding.numbers, **encoding.categories}
    assert outcome.result["users"] < 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.user": "whom"}, r"data.user='whom' is not a column of data.source.*'who'"),
        ({"data.user": ""}, "users: this table says how users are protected.*data.user"),
        ({"users.records_per_user": 0}, "users.records_per_user=0"),
        ({"users.choice": "first"}, "users.choice='first'"),
    ],
)
def test_bad_settings_are_refused(
    of_users: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(config_of(of_users | changes))


def test_a_record_of_nobody_is_refused(of_users: dict[str, Any], owned_file: Path) -> None:
    owned_file.write_text(owned_file.read_text() + '"a secret text",good,\n')
    with pytest.raises(
        ValueError, match=r"data.user='who'.* has no owner for some record"
    ) as found:
        load_task(config_of(of_users))
    assert "secret" not in str(found.value) and "201" not in str(found.value)
    assert f"`quietgrad check {owned_file} --user who` lists them" in str(found.value)


def test_a_column_that_tells_nobody_apart_is_refused(
    of_users: dict[str, Any], owned_file: Path
) -> None:
    test = owned_file.with_name("test.csv")
    test.write_text("text,label,who\nlovely,good,one\nawful,bad,two\n")
    names = iter(["a", "b"] * 200)  # two people: one validates, one trains
    lines = owned_file.read_text().splitlines()
    made = [lines[0], *(line.rpartition(",")[0] + "," + next(names) for line in lines[1:])]
    owned_file.write_text("\n".join(made) + "\n")
    values = of_users | {"data.test_source": str(test), "data.validation_fraction": 0.5}
    with pytest.raises(ValueError, match=r"fewer than two users|too few for a") as refused:
        prepare(config_of(values))
    assert "record_owner" not in str(refused.value)


def test_images_have_no_column_of_owners(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"data.user='who' is for texts, answers and tables"):
        load_task(config_of(values | {"model.name": "cnn:groupnorm", "data.user": "who"}))


@pytest.mark.parametrize("kind", ["gradient", "input"])
def test_an_audit_puts_in_users(kind: str, of_users: dict[str, Any]) -> None:
    from quietgrad.training.audited_run import audited_run

    config = config_of(of_users | {"model.tune": "head", "training.steps": 3})
    found = audited_run(config, 8, kind, 1 - 1e-7)
    users = found.plan.sampler.users
    assert users is not None and not found.report.refuted
    assert "user" in found.report.neighbouring and "per user" in found.report.verdict
    assert found.records == len(owners_of(config)[0]) == found.plan.dataset_size - 8
    had = users.offsets[1:] - users.offsets[:-1]
    assert had[-8:].tolist() == [4] * 8 and users.sizes[-8:].tolist() == [3] * 8  # the cap bites


def test_a_resume_with_another_cap_is_refused(
    quietgrad: Any, write_config: Any, of_users: dict[str, Any]
) -> None:
    path = write_config(of_users)
    assert quietgrad("train", path)[0] == 0
    code, _, err = quietgrad("train", path, "--resume", "--set", "users.records_per_user=4")
    assert code != 0 and "changed privacy setting" in re.sub(r"\s+", " ", err)


def test_users_are_compared(quietgrad: Any, owned_file: Path, tiny_bert: Path) -> None:
    file = owned_file.with_name("comparison.toml")
    file.write_text(
        f"""
[comparison]
epsilons = [4.0]
seeds = 1
tuning_seeds = 1
learning_rates = [1e-2, 2e-2]
protocol_rate = 1e-2
head_rate = 2.0
eval_every = 2
title = "users"
[variants.baseline]
[variants.sum]
users.combined = "sum"
users.records_per_user = 2
[model]
name = {json.dumps(str(tiny_bert))}
lora_rank = 2
max_length = 16
[data]
public = true
source = {json.dumps(str(owned_file))}
user = "who"
validation_fraction = 0.2
test_fraction = 0.2
[training]
expected_batch_size = 8
steps = 3
precision = "float32"
"""
    )
    code, out, err = quietgrad("compare", file, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["missing_runs"] == 0 and "per user" in report["guarantee"]
    assert "per user" in err + out
