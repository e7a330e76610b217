"""Adapters on a base model that bitsandbytes or torchao has quantised, by the packages themselves:
they are large, and run where they are installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from quietgrad import PrivacyConfig
from quietgrad.clipping.verify import verify_clipping
from quietgrad.integrations.transformers import PrivateTrainer

WORDS, LENGTH, RECORDS = 100, 12, 120

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, use_cache=False, max_position_embeddings=64,
    )  # fmt: skip
    found = tmp_path_factory.mktemp("base")
    hf.LlamaForCausalLM(config).save_pretrained(found)
    return found


def in_four_bits() -> Any:
    return hf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )


def in_eight_bits(threshold: float) -> Any:
    return hf.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)


def adapted(folder: Path, quantization: Any, dropout: float = 0.0) -> Any:
    base = hf.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32, device_map="cpu"
    )
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "up_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, lora_dropout=dropout)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.02)
    return model.train()


def records() -> list[dict[str, Any]]:
    ids = torch.randint(5, WORDS, (RECORDS, LENGTH), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(model: Any, output: Path) -> PrivateTrainer:
    arguments = hf.TrainingArguments(
        str(output), per_device_train_batch_size=8, learning_rate=1e-2, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=12, steps=3)
    return PrivateTrainer(model=model, args=arguments, train_dataset=records(), privacy=plan)


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    targets = batch["input_ids"][:, 1:]
    found = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    return found.mean(dim=1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_on_four_bits_are_trained(folder: Path, tmp_path: Path, dropout: float) -> None:
    model = adapted(folder, in_four_bits(), dropout).eval()  # as it is loaded
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    begun = trainer(model, tmp_path)
    begun.train()
    assert begun.epsilon() > 0
    assert all(bool((dict(model.named_parameters())[n] != p).any()) for n, p in before.items())


def test_four_bits_are_clipped_like_autograd(folder: Path) -> None:
    model = adapted(folder, in_four_bits())
    batch = {"input_ids": torch.stack([r["input_ids"] for r in records()[:4]])}
    assert verify_clipping(model, loss, batch) < 1e-3


def test_eight_bits_with_a_threshold_over_the_batch_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    begun = trainer(adapted(folder, in_eight_bits(6.0)), tmp_path)
    with pytest.raises(ValueError, match=r"llm_int8_threshold=0\.0"):
        begun.train()
    assert "ledger.jsonl" not in os.listdir(tmp_path)


def test_eight_bits_without_one_are_trained(folder: Path, tmp_path: Path) -> None:
    begun = trainer(adapted(folder, in_eight_bits(0.0)), tmp_path)
    begun.train()
    assert begun.epsilon() > 0


def test_a_model_in_evaluation_mode_is_told_to_train(folder: Path) -> None:
    model = adapted(folder, in_four_bits()).eval()
    packs = any(getattr(m, "support_avx512bf16_for_cpu", False) for m in model.modules())
    plan = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=12, steps=3).build(RECORDS)
    with plan.start() as run:
        batch = next(iter(run.loader(records())))
        if not packs:  # this processor has no kernel that asks for it
            run.backward(model, loss, batch)
            return
        with pytest.raises(ValueError, match=r"packed its weights.*call its train"):
            run.backward(model, loss, batch)


def test_weights_of_torchao_are_trained(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    model = adapted(folder, hf.TorchAoConfig(Int8WeightOnlyConfig()))
    begun = trainer(model, tmp_path)
    begun.train()
    assert begun.epsilon() > 0


def test_the_code_of_the_page_runs(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "quantized.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, str(page), "exec"), {"base": str(folder), "records": records()})
    assert "epsilon 8.000" in capsys.readouterr().out
    assert (tmp_path / "qlora" / "adapters" / "quietgrad.json").exists()
