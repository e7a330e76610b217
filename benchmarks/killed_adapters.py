"""PEFT's LoRA as ``sharded_kills.py`` trains it: the model and its records, and PrivateTrainer with
accelerate's FSDP plugin.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad.durable import whole_lines
from quietgrad.ledger import holds_records

if TYPE_CHECKING:
    from quietgrad import PrivacyConfig
    from quietgrad.distributed.together import Together

WORDS, LENGTH, RATE = 12, 6, 0.01
Ended = tuple[nn.Module, torch.optim.Optimizer, Tensor]


def adapted() -> nn.Module:
    """The same weights at every call."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
    words = {"vocab_size": WORDS, "tie_word_embeddings": False}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **words))
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model: nn.Module = get_peft_model(llama, lora)
    return model.double().train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Layers that are sharded by themselves; none of what is no language model."""
    lists = [m for m in model.modules() if type(m) is nn.ModuleList]
    return list(lists[0]) if lists else []


def texts(count: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(4)
    drawn = [torch.randint(0, WORDS, (LENGTH,), generator=source) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def next_words(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(dim=1)


# ---- PrivateTrainer ----


def saving() -> tuple[Any, str, str]:
    from quietgrad.integrations.transformers import PrivateTrainer

    return PrivateTrainer, "_save_checkpoint", "save"


def trainer_of(folder: Path, config: PrivacyConfig, save_every: int, **more: Any) -> Any:
    from transformers import PrinterCallback, TrainingArguments, default_data_collator

    from quietgrad.integrations.transformers import PrivateTrainer

    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        learning_rate=RATE,
        optim="adamw_torch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps" if save_every else "no",
        save_steps=save_every or 1,
        **more,
    )
    made = PrivateTrainer(
        model=adapted(),
        args=args,
        data_collator=default_data_collator,
        train_dataset=texts(60),
        privacy=config,
    )
    made.remove_callback(PrinterCallback)  # the result alone is printed
    return made


def train(folder: Path, config: PrivacyConfig, save_every: int, together: Together) -> Ended:
    """Goes on from the ledger, where there is one, and the newest whole checkpoint."""
    from transformers import TrainerCallback

    class Note(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            resumed = done._session.resumed
            told = {"from": 0 if resumed is None else resumed.releases, "to": state.global_step}
            if together.first:
                with open(folder / "resumed.jsonl", "a", encoding="utf-8") as file:
                    file.write(json.dumps(told) + "\n")

    plugin = {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
    done = trainer_of(folder, config, save_every, fsdp=True, fsdp_config=plugin)
    done.add_callback(Note())
    # Of the first process, before any begins the ledger.
    resume = together.of_first(holds_records(folder / "ledger.jsonl"))
    done.train(resume_from_checkpoint=resume)
    noted = whole_lines(folder / "resumed.jsonl")
    return done.model, done.optimizer, applied_in(noted, done.plan.steps)


def applied_in(starts: list[dict[str, int]], steps: int) -> Tensor:
    """By release, whether the end has it: a start has what the checkpoint has that it went on from,
    and what it makes itself, from the ledger's next release on.

    Args:
        starts: in their order; releases of the checkpoint, and of the ledger.
        steps: releases planned.
    """
    applied, until = torch.zeros(steps, dtype=torch.bool), steps
    for i, start in enumerate(reversed(starts)):
        if start["to"] < until or not i:  # else it made nothing of what the next one went on from
            applied[start["to"] : until] = True
            until = start["from"]
    return applied


def replayed(config: PrivacyConfig, applied: Tensor) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One process makes all releases, and applies some."""
    with tempfile.TemporaryDirectory() as folder:
        done = trainer_of(Path(folder), config, 0)
        made = done.create_optimizer()
        kind = type(made)

        def step(self: Any, *arguments: Any, **named: Any) -> Any:
            if applied[done._run.released - 1]:
                return kind.step(self, *arguments, **named)

        made.__class__ = type(kind.__name__, (kind,), {"step": step})
        done.train()
        return done.model, done.optimizer
