"""PrivateSFTTrainer: TRL's preparation and evaluation, private steps, a record a row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.logging import MultiProcessAdapter
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from private_trainers import (
    PRIVACY,
    RATE,
    StopAt,
    llama,
    pairs,
    plain_loop,
    same_weights,
    tokenizer,
)
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

pytest.importorskip("trl", reason="needs the extra trl")

from trl import SFTConfig

from quietgrad.integrations.transformers import PrivateSFTTrainer
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.usefixtures("examined_once")


def sft(folder: Path, **changes: Any) -> PrivateSFTTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": None,  # TRL's default has a name that transformers warns of
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 12,
    }
    own = {"train_dataset", "eval_dataset", "callbacks", "peft_config"}
    given = {name: changes.pop(name) for name in own & changes.keys()}
    given.setdefault("train_dataset", pairs())
    return PrivateSFTTrainer(
        model=llama(),
        args=SFTConfig(**(settings | changes)),
        processing_class=tokenizer(),
        privacy=PRIVACY,
        **given,
    )


def own_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One record after the other: the mean over its learnt tokens, 0 without any."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = []
    for scores, words in zip(logits, batch["labels"]):
        learnt = words[1:] != -100
        chosen = F.cross_entropy(scores[:-1][learnt], words[1:][learnt], reduction="sum")
        losses.append(chosen / max(1, int(learnt.sum())))
    return torch.stack(losses)


def test_a_records_loss_is_the_mean_over_its_own_learnt_tokens(tmp_path: Path) -> None:
    trained = sft(tmp_path)
    rows = [trained.train_dataset[i] for i in (0, 1, 4, 8)]
    batch = trained.data_collator(rows)
    found = trained._loss(trained.model, batch)
    torch.testing.assert_close(found, own_tokens(trained.model, batch))
    assert found[3] == 0 and (found[:3] > 0).all()  # the last is cut off before its answer
    fewer = trained.data_collator(rows[:1])
    torch.testing.assert_close(trained._loss(trained.model, fewer), found[:1])


def test_the_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    trained = sft(tmp_path)
    trained.train()
    data = [
        {name: trained.train_dataset[i][name] for name in ("input_ids", "labels")}
        for i in range(100)
    ]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        words = batch["labels"][:, 1:]
        each = F.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), words.flatten(), reduction="none"
        ).view(words.shape)
        return each.sum(1) / (words != -100).sum(1).clamp_min(1)

    expected = plain_loop(llama(), loss, data=data, collate=trained.data_collator)
    assert same_weights(trained.model, expected)
    assert trained.epsilon() == trained.plan.epsilon


def test_every_record_counts_also_one_that_is_cut_off(tmp_path: Path) -> None:
    trained = sft(tmp_path, eval_dataset=pairs(20, "b a "))
    assert len(trained.train_dataset) == trained.plan.dataset_size == 100
    cut = [row for row in trained.train_dataset["labels"] if all(word == -100 for word in row)]
    assert cut and all(len(row) <= 12 for row in trained.train_dataset["input_ids"])
    assert len(trained.eval_dataset) < 20  # TRL's own rule, for public records


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"packing": True}, "packing=True: several records in one row"),
        ({"padding_free": True, "max_length": None}, "padding_free"),
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"activation_offloading": True}, "activation_offloading"),
        ({"gradient_accumulation_steps": 2}, "expected_batch_size"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"truncation_mode": "keep_middle"}, "truncation_mode='keep_middle' is none that TRL"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_private_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        sft(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_table_that_is_joined_to_some_of_its_rows_is_refused(tmp_path: Path) -> None:
    """TRL tokenises them, and from then on each lies at a place of its own."""
    data = pairs()
    more = concatenate_datasets([data, data.select(range(5))])
    with pytest.raises(ValueError, match="one record at several numbers"):
        sft(tmp_path / "run", train_dataset=more)
    assert not (tmp_path / "run").exists()


def test_training_records_are_not_evaluated(tmp_path: Path) -> None:
    data = pairs()
    trained = sft(tmp_path, train_dataset=data)
    for private in (data, trained.train_dataset):
        with pytest.raises(ValueError, match="eval_dataset is the training data"):
            trained.evaluate(private)


def test_adapters_a_resume_and_nothing_private_in_the_logs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "save_strategy": "steps",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "eval_dataset": pairs(20, "b a "),
    }
    sft(tmp_path, callbacks=[StopAt(3)], **settings).train()
    again = sft(tmp_path, **settings)
    done = again.train(resume_from_checkpoint=True)
    assert done.global_step == 10 and done.training_loss is None
    assert read_ledger(tmp_path / "ledger.jsonl").releases == 10
    state = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    names = {name for line in state["log_history"] for name in line}
    assert "epsilon" in names and "eval_loss" in names
    assert not {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"} & names
    assert "eval_num_tokens" not in names
    assert not any("rng" in path.name for path in tmp_path.rglob("*"))


def test_activation_checkpointing_trains(tmp_path: Path) -> None:
    trained = sft(tmp_path, activation_checkpointing=True)
    trained.train()
    assert not same_weights(trained.model, llama())


def test_no_record_is_quoted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    joined = [{"prompt": "a b", "completion": "b c"}] * 40  # "a bb c": "b" alone is no word of it
    MultiProcessAdapter.warning_once.cache_clear()  # another test may have had the same words
    with caplog.at_level(logging.WARNING):
        sft(tmp_path, train_dataset=Dataset.from_list(joined))
    lines = [line.getMessage() for line in caplog.records if "prefix" in line.getMessage()]
    assert lines and all("'b'" not in line and "not shown" in line for line in lines)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_labels_are_smoothed_within_a_record(tmp_path: Path) -> None:
    """TRL smooths a batch as a whole, in which long records take weight from short ones; that is
    what its evaluation of public records says.
    """
    share = 0.2
    trained = sft(
        tmp_path,
        label_smoothing_factor=share,
        max_length=None,
        eval_dataset=pairs(10, "a f "),
        eval_strategy="no",
    )
    rows = [trained.train_dataset[i] for i in (0, 1, 4, 8)]
    together = trained._loss(trained.model, trained.data_collator(rows))
    smoother = LabelSmoother(share)
    for row, found in zip(rows, together, strict=True):
        batch = trained.data_collator([row])
        labels = batch["labels"]
        outputs = trained.model(input_ids=batch["input_ids"])
        torch.testing.assert_close(found, smoother(outputs, labels, shift_labels=True))
        torch.testing.assert_close(found, trained._loss(trained.model, batch)[0])
    assert not torch.allclose(together[0], sft(tmp_path / "plain")._loss(
        trained.model, trained.data_collator(rows))[0])  # fmt: skip
    trained.train()
    assert trained.evaluate()["eval_loss"] > 0


def test_a_data_set_without_a_column_that_can_be_read_says_so(tmp_path: Path) -> None:
    others = Dataset.from_list([{"question": "a b", "reply": "c"}] * 20)
    with pytest.raises(
        ValueError, match=r"train_dataset has the columns 'question', 'reply'.*'text'"
    ):
        sft(tmp_path, train_dataset=others)
    assert not list(tmp_path.glob("ledger*"))


def test_a_list_of_dictionaries_is_a_data_set(tmp_path: Path) -> None:
    listed, public = pairs().to_list(), pairs(20, "b a ").to_list()
    given = sft(tmp_path / "list", train_dataset=listed, eval_dataset={"public": public})
    given.train()
    wanted = sft(tmp_path / "set")
    wanted.train()
    assert same_weights(given.model, wanted.model)
    with pytest.raises(ValueError, match="eval_dataset is the training data"):
        sft(tmp_path / "same", train_dataset=listed, eval_dataset=listed)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ([], "train_dataset is a list without records.*datasets.Dataset"),
        (["a b"], "or of other things than dictionaries"),
        ([{"text": "secret"}, {"text": 3}], "train_dataset.*a column holds values of different"),
        # Before: the first record's keys were those of all, who lost theirs.
        ([{"text": "a"}, {"text": "b", "secret": "c"}], "train_dataset.*with different keys"),
    ],
)
def test_lists_that_make_no_table(tmp_path: Path, listed: list[Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said) as refused:
        sft(tmp_path, train_dataset=listed)
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_contradicted_plan_leaves_no_folder(tmp_path: Path) -> None:
    """Refused once transformers has made it."""
    with pytest.raises(ValueError, match="max_steps=7"):
        sft(tmp_path / "run", max_steps=7)
    assert not (tmp_path / "run").exists()
