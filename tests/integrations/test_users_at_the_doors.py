"""Users are protected at Trainer's and Lightning's doors as in loops of one's own, to the bit; an
Opacus script, which knows no owners, is refused before any work starts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning_modules
import private_trainers
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import default_data_collator

from quietgrad import PrivacyConfig, Users
from quietgrad.accounting import epsilon_report
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.transformers import PrivateSFTTrainer
from quietgrad.ledger import read_ledger

# No ADVICE for Trainer: it is about Lightning's.
pytestmark = [*lightning_modules.ADVICE, pytest.mark.usefixtures("examined_once")]
USERS = Users(records_per_user=3)
OWNERS = [f"user {i * i % 31}" for i in range(100)]  # 16 users of 3 to 7 records each
CONFIG = replace(private_trainers.PRIVACY, expected_batch_size=4, epochs=None, steps=6, users=USERS)


def trained_plainly(
    model: Any,
    loss: Callable[[Any, Any], Tensor],
    data: Any,
    collate: Any = None,
    config: PrivacyConfig = CONFIG,
) -> Any:
    """The loop of docs/users.md, at a constant rate; generators are keyed for dropout."""
    plan = config.build(len(data), record_owner=OWNERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    model.train()
    with plan.start() as run:
        for batch in run.loader(data, steps=6, physical_batch_size=8, collate_fn=collate):
            run.backward(model, loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    return model


@cache
def by_bert(at_most: int = 3) -> nn.Module:
    return trained_plainly(
        private_trainers.classifier(),
        private_trainers.bert_loss,
        private_trainers.records(),
        default_data_collator,
        replace(CONFIG, users=Users(records_per_user=at_most)),
    )


def owned_records() -> list[dict[str, Any]]:
    found = private_trainers.records()
    return [record | {"writer": owner} for record, owner in zip(found, OWNERS, strict=True)]


def trainer(folder: Path, **changes: Any) -> Any:
    return private_trainers.trainer(
        folder, **({"privacy": CONFIG, "lr_scheduler_type": "constant"} | changes)
    )


@pytest.mark.parametrize("given", ["list", "column of records", "column of a Dataset"])
def test_trainer_is_the_plain_loop_over_users(tmp_path: Path, given: str) -> None:
    data: Any = private_trainers.records() if given == "list" else owned_records()
    if given == "column of a Dataset":
        data = Dataset.from_list(data).with_format("torch")
    owner = OWNERS if given == "list" else "writer"
    trained = trainer(tmp_path, train_dataset=data, record_owner=owner, logging_steps=2)
    trained.train()
    assert private_trainers.same_weights(trained.model, by_bert())
    if given == "list":  # the cap bites
        assert not private_trainers.same_weights(trained.model, by_bert(1))
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert "user" in ledger.header["neighbouring"] and trained.plan.dataset_size == len(set(OWNERS))
    spent = epsilon_report(ledger.event, ledger.header["delta"]).epsilon
    shown = {k: v for line in trained.state.log_history for k, v in line.items() if "epsilon" in k}
    assert set(shown) == {"epsilon_per_user"} and shown["epsilon_per_user"] >= spent
    assert trained.num_examples(trained.get_train_dataloader()) == len(set(OWNERS))
    trained.save_model(str(tmp_path / "model"))
    record = json.loads((tmp_path / "model" / "quietgrad.json").read_text())
    told = record["quietgrad_trained_on"]
    assert "user" in told["neighbouring"] and told.items() >= trained.plan.told_users().items()
    assert set(trained.plan.told_users()) == {"records_per_user", "combined", "choice"}
    written = "".join(p.read_text() for p in tmp_path.rglob("*.json*"))
    assert not re.search(r"user \d", written)  # nobody's name


def test_trainer_goes_on_with_users(tmp_path: Path) -> None:
    stop = [private_trainers.StopAt(3)]
    trainer(tmp_path, record_owner=OWNERS, callbacks=stop, save_strategy="steps").train()
    again = trainer(tmp_path, record_owner=OWNERS, save_strategy="steps")
    again.train(resume_from_checkpoint=True)
    assert private_trainers.same_weights(again.model, by_bert())


def instructed(folder: Path, **changes: Any) -> Any:
    from trl import SFTConfig

    return PrivateSFTTrainer(
        model=private_trainers.llama(),
        args=SFTConfig(
            str(folder), per_device_train_batch_size=8, max_length=16, bf16=False, use_cpu=True,
            gradient_checkpointing=None, report_to=[], save_strategy="no", disable_tqdm=True,
            **changes,
        ),
        train_dataset=private_trainers.pairs().add_column("writer", OWNERS),
        processing_class=private_trainers.tokenizer(),
        privacy=CONFIG,
        record_owner="writer",
    )  # fmt: skip


def test_instruction_tuning_knows_users(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """TRL tokenises, and drops the column; the owners are those of the records as given. Bars that
    count records of all users are not shown.
    """
    import datasets

    tuned = instructed(tmp_path)
    tuned.train()
    header = read_ledger(tmp_path / "ledger.jsonl").header
    assert "user" in header["neighbouring"] and tuned.plan.dataset_size == len(set(OWNERS))
    assert f"/{len(OWNERS)} [" not in "".join(capfd.readouterr())
    assert not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("given", ["list", "column of records", "shuffled in place"])
def test_a_data_set_that_is_shuffled_later_is_refused(tmp_path: Path, given: str) -> None:
    data = private_trainers.records() if given == "list" else owned_records()
    found = trainer(
        tmp_path, train_dataset=data, record_owner=OWNERS if given == "list" else "writer"
    )
    if given == "shuffled in place":
        data.reverse()
    else:
        found.train_dataset = data[::-1]
    with pytest.raises(ValueError, match="in another order, after the trainer was made"):
        found.train()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_table_that_trl_would_shuffle_keeps_its_owners(tmp_path: Path) -> None:
    """They are told by the places that records came at: elsewhere a user's would count as many."""
    tuned = instructed(tmp_path, shuffle_dataset=True)
    users = tuned.plan.sampler.users
    writers = tuned.train_dataset["writer"]
    parts = [users.order[a:b] for a, b in itertools.pairwise(users.offsets)]
    assert sum(map(len, parts)) == len(writers) == 100
    assert all(len({writers[row] for row in part}) == 1 for part in parts)


class Constant(lightning_modules.Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


class Rows(torch.utils.data.Dataset):
    """Records that are dictionaries, with their owner."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = lightning_modules.records()[index]
        return {"x": x, "y": y, "writer": OWNERS[index]}


def pair(rows: list[dict[str, Any]]) -> list[Tensor]:
    return [torch.stack([row[name] for row in rows]) for name in ("x", "y")]


@pytest.mark.parametrize("given", ["list", "column"])
def test_lightning_is_the_plain_loop_over_users(tmp_path: Path, given: str) -> None:
    owner = OWNERS if given == "list" else "writer"
    module = Constant(privacy=CONFIG, record_owner=owner)
    collate = None if given == "list" else pair
    data: Any = lightning_modules.records() if given == "list" else Rows()
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=collate)
    fit = lightning_modules.trainer(tmp_path, limit_val_batches=0)
    fit.fit(module, loader)
    plain = trained_plainly(
        Constant(), lambda model, batch: model.per_example_loss(batch), lightning_modules.records()
    )
    assert lightning_modules.same_weights(module, plain)
    assert {name for name in fit.logged_metrics if "epsilon" in name} <= {"epsilon_per_user"}
    header = read_ledger(tmp_path / "ledger.jsonl").header
    assert "user" in header["neighbouring"]
    assert module.epsilon() == CONFIG.build(100, record_owner=OWNERS).epsilon


def test_public_records_of_a_trained_user_are_refused(tmp_path: Path) -> None:
    data = owned_records()
    fresh = private_trainers.records(20, seed=1)
    strangers = [record | {"writer": f"other {i}"} for i, record in enumerate(fresh)]
    mixed = [*strangers[:-1], strangers[-1] | {"writer": " user 1 "}]
    with pytest.raises(ValueError, match=r"users who are trained on.*so that nobody is in both"):
        trainer(tmp_path, train_dataset=data, record_owner="writer", eval_dataset=mixed)
    held = trainer(tmp_path, train_dataset=data, record_owner="writer", eval_dataset=strangers)
    held.evaluate()
    for ask in (held.evaluate, held.predict):
        with pytest.raises(ValueError, match="users who are trained on"):
            ask(mixed)


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ("author", "record_owner='author' is no column of the training data"),
        (OWNERS[:-1], "another number of entries"),
        ([*OWNERS[:-1], None], "no owner for some record"),
        (["one"] * 100, "names a single user"),
    ],
    ids=["no column", "too few", "a gap", "one user"],
)
def test_owners_that_say_nothing_are_refused(tmp_path: Path, owner: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, train_dataset=owned_records(), record_owner=owner)
    module = lightning_modules.Small(privacy=CONFIG, record_owner=owner)
    with pytest.raises(ValueError, match=said):
        lightning_modules.trainer(tmp_path).fit(module, Rows())
    assert list(tmp_path.iterdir()) == []


def test_settings_for_users_without_owners_are_refused(tmp_path: Path) -> None:
    said = r"nothing says whose the records are.*PrivateTrainer or PrivateLightningModule"
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path)
    with pytest.raises(ValueError, match=said):
        lightning_modules.trainer(tmp_path).fit(
            lightning_modules.Small(privacy=CONFIG), lightning_modules.records()
        )
    assert list(tmp_path.iterdir()) == []


def test_opacus_refuses() -> None:
    model = torch.nn.Linear(3, 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 3)), 4)
    with pytest.raises((TypeError, ValueError), match="record_owner is no argument of"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            data_loader=data,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            record_owner=list(range(8)),
        )
