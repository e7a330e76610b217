"""PrivateDPOTrainer: TRL's preparation, losses and evaluation; private steps, two answers a row."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from private_trainers import PRIVACY, RATE, StopAt, llama, plain_loop, same_weights, tokenizer
from torch import Tensor, nn

pytest.importorskip("trl", reason="needs the extra trl")

from trl import DPOConfig, DPOTrainer

from quietgrad import PrivacyConfig
from quietgrad.integrations.transformers import PrivateDPOTrainer
from quietgrad.integrations.transformers.dpo import LOSSES
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.usefixtures("examined_once")

ADDING = AdaLoraConfig(
    target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=9, tinit=1, tfinal=1
)
PROTECTING = PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, steps=2)


def preferences(n: int = 100, words: str = "a b ") -> Dataset:
    """Prompts of two to eighteen words, answers of one to three; nine users."""
    answers = ("c", "c d", "c d e", "f", "f a")
    return Dataset.from_list(
        [
            {
                "prompt": words * (1 + i % 9),
                "chosen": answers[i % 3],
                "rejected": answers[3 + i % 2],
                "customer": f"user {i % 40}",
            }
            for i in range(n)
        ]
    )


def dpo(folder: Path, **changes: Any) -> PrivateDPOTrainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "learning_rate": RATE,
        "optim": "adamw_torch",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": None,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 12,
    }
    own = {"train_dataset", "eval_dataset", "callbacks", "peft_config", "ref_model"}
    own |= {"data_collator", "record_owner", "privacy", "model", "per_example_loss"}
    given = {name: changes.pop(name) for name in own & changes.keys()}
    given.setdefault("train_dataset", preferences())
    given.setdefault("privacy", PRIVACY)
    given.setdefault("model", llama())
    config = DPOConfig(**(settings | changes))
    return PrivateDPOTrainer(args=config, processing_class=tokenizer(), **given)


def log_probability(model: nn.Module, prompt: list[int], answer: list[int], most: int) -> Tensor:
    """Of one answer, without padding or company."""
    ids = torch.tensor((prompt + answer)[:most])
    logits = model(input_ids=ids[None]).logits[0].float()
    learnt = range(max(1, len(prompt)), len(ids))
    each = [F.log_softmax(logits[i - 1], -1)[ids[i]] for i in learnt]
    return torch.stack(each).sum() if each else torch.zeros(())


def test_a_records_loss_is_that_of_its_own_two_answers(tmp_path: Path) -> None:
    trained = dpo(tmp_path)
    rows = [trained.train_dataset[i] for i in (0, 1, 4, 8)]
    reference = llama()
    with torch.no_grad():
        for p in trained.model.parameters():  # elsewhere than the reference
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    found = trained._loss(trained.model, trained.data_collator(rows))
    expected = []
    for row in rows:
        ratio = {
            kind: log_probability(trained.model, row["prompt_ids"], row[f"{kind}_ids"], 12)
            - log_probability(reference, row["prompt_ids"], row[f"{kind}_ids"], 12)
            for kind in ("chosen", "rejected")
        }
        expected.append(-F.logsigmoid(0.1 * (ratio["chosen"] - ratio["rejected"])))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert found[3].item() == pytest.approx(0.6931472)  # cut off before its answers
    assert (found[:3] - found[3]).abs().min() > 1e-4
    torch.testing.assert_close(
        trained._loss(trained.model, trained.data_collator(rows[:1])), found[:1]
    )


@pytest.mark.parametrize("names", [*([n] for n in LOSSES), ["sigmoid", "ipo"]], ids="+".join)
def test_the_mean_over_records_is_trls_loss(names: list[str], tmp_path: Path) -> None:
    weights = [0.7, 0.3][: len(names)]
    changes: dict[str, Any] = {"label_smoothing": 0.2} if "robust" in names else {}
    trained = dpo(tmp_path, loss_type=names, loss_weights=weights, **changes)
    with torch.no_grad():
        for p in trained.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    batch = trained.data_collator([trained.train_dataset[i] for i in (0, 1, 2, 4, 5)])
    trained.model.eval()
    with torch.no_grad():
        found = trained._loss(trained.model, batch)
        theirs = trained._compute_loss(trained.model, batch, False)
    torch.testing.assert_close(found.mean(), theirs, rtol=1e-4, atol=1e-6)
    assert found.std() > 0


def test_the_weights_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    trained = dpo(tmp_path)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps", "ref_rejected_logps")
    data = [{name: trained.train_dataset[i][name] for name in columns} for i in range(100)]
    trained.train()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        moved = []
        for answer in (0, 1):
            ids, mask, learnt = (
                batch[name][:, answer]
                for name in ("input_ids", "attention_mask", "completion_mask")
            )
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            summed = -(each.view(len(ids), -1) * learnt[:, 1:]).sum(1)
            moved.append(summed - batch["ref_logps"][:, answer])
        return -F.logsigmoid(0.1 * (moved[0] - moved[1]))

    expected = plain_loop(llama(), loss, data=data, collate=trained.data_collator)
    assert same_weights(trained.model, expected) and not same_weights(expected, llama())
    assert trained.epsilon() == trained.plan.epsilon


def test_every_record_counts_also_one_without_room_for_an_answer(tmp_path: Path) -> None:
    trained = dpo(tmp_path, eval_dataset=preferences(20, "b a "))
    assert len(trained.train_dataset) == trained.plan.dataset_size == 100
    assert any(len(row) >= 12 for row in trained.train_dataset["prompt_ids"])
    assert len(trained.eval_dataset) < 20  # TRL's own rule, for public records


class Watched(nn.Module):
    """A layer in place of another: sees how many rows there are, and may mix them."""

    def __init__(self, inner: nn.Module, mixes: bool) -> None:
        super().__init__()
        self.inner, self.mixes = inner, mixes
        self.rows: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.rows |= {len(x)}
        out: Tensor = self.inner(x)
        return out - x.mean(0, keepdim=True) if self.mixes else out


def test_records_are_clipped_together_and_a_model_that_mixes_them_is_refused(
    tmp_path: Path,
) -> None:
    model = llama()
    watched = model.model.norm = Watched(model.model.norm, mixes=False)
    dpo(tmp_path / "fine", model=model, privacy=PROTECTING).train()
    assert 8 in watched.rows and max(watched.rows) == 8  # micro-batches, an answer at a time
    model = llama()
    model.model.norm = Watched(model.model.norm, mixes=True)
    refused = dpo(tmp_path / "mixing", model=model, privacy=PROTECTING)
    with pytest.raises(ValueError, match=r"beside it|other examples"):
        refused.train()
    assert refused.epsilon() == 0


def test_what_the_reference_thinks_of_a_record_follows_from_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[torch.Size] = []
    theirs = DPOTrainer.compute_ref_log_probs

    def seen(self: Any, model: Any, inputs: dict[str, Tensor]) -> Any:
        rows.append(inputs["input_ids"].shape)
        return theirs(self, model, inputs)

    monkeypatch.setattr(DPOTrainer, "compute_ref_log_probs", seen)
    trained = dpo(tmp_path, train_dataset=preferences(40, "a f "))  # no other test's, in a cache
    assert len(rows) == 40 and {shape[0] for shape in rows} == {2}
    assert len({shape[1] for shape in rows}) > 3  # padded to nothing but each other
    assert trained.train_dataset["ref_chosen_logps"][0] != 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss_type": ["aot"]}, "loss_type='aot' is a loss of the batch"),
        ({"loss_type": ["sigmoid", "sft"]}, "loss_type='sft'"),
        ({"use_weighting": True}, "use_weighting"),
        ({"ld_alpha": 0.5}, "ld_alpha"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 has no effect"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 has no effect on loss_type=sigmoid"),
        ({"label_smoothing": 0.5, "loss_type": ["robust"]}, "below 0.5"),
        ({"f_divergence_type": "js_divergence"}, "f_divergence_type"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"fsdp": True}, "DPOTrainer makes its reference from"),
        ({"padding_free": True}, "padding_free"),
        ({"activation_offloading": True}, "activation_offloading"),
        ({"gradient_accumulation_steps": 2}, "expected_batch_size"),
        ({"data_collator": list}, "data_collator"),
        ({"per_example_loss": len}, "per_example_loss"),
        ({"peft_config": ADDING}, r"AdaLoraConfig\(orth_reg_weight=0.5\).*set orth_reg_weight=0"),
        ({"train_dataset": preferences(40).add_column("image", [""] * 40)}, "has images"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_private_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        dpo(tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_training_records_are_not_evaluated(tmp_path: Path) -> None:
    data = preferences()
    trained = dpo(tmp_path, train_dataset=data)
    for private in (data, trained.train_dataset):
        with pytest.raises(ValueError, match="eval_dataset is the training data"):
            trained.evaluate(private)


def test_adapters_users_a_resume_and_nothing_private_in_the_logs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "record_owner": "customer",
        "save_strategy": "steps",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "eval_dataset": preferences(20, "b a ").remove_columns("customer"),
    }
    dpo(tmp_path, callbacks=[StopAt(3)], **settings).train()
    again = dpo(tmp_path, **settings)
    done = again.train(resume_from_checkpoint=True)
    assert again.plan.dataset_size == 40 and "user" in again.plan.neighbouring
    assert done.training_loss is None
    assert read_ledger(tmp_path / "ledger.jsonl").releases == again.plan.steps == done.global_step
    last = tmp_path / f"checkpoint-{done.global_step}" / "trainer_state.json"
    names = {name for line in json.loads(last.read_text())["log_history"] for name in line}
    assert "epsilon_per_user" in names and "eval_loss" in names and "eval_rewards/margins" in names
    private = {"loss", "grad_norm", "entropy", "num_tokens", "rewards/chosen", "logps/chosen"}
    assert not private & names and "eval_num_tokens" not in names


def test_the_copy_of_an_adapter_that_trl_keeps_as_the_reference_stays(tmp_path: Path) -> None:
    adapted = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    trained = dpo(tmp_path, model=adapted)
    held = {n: p.clone() for n, p in trained.model.named_parameters() if ".ref." in n}
    trained.train()
    after = dict(trained.model.named_parameters())
    assert held and all(torch.equal(p, after[n]) for n, p in held.items())


def test_a_reference_of_an_earlier_private_run_has_to_be_asked_for(tmp_path: Path) -> None:
    first = dpo(tmp_path / "first", privacy=PROTECTING)
    first.train()
    with pytest.raises(ValueError, match="epsilons-add"):
        dpo(tmp_path / "second", privacy=PROTECTING, ref_model=first.model)


def test_no_record_is_quoted_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    joined = [{"prompt": "a b", "chosen": "b c", "rejected": "b d"}] * 40
    with caplog.at_level(logging.WARNING):
        dpo(tmp_path, train_dataset=Dataset.from_list(joined))
    lines = [line.getMessage() for line in caplog.records if "prefix" in line.getMessage()]
    assert lines and all("'b'" not in line and "not shown" in line for line in lines)


def test_a_data_set_without_two_answers_says_so(tmp_path: Path) -> None:
    others = Dataset.from_list([{"prompt": "a b", "chosen": "c"}] * 20)
    with pytest.raises(
        ValueError, match=r"train_dataset has the columns 'prompt', 'chosen'.*'rejected'"
    ):
        dpo(tmp_path, train_dataset=others)
    assert not list(tmp_path.glob("ledger*"))


def test_a_list_of_dictionaries_is_a_data_set(tmp_path: Path) -> None:
    listed = dpo(tmp_path / "list", train_dataset=preferences().to_list())
    wanted = dpo(tmp_path / "set")
    listed.train()
    wanted.train()
    assert same_weights(listed.model, wanted.model)


def test_a_contradicted_plan_leaves_no_folder(tmp_path: Path) -> None:
    """Refused once transformers has made it."""
    with pytest.raises(ValueError, match="max_steps=7"):
        dpo(tmp_path / "run", max_steps=7)
    assert not (tmp_path / "run").exists()
