"""A small classifier and a small language model, records for them, the Trainer with private steps,
and the loop of docs/loops.md that it has to be equal to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateTrainer

RATE = 1e-2
STEPS = 10  # two epochs of five
PRIVACY = PrivacyConfig(
    target_epsilon=3.0, expected_batch_size=20, epochs=2, seed=1, data_are_public=True
)


def records(n: int = 100, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of eight words, two classes."""
    draws = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(5, 50, (8,), generator=draws),
            "attention_mask": torch.ones(8, dtype=torch.long),
            "labels": int(torch.randint(0, 2, (), generator=draws)),
        }
        for _ in range(n)
    ]


def classifier(dropout: float = 0.1) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(7)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


WORDS = ["<pad>", "<eos>", "<unk>", *"abcdef"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama() -> Any:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def pairs(n: int = 100, words: str = "a b ") -> Dataset:
    """Prompts of two to eighteen words, answers of one to three."""
    answers = ("c", "c d", "c d e")
    return Dataset.from_list(
        [{"prompt": words * (1 + i % 9), "completion": answers[i % 3]} for i in range(n)]
    )


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Small and quiet; AdamW as in the plain loop."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(**(settings | changes))


def trainer(folder: Path, **changes: Any) -> PrivateTrainer:
    """Arguments of ``PrivateTrainer`` by their names, all others are ``TrainingArguments``'."""
    own = {"model", "privacy", "train_dataset", "eval_dataset", "callbacks", "per_example_loss"}
    own |= {
        "data_collator",
        "processing_class",
        "compute_loss_func",
        "model_init",
        "kind",
        "accept_start",
        "record_owner",
    }
    given: dict[str, Any] = {"train_dataset": records(), "privacy": PRIVACY}
    given |= {name: changes.pop(name) for name in own & changes.keys()}
    if "model_init" not in given:
        given.setdefault("model", classifier())
    kind = given.pop("kind", PrivateTrainer)
    return kind(args=arguments(folder, **changes), **given)


def bert_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits.float(), batch["labels"], reduction="none")


def plain_loop(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor] = bert_loss,
    physical: int = 8,
    workers: int = 0,
    bf16: bool = False,
    data: list[dict[str, Any]] | None = None,
    collate: Callable[[list[Any]], Any] = default_data_collator,
) -> nn.Module:
    """The first loop of docs/loops.md, with generators keyed for dropout."""
    data = records() if data is None else data
    plan = PRIVACY.build(len(data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = get_scheduler("linear", optimizer, 0, plan.steps)

    def in_precision(model: nn.Module, batch: Any) -> Tensor:
        narrow = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()
        with narrow:
            return loss(model, batch)

    model.train()
    with plan.start() as run:
        loader = run.loader(
            data, physical_batch_size=physical, collate_fn=collate, num_workers=workers
        )
        for _ in run.epochs():
            for batch in loader:
                run.backward(model, in_precision, batch)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return model


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ones, others = one.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(torch.equal(ones[k], others[k]) for k in ones)


class StopAt(TrainerCallback):
    """Ends training after a step, in good order or as a crash would."""

    def __init__(self, step: int, crash: bool = False) -> None:
        self.step, self.crash = step, crash

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.step:
            if self.crash:
                raise KeyboardInterrupt
            control.should_training_stop = control.should_save = True
        return control
