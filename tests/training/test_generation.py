"""Answers learnt by a causal language model: templates, tokens, loss, training, what is saved,
scores, refusals.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    RECORDS,
    VOCABULARY,
    config_of,
    labelled_texts,
    train,
    write_records,
)

from quietgrad.cli.progress.training import ending
from quietgrad.training.prepare import prepare, verify_on_public_records
from quietgrad.training.tasks import columns
from quietgrad.training.tasks.answers.generation import (
    answer_loss,
    answer_scores,
    exact_match,
    rouge1,
    rouge_l,
)
from quietgrad.training.tasks.answers.pairs import TextPairs, load_pairs, tokenise_pairs
from quietgrad.training.tasks.splits import IGNORED, normalised
from quietgrad.training.tasks.text.data import load_texts
from quietgrad.training.tasks.text.models import CausalLanguageModel
from quietgrad.training.tasks.text.saved import load_saved


@pytest.fixture
def values(settings: dict[str, Any], tiny_llama: Path) -> dict[str, Any]:
    return settings | {
        "model.name": str(tiny_llama),
        "task.kind": "generate",
        "task.prompt": "{text} :",
        "task.answer": "{label}",
        "task.max_answer_length": 4,
    }


def test_templates_take_any_columns(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(
        '{"context": "rain fell", "question": "what fell?", "answer": "rain", "n": null}\n'
    )
    pairs = load_pairs(str(file), "{context}\n{question}{n} {{}}", " {answer}")
    assert pairs.texts == ("rain fell\nwhat fell? {}",) and pairs.answers == (" rain",)
    assert len(set(TextPairs(("a", "a"), ("b", "c"), "here").record_ids)) == 2


def test_tokens_of_prompt_and_answer(tiny_llama: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    pairs = TextPairs(("the film was dull :", "a :"), ("good bad good bad", "bad"), "here")
    found = tokenise_pairs(pairs, tokenizer, max_length=6, max_answer_length=3)
    # The answer is cut and closed; the prompt keeps what opens every text, and its end.
    assert [VOCABULARY[i] for i in found.ids[0]] == ["<s>", "dull", ":", "good", "bad", "</s>"]
    assert [VOCABULARY[i] for i in found.ids[1]] == ["<s>", "a", ":", "bad", "</s>"]
    assert found.starts.tolist() == [3, 3] and found.labels.tolist() == [3, 2]
    batch = found.collate(np.array([1, 0]), torch.device("cpu"))
    assert batch["labels"].tolist() == [
        [IGNORED] * 3 + [ids["bad"], ids["</s>"], IGNORED],
        [IGNORED] * 3 + [ids["good"], ids["bad"], ids["</s>"]],
    ]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0], [1] * 6]
    assert found.collate(np.array([], dtype=np.int64), torch.device("cpu"))["labels"].shape == (
        0,
        2,
    )


def test_the_loss_is_the_mean_over_the_answers_own_tokens(values: dict[str, Any]) -> None:
    prepared = prepare(config_of(values | {"model.tune": "full"}))
    model, records = prepared.model.classifier.eval(), prepared.train
    batch = records.collate(np.arange(5), prepared.device)
    found = answer_loss(model, batch)
    for row in range(5):
        length = int(batch["attention_mask"][row].sum())
        tokens = batch["input_ids"][row, :length]  # without padding
        logits = model(tokens[None], torch.ones_like(tokens)[None])[0]
        start = int((batch["labels"][row] == IGNORED)[:length].sum())
        wanted = F.cross_entropy(logits[start - 1 : length - 1], tokens[start:])
        assert torch.allclose(found[row], wanted, atol=1e-5)
    scores = answer_scores(model, records, 7, prepared.device, np.arange(5))
    together = answer_scores(model, records, 2, prepared.device, np.arange(5))
    assert scores.perplexity == pytest.approx(together.perplexity)
    assert scores.token_accuracy == together.token_accuracy
    # Two tokens each: the mean over records is the mean over tokens.
    assert scores.perplexity == pytest.approx(found.mean().exp().item(), rel=1e-5)


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_per_example_gradients_agree_with_the_oracle(values: dict[str, Any], tune: str) -> None:
    assert verify_on_public_records(prepare(config_of(values | {"model.tune": tune}))) < 1e-5


def test_without_privacy_the_answers_are_learnt(values: dict[str, Any]) -> None:
    _, outcome, _ = train(
        values
        | {
            "model.tune": "full", "privacy.enabled": False, "training.steps": 150,
            "training.seed": 0,
            "task.decoded": "exact_match", "optimizer.learning_rate": 1e-2,
        }
    )  # fmt: skip
    metrics = outcome.result["metrics"]
    assert metrics["token_accuracy"] > 0.9 and metrics["exact_match"] > 0.8
    assert 1 <= metrics["perplexity"] < 1.6 < len(VOCABULARY)
    assert (
        "majority_accuracy" not in outcome.result and outcome.result["metric"] == "token_accuracy"
    )


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_train_saves_a_model_that_loads(values, quietgrad, write_config, tune: str) -> None:
    changed = values | {"model.tune": tune, "task.decoded": "rouge1", "task.decoded_records": 3}
    code, out, err = quietgrad("train", write_config(changed), "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result["metrics"]) == {
        "token_accuracy", "perplexity", "validation_token_accuracy", "validation_perplexity",
        "rouge1",
    }  # fmt: skip
    assert result["private"] and 0 < result["epsilon"] <= 4
    folder = Path(result["run_dir"])
    assert (folder / "accuracy.png").is_file()
    curve = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in curve] == [3, 6] and all(
        "validation_token_accuracy" in r for r in curve
    )

    model, tokenizer, _ = load_saved(folder / "model")
    again = prepare(config_of(changed))
    scores = answer_scores(model, again.test, 8, torch.device("cpu"))
    assert scores.perplexity == pytest.approx(result["metrics"]["perplexity"], rel=1e-4)
    assert tokenizer("the film")["input_ids"][0] == 1


def test_who_waits_for_written_answers_hears_of_them(values: dict[str, Any]) -> None:
    """Minutes of "scoring and saving the model" looked like a saving that hangs."""
    for decoded, most, said in (
        ("none", 3, "scoring and saving the model"),
        ("rougeL", 3, "scoring by up to 3 answers that the model writes, and saving it"),
        ("rougeL", 200, "answers that the model writes"),
    ):
        changed = {"task.decoded": decoded, "task.decoded_records": most}
        prepared = prepare(config_of(values | changed))
        assert said in ending(prepared) and "200" not in ending(prepared)


def test_plan_and_words_for_people(values, quietgrad, write_config) -> None:
    config = write_config(values)
    code, out, err = quietgrad("plan", config)
    assert code == 0 and "guarantee" in out, err
    assert "less than 1 MiB" in " ".join(out.split()) and " 0 MiB" not in out
    code, out, err = quietgrad("train", config)
    words = " ".join(out.replace("│", " ").split())
    assert code == 0 and "test token accuracy" in words and "validation perplexity" in words, err


def test_test_records_of_their_own(settings: dict[str, Any], tmp_path: Path) -> None:
    records = labelled_texts()
    shared = [
        (text.upper() + "!", label) for text, label in records[:7]
    ]  # the same texts, written otherwise
    other = write_records(tmp_path / "test.csv", [*shared, ("the plot was quite superb", "good")])
    prepared = prepare(
        config_of(settings | {"data.test_source": str(other), "data.validation_fraction": 0.3})
    )
    task = prepared.task.splits
    assert len(task.test) == 8 and len(task.train) + len(task.validation) <= RECORDS - 7
    held = {normalised(text) for text in task.test.texts}
    assert not held & {normalised(t) for part in (task.train, task.validation) for t in part.texts}
    assert task.test.label_names == ("bad", "good")
    one_class = write_records(tmp_path / "one.csv", [("the actor was superb", "good")])
    small = prepare(config_of(settings | {"data.test_source": str(one_class)})).task.splits.test
    assert small.labels.tolist() == [1]  # numbered as in training


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task.prompt": "{txt} :"}, r"'txt' is not a column of .*did you mean 'text'"),
        ({"task.prompt": "no column"}, "names no column"),
        ({"task.answer": "{label"}, "is no template"),
        ({"task.max_answer_length": 16}, "leaves no room"),
        ({"task.max_answer_length": 0}, "task.max_answer_length=0"),
        ({"model.tune": "head"}, "no head to train by itself"),
        ({"model.public_head_steps": 5}, "no head to train by itself"),
        ({"model.random_head": True}, "no head to train by itself"),
        ({"task.kind": "translate"}, "task.kind='translate'"),
        ({"task.decoded": "bleu"}, "task.decoded='bleu'"),
        ({"model.name": "nowhere/nothing"}, "model.name='nowhere/nothing' is no folder here"),
    ],
)  # fmt: skip
def test_refusals(values: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(config_of(values | changed))


def test_nothing_is_learnt_from_an_empty_answer(tiny_llama: Path, tmp_path: Path) -> None:
    import transformers

    file = tmp_path / "pairs.csv"
    file.write_text("text,label\nthe film,good\na story,\n")
    pairs = load_pairs(str(file), "{text}", "{label}")
    assert pairs.answers == ("good", "")
    found = tokenise_pairs(pairs, transformers.AutoTokenizer.from_pretrained(tiny_llama), 8, 3)
    assert found.labels.tolist() == [2, 0]  # not even where it ends
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    losses = answer_loss(
        CausalLanguageModel(model), found.collate(np.arange(2), torch.device("cpu"))
    )
    assert losses[0] > 0 and losses[1] == 0


def test_scores_of_what_was_written() -> None:
    assert rouge1("the cat sat", "The cat sat down") == pytest.approx(2 * 1 * 0.75 / 1.75)
    assert rouge1("cat cat cat", "cat") == pytest.approx(0.5)
    assert rouge1("", "cat") == rouge1("dog", "cat") == 0.0
    assert rouge_l("police killed the gunman", "police kill the gunman") == pytest.approx(
        0.75
    )  # Lin 2004, section 3
    assert rouge_l("the gunman kill police", "police kill the gunman") == pytest.approx(0.5)
    assert rouge_l("", "police") == 0.0
    assert exact_match("The Eiffel Tower!", "eiffel tower") == 1.0
    assert exact_match("Eiffel", "Eiffel Tower") == 0.0


def test_pairs_of_texts(settings: dict[str, Any], tmp_path: Path) -> None:
    rows = ["first,second,label"]
    for i, (text, _) in enumerate(labelled_texts(90)):
        same = i % 2 == 0
        rows.append(f"{text},{text if same else 'quite grim'},{'same' if same else 'other'}")
    file = tmp_path / "pairs.csv"
    file.write_text("\n".join(rows) + "\n")
    changed = settings | {
        "data.source": str(file),
        "data.text": "first",
        "data.text_pair": "second",
    }
    prepared = prepare(config_of(changed))
    tokenizer, texts = prepared.model.tokenizer, prepared.task.splits.train
    assert texts.seconds is not None and len(set(texts.record_ids)) == len(texts)
    wanted = tokenizer(texts.texts[0], texts.seconds[0], truncation=True, max_length=16)[
        "input_ids"
    ]
    assert prepared.train.ids[0].tolist() == wanted and wanted.count(tokenizer.sep_token_id) == 2
    assert replace(texts, seconds=texts.texts).record_ids != texts.record_ids
    with pytest.raises(ValueError, match=r"data\.text_pair='third' is not a column"):
        prepare(config_of(changed | {"data.text_pair": "third"}))
    place = prepared.task.splits.train.texts.index(texts.texts[0])
    gap = next(row for row in rows if row.startswith(f"{texts.texts[0]},"))
    file.write_text("\n".join(rows).replace(gap, f"{texts.texts[0]},,other") + "\n")
    beside = prepare(config_of(changed)).task.splits.train
    assert beside.labels[place] == IGNORED and (beside.labels != IGNORED).sum() == len(texts) - 1


def test_a_data_set_of_the_hub_has_configurations_and_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    monkeypatch.setattr(columns, "require_data", lambda option, source: None)  # it can be reached
    asked = []

    def load_dataset(name: str, configuration: str | None, split: str) -> datasets.Dataset:
        asked.append((name, configuration, split))
        return datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in (
        "owner/name",
        "owner/name:part",
        "owner/name:part:validation",
        "owner/name::test",
    ):
        assert len(load_texts(source, "text", "label")) == 2
    assert asked == [
        ("owner/name", None, "train"),
        ("owner/name", "part", "train"),
        ("owner/name", "part", "validation"),
        ("owner/name", None, "test"),
    ]


def test_templates_take_values_as_they_stand(tmp_path: Path) -> None:
    import pandas as pd

    table = pd.DataFrame(
        {
            "q.x": ["a", "b"],
            "0": ["c", "d"],
            "n": pd.array([1, 2], dtype="float64"),
            "gap": [3.0, None],
        }
    )
    table.to_parquet(tmp_path / "t.parquet")
    source = str(tmp_path / "t.parquet")
    assert load_pairs(source, "{q.x} {0} {gap}:", "{n}").texts == ("a c 3:", "b d :")
    assert load_pairs(source, "{0}", " {n}").answers == (" 1", " 2")
    assert load_pairs(source, "{0}", "Summary: {gap}").answers == (
        "Summary: 3",
        "",
    )  # a part that lacks: no answer
    for prompt, answer, message in [
        ("{n:d}", "{n}", r"write \{n\} alone"),
        ("{n!r}", "{n}", r"write \{n\} alone"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_pairs(source, prompt, answer)


def test_dropout_is_off_wherever_it_hides(
    values: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, ffn_dim=24, num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.4, attention_dropout=0.4,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    transformers.AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "opt")
    prepared = prepare(
        config_of(values | {"model.name": str(tmp_path / "opt"), "model.tune": "full"})
    )
    model, batch = prepared.model.classifier, prepared.train.collate(np.arange(4), prepared.device)
    assert model.training and torch.equal(answer_loss(model, batch), answer_loss(model, batch))
