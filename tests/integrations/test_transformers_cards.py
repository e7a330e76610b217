"""Model cards that transformers, TRL and peft write say what is guaranteed: a card without a word
on privacy is what a reader of the hub would see.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from private_trainers import StopAt, classifier, llama, pairs, tokenizer, trainer
from transformers import trainer as of_transformers
from trl import SFTConfig

from quietgrad import PrivacyConfig
from quietgrad.accounting.rounding import round_up
from quietgrad.integrations.transformers import PrivateSFTTrainer
from quietgrad.training.files.card import BEGIN, END

pytestmark = pytest.mark.usefixtures("examined_once")


def adapted() -> Any:
    torch.manual_seed(8)
    return get_peft_model(
        classifier(), LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    )


def test_trainers_card_has_the_guarantee_once(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    trained.train()
    for _ in range(2):
        trained.create_model_card(tags=["mine"])
    card = (tmp_path / "README.md").read_text()
    assert card.count(BEGIN) == card.count(END) == card.count("## Privacy") == 1
    spent = round_up(trained.epsilon(), 4)
    assert f"(epsilon, delta) = ({spent}, " in card and "over all 10 steps" in card
    assert "Training hyperparameters" in card and "- mine" in card


def test_a_card_before_the_first_release_claims_nothing(tmp_path: Path) -> None:
    untrained = trainer(tmp_path)
    untrained.create_model_card()
    assert "epsilon, delta" not in (tmp_path / "README.md").read_text()


def test_the_card_of_adapters_is_no_blank_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": adapted(), "save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path, callbacks=[StopAt(4)], **settings).train()
    early = (tmp_path / "checkpoint-4" / "README.md").read_text()
    assert "over all 4 steps" in early and "More Information Needed" not in early
    again = trainer(tmp_path, **settings | {"model": adapted()})
    again.train(resume_from_checkpoint=True)
    for _ in range(2):  # peft reads its card again, and adds to it
        again.save_model(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.count("## Privacy") == 1 and "over all 10 steps" in card
    assert "library_name: peft" in card and "More Information Needed" not in card
    assert PeftModel.from_pretrained(classifier(), tmp_path / "model").peft_config


def test_a_readme_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    own = "# My project\n"
    (tmp_path / "model" / "README.md").write_text(own)
    trained = trainer(tmp_path)
    trained.train()
    trained.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "README.md").read_text() == own


def test_the_card_that_trl_writes_at_checkpoints(tmp_path: Path) -> None:
    trained = PrivateSFTTrainer(
        model=llama(),
        args=SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=8,
            max_length=16,
            save_strategy="epoch",
            bf16=False,
            gradient_checkpointing=None,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=pairs(40),
        processing_class=tokenizer(),
        privacy=PrivacyConfig(target_epsilon=3.0, expected_batch_size=20, epochs=1),
    )
    trained.train()
    card = (tmp_path / "README.md").read_text()
    assert card.count("## Privacy") == 1 and "over all 2 steps" in card


def test_what_goes_to_the_hub_after_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub in the place of Hugging Face's, which is given a folder."""
    sent: dict[str, bytes] = {}

    def upload_folder(folder_path: Any, ignore_patterns: list[str], **_: Any) -> str:
        for path in Path(folder_path).rglob("*"):
            name = str(path.relative_to(folder_path))
            if path.is_file() and not any(fnmatch(name, p) for p in ignore_patterns):
                sent[name] = path.read_bytes()
        return "sent"

    def create_repo(name: str, **_: Any) -> Any:
        return SimpleNamespace(repo_id=name)

    hub = SimpleNamespace(create_repo=create_repo, upload_folder=upload_folder)
    monkeypatch.setattr(of_transformers, "hf_api", lambda: hub)
    trained = trainer(tmp_path, hub_model_id="us/ours")
    trained.train()
    assert trained.push_to_hub() == "sent"
    assert {"model.safetensors", "README.md", "quietgrad.json"} <= set(sent)
    assert not any("secrets" in name for name in sent)
    assert b"## Privacy" in sent["README.md"]
    said = json.loads(sent["quietgrad.json"])["quietgrad_trained_on"]
    assert said["epsilon"] == trained.epsilon()
