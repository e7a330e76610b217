"""Collators and padding by which one record would change what another one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from private_trainers import PRIVACY, bert_loss, classifier, records, tokenizer, trainer
from processes import on_processes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from quietgrad.clipping.bound import BoundClipper
from quietgrad.integrations.transformers.collating import Looking

together = hf.default_data_collator


def mixed_up(rows: list[Any]) -> dict[str, Any]:
    """CutMix's kind, at random: words of another record."""
    batch = together(rows)
    others = batch["input_ids"][torch.randperm(len(rows))]
    batch["input_ids"] = torch.where(torch.rand(8) < 0.5, batch["input_ids"], others)
    return batch


def in_order(rows: list[Any]) -> dict[str, Any]:
    return together(sorted(rows, key=lambda row: int(row["input_ids"][0])))


def smoothed(rows: list[Any]) -> dict[str, Any]:
    batch = together(rows)
    return batch | {"labels": batch["labels"].float() * 0 + batch["labels"].float().mean()}


def in_one_row(rows: list[Any]) -> dict[str, Any]:
    return {name: t.flatten()[None] for name, t in together(rows).items()}


def padded(rows: list[Any], mask: bool = True, left: bool = False) -> dict[str, Any]:
    lengths = torch.tensor([1 + int(row["input_ids"][0]) % 8 for row in rows])
    side = "left" if left else "right"
    words = [row["input_ids"][:n] for row, n in zip(rows, lengths, strict=True)]
    ids = pad_sequence(words, batch_first=True, padding_side=side)
    batch = {"input_ids": ids, "labels": torch.tensor([row["labels"] for row in rows])}
    return batch | ({"attention_mask": (ids != 0).long()} if mask else {})


def left_padded(rows: list[Any]) -> dict[str, Any]:
    return padded(rows, left=True)


def unmasked(rows: list[Any]) -> dict[str, Any]:
    return padded(rows, mask=False)


@pytest.mark.parametrize("public", [True, False], ids=["on public records", "on training ones"])
@pytest.mark.parametrize(
    ("collate", "why"),
    [
        (mixed_up, "depends on the records beside it.*input_ids"),
        (in_order, "depends on the records beside it.*input_ids"),
        (smoothed, "depends on the records beside it.*labels"),
        (in_one_row, "depends on the records beside it.*one row"),
        (left_padded, "depends on the records beside it.*padding_side"),
        (unmasked, "does not mask its padding.*attention_mask"),
    ],
)
def test_a_record_that_depends_on_those_beside_it_is_refused(
    collate: Any, why: str, public: bool, tmp_path: Path
) -> None:
    seen = {"eval_dataset": records(20, seed=1)} if public else {}
    model = classifier()
    with torch.no_grad():
        for weight in model.bert.encoder.parameters():
            weight.mul_(8.0)  # as large as trained ones: fresh ones hardly look at other words
    trained = trainer(tmp_path, model=model, data_collator=collate, **seen)
    with pytest.raises(ValueError, match=why):
        trained.train()
    assert trained.epsilon() == 0.0
    assert not (tmp_path / "ledger.jsonl").exists()


def compared(model: Any, batch: Any) -> torch.Tensor:
    """Every record's loss has the batch's mean in it."""
    losses = bert_loss(model, batch)
    return losses - losses.mean()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}], ids=["same", "changed"])
def test_what_is_refused_has_begun_no_run(changes: dict[str, Any], tmp_path: Path) -> None:
    """So the same directory is trained into once the loss is right. A model that Trainer changes
    before it trains is looked at once more; any other is not.
    """
    told = {"eval_dataset": records(20, seed=1), **changes}
    wrong = trainer(tmp_path, per_example_loss=compared, **told)
    with pytest.raises(ValueError, match="depends on"):
        wrong.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == []
    right = trainer(tmp_path, per_example_loss=bert_loss, **told)
    own = BoundClipper.check
    with mock.patch.object(BoundClipper, "check", autospec=True, side_effect=own) as look:
        right.train()
    assert look.call_count == 1 + len(changes)
    (bound,) = right._run.bindings._bound
    assert bound._guard.public is not None  # later looks are at these, too


@pytest.mark.distributed
def test_what_is_refused_has_begun_no_run_on_two_processes(tmp_path: Path) -> None:
    def run() -> None:
        told = {"eval_dataset": records(20, seed=1), "ddp_find_unused_parameters": False}
        trainer(tmp_path / "run", per_example_loss=compared, **told).train()

    for found in on_processes(2, tmp_path / "both", run):
        assert "depends on" in found
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_masked_padding_trains(tmp_path: Path) -> None:
    assert trainer(tmp_path, data_collator=padded).train().global_step == 10


def test_numbers_of_two_types_are_refused(tmp_path: Path) -> None:
    """The collator takes the type of the first record for all, and 2.5 is then 2."""
    data = [{"input_ids": [5, 6 + i % 9], "label": 3 if i % 2 else 2.5} for i in range(100)]
    model = classifier()
    model.config.num_labels, model.config.problem_type = 1, "regression"
    model.num_labels, model.classifier = 1, torch.nn.Linear(16, 1)
    trained = trainer(tmp_path, model=model, train_dataset=data, data_collator=together)
    with pytest.raises(ValueError, match="numbers of one type"):
        trained.train()


def unlabelled() -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "labels"} for record in records()]


def masked_words() -> hf.BertForMaskedLM:
    torch.manual_seed(7)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=50, intermediate_size=16, **small))


@pytest.mark.parametrize("workers", [0, 1])
def test_masks_do_not_follow_from_a_known_seed(workers: int, tmp_path: Path) -> None:
    """``args.seed`` seeds the workers of Trainer's loaders."""
    words = tokenizer()
    words.mask_token = "<unk>"
    collate = hf.DataCollatorForLanguageModeling(words)
    own = {"train_dataset": unlabelled(), "privacy": PRIVACY, "dataloader_num_workers": workers}
    trained = trainer(tmp_path, model=masked_words(), data_collator=collate, **own)
    with trained.plan.start() as run:
        trained._session.run = run
        read: Any = trained._loader_of(1)._reader
        assert read.generator.initial_seed() == run._read_seed() != trained.args.seed
    assert trained.train().global_step == 10


def test_masks_of_a_seed_of_ones_own_are_refused(tmp_path: Path) -> None:
    words = tokenizer()
    words.mask_token = "<unk>"
    collate = hf.DataCollatorForLanguageModeling(words, seed=3)
    with pytest.raises(ValueError, match=r"data_collator.seed.*leave seed out"):
        trainer(tmp_path, model=masked_words(), data_collator=collate, train_dataset=unlabelled())


def test_a_look_leaves_no_trace() -> None:
    model, rows = classifier(), records(8)
    model.bert.eval()
    state = torch.get_rng_state()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        assert not model.training
        return model(**batch).logits[:, 0]

    looking = Looking(model, padded, rows, seed=5)
    assert not looking.refuse_mixing()
    looking.refuse_padding(loss, 1e-4)
    assert model.training and not model.bert.training
    assert torch.equal(state, torch.get_rng_state())
