"""The loss of each record: what Hugging Face's model says of that record alone, and nothing of who
else is in the batch.
"""

from __future__ import annotations

import copy
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import AdaLoraConfig, get_peft_model
from private_trainers import arguments, bert_loss, classifier, records, trainer
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateSeq2SeqTrainer
from quietgrad.integrations.transformers.losses import RecordLoss, record_loss_of

pytestmark = pytest.mark.usefixtures("examined_once")

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = hf.BertConfig(vocab_size=50, intermediate_size=16, **SIZES)
LLAMA = hf.LlamaConfig(vocab_size=50, intermediate_size=16, **SIZES)
T5 = hf.T5Config(
    vocab_size=50,
    d_model=16,
    d_kv=8,
    d_ff=16,
    num_layers=1,
    num_heads=2,
    decoder_start_token_id=0,
    dropout_rate=0.0,
)
LENGTHS = (9, 4, 6, 2)  # of records in one batch
B, LONGEST = len(LENGTHS), max(LENGTHS)


def words() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(3)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "input_ids": torch.randint(1, 50, (B, LONGEST), generator=draws) * mask,
        "attention_mask": mask,
    }


def learnt(some: bool = True) -> Tensor:
    """A label at every word, or at some of them."""
    batch = words()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    if some:
        labels[0, :5] = -100
    return labels


CASES: dict[str, tuple[Any, Any, dict[str, Tensor]]] = {
    "causal": (hf.LlamaForCausalLM, LLAMA, {"labels": learnt()}),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2), {}),
    "masked": (hf.BertForMaskedLM, BERT, {"labels": learnt()}),
    "tokens": (hf.BertForTokenClassification, BERT, {"labels": learnt().clamp_max(1)}),
    "classes": (hf.BertForSequenceClassification, BERT, {"labels": torch.tensor([0, 1, 1, 0])}),
    "number": (
        hf.BertForSequenceClassification,
        hf.BertConfig(vocab_size=50, intermediate_size=16, num_labels=1, **SIZES),
        {"labels": torch.tensor([0.5, -1.0, 2.0, 0.1])},
    ),
    "several labels": (
        hf.BertForSequenceClassification,
        BERT,
        {"labels": torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])},
    ),
    "question": (
        hf.BertForQuestionAnswering,
        BERT,
        {
            "start_positions": torch.tensor([1, 0, 7, 99]),
            "end_positions": torch.tensor([3, 1, 7, 99]),  # the third beyond its text,
        },
    ),
    "answer": (hf.T5ForConditionalGeneration, T5, {"labels": learnt()}),
}


def model_and_batch(name: str) -> tuple[Any, dict[str, Tensor], tuple[str, ...]]:
    kind, config, labels = CASES[name]
    torch.manual_seed(5)
    labels = labels or {"labels": learnt()}
    # A config of its own: the model writes down there what kind of labels it met.
    return kind(copy.deepcopy(config)).eval(), words() | labels, tuple(labels)


def alone(batch: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """One record, without the padding that the others asked for."""
    cut = {name: value[i : i + 1] for name, value in batch.items()}
    return {
        name: value[:, : LENGTHS[i]] if value.dim() == 2 and value.shape[1] == LONGEST else value
        for name, value in cut.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_records_loss_is_the_models_own_of_that_record_alone(name: str) -> None:
    model, batch, labels = model_and_batch(name)
    losses = record_loss_of(model, labels, 0.0)(model, batch)
    assert losses.shape == (B,)
    for i, loss in enumerate(losses):
        # Positions beyond the text have no answer, and the model's mean over none is no number.
        expected = model(**alone(batch, i)).loss.nan_to_num()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_who_else_is_in_the_batch_changes_nothing(name: str) -> None:
    model, batch, labels = model_and_batch(name)
    loss = record_loss_of(model, labels, 0.0)
    others = {key: value.flip(0) for key, value in batch.items()}
    torch.testing.assert_close(loss(model, batch), loss(model, others).flip(0))
    # Without the first record, of which the most is learnt.
    fewer = {key: value[1:] for key, value in batch.items()}
    torch.testing.assert_close(loss(model, batch)[1:], loss(model, fewer))


def test_the_models_own_loss_would_not_do() -> None:
    model, batch, _ = model_and_batch("causal")
    whole = model(**batch).loss
    own = record_loss_of(model, ("labels",), 0.0)(model, batch)
    assert not torch.allclose(whole, own.mean(), rtol=1e-4)  # weighted by the others' lengths


@pytest.mark.parametrize("name", ["causal", "masked", "classes"])
def test_smoothing_is_trainers_for_one_record(name: str) -> None:
    model, batch, labels = model_and_batch(name)
    losses = record_loss_of(model, labels, 0.1)(model, batch)
    for i, loss in enumerate(losses):
        record = alone(batch, i)
        wanted = record.pop("labels")
        smoother = LabelSmoother(0.1)
        expected = smoother(model(**record), wanted, shift_labels=name == "causal")
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    model, _, labels = model_and_batch("classes")
    with pytest.raises(ValueError, match="is a share of the target"):
        record_loss_of(model, labels, share)


def test_a_record_without_a_learnt_token_contributes_zero() -> None:
    model, batch, labels = model_and_batch("causal")
    batch["labels"][2] = -100
    losses = record_loss_of(model, labels, 0.0)(model, batch)
    assert losses[2] == 0
    losses[2].backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("case", ["causal", "classes"])
def test_a_label_that_the_model_does_not_know_is_not_told(case: str) -> None:
    """torch's error is the number itself: of one private record."""
    model, batch, labels = model_and_batch(case)
    batch["labels"][2] = 8765
    with pytest.raises(ValueError, match=r"a label is none of the model's .*num_labels=") as found:
        record_loss_of(model, labels, 0.0)(model, batch)
    assert "8765" not in "".join(traceback.format_exception(found.value))


def test_choices_are_records_with_several_rows() -> None:
    torch.manual_seed(5)
    model = hf.BertForMultipleChoice(BERT).eval()
    batch = {name: torch.stack([v, v.flip(0)], 1) for name, v in words().items()}
    batch["labels"] = torch.tensor([0, 1, 1, 0])
    losses = record_loss_of(model, ("labels",), 0.0)(model, batch)
    for i, loss in enumerate(losses):
        expected = model(**{name: value[i : i + 1] for name, value in batch.items()}).loss
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("kind", [hf.BertForPreTraining, hf.BertForNextSentencePrediction])
def test_heads_without_a_loss_of_each_record_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__}.*per_example_loss"):
        record_loss_of(kind(BERT), ("labels",), 0.0)


def test_missing_labels_are_named() -> None:
    model = classifier()
    loss = record_loss_of(model, ("labels",), 0.0)
    assert isinstance(loss, RecordLoss)
    with pytest.raises(ValueError, match=r"no 'labels'.*data_collator"):
        loss(model, {"input_ids": records(1)[0]["input_ids"][None]})


def test_smoothing_of_no_classes_is_refused() -> None:
    for name in ("number", "question"):
        model, _, labels = model_and_batch(name)
        with pytest.raises(ValueError, match=f"no meaning for {type(model).__name__}"):
            record_loss_of(model, labels, 0.1)
    model, batch, labels = model_and_batch("several labels")  # told from the labels
    with pytest.raises(ValueError, match="smooths classes, and these labels are multi_label"):
        record_loss_of(model, labels, 0.1)(model, batch)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_sequence_to_sequence_model_trains_and_writes(dropout: float, tmp_path: Path) -> None:
    """T5's attention holds a table of its own, and draws at random where it has dropout."""
    config = copy.deepcopy(T5)
    config.dropout_rate = dropout
    model: nn.Module = hf.T5ForConditionalGeneration(config)
    pairs = [{"input_ids": [5, 6, 7 + i % 9], "labels": [4 + i % 9, 1]} for i in range(60)]
    settings = vars(arguments(tmp_path))
    names = ("output_dir", "use_cpu", "save_strategy", "disable_tqdm", "optim")
    trained = PrivateSeq2SeqTrainer(
        model=model,
        args=hf.Seq2SeqTrainingArguments(
            **{name: settings[name] for name in names},
            report_to=[],
            predict_with_generate=True,
            generation_max_length=4,
        ),
        data_collator=hf.default_data_collator,
        train_dataset=pairs,
        privacy=PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, steps=2),
    )
    trained.train()
    found = trained.predict([{"input_ids": [5, 6, 9], "labels": [9, 1]}] * 3).predictions
    assert found.shape[0] == 3  # padded to the model's own longest
    assert trained.epsilon() == trained.plan.epsilon


def adapted(weight: float) -> Any:
    config = AdaLoraConfig(
        target_modules=["query"], total_step=100, tinit=1, tfinal=1, orth_reg_weight=weight
    )
    return get_peft_model(classifier(), config)


def test_what_adapters_add_to_a_batchs_loss_is_not_left_out_unsaid(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"AdaLoraConfig\(orth_reg_weight=0.5\).*set orth_reg_wei"):
        trainer(tmp_path / "run", model=adapted(0.5))
    assert not (tmp_path / "run").exists()
    trainer(tmp_path / "run", model=adapted(0.0))
    trainer(tmp_path / "run", model=adapted(0.5), per_example_loss=bert_loss)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification", None])
def test_labels_of_another_kind_than_the_models_are_told_how_to_be(
    problem: str | None, tmp_path: Path
) -> None:
    model: Any = classifier()
    model.config.problem_type = problem
    data = [one | {"labels": float(one["labels"])} for one in records()]
    with pytest.raises(ValueError, match=r"num_labels=2 and labels of type float.*whole numbers"):
        trainer(tmp_path / "run", model=model, train_dataset=data).train()
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_labels_that_are_words_are_said_to_be_left_out(tmp_path: Path) -> None:
    """Before: "the records have no 'labels'", which they had."""
    data = [one | {"labels": "good"} for one in records()]
    with pytest.raises(ValueError, match=r"no 'labels' after data_collator.*words.*number them"):
        trainer(tmp_path / "run", train_dataset=data).train()
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_a_token_beyond_the_vocabulary_names_the_layer(tmp_path: Path) -> None:
    data = [one | {"input_ids": [9117, *one["input_ids"][1:]]} for one in records()]
    with pytest.raises(ValueError, match=r"word_embeddings' has \d+ rows.*tokenizer") as caught:
        trainer(tmp_path / "run", train_dataset=data).train()
    assert "9117" not in "".join(traceback.format_exception(caught.value))
