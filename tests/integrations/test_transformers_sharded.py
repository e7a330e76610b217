"""Trainer on processes that hold a shard of every parameter each, by accelerate's FSDP plugin: one
run, one ledger, and the weights of one process, to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from private_trainers import (
    PRIVACY,
    WORDS,
    StopAt,
    classifier,
    records,
    tokenizer,
    trainer,
)
from processes import forget_accelerate, on_processes
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from quietgrad.integrations.transformers import PrivateSeq2SeqTrainer
from quietgrad.integrations.transformers.quiet import QuietTrainer
from quietgrad.integrations.transformers.sharding import ShardingTrainer
from quietgrad.ledger import read_ledger
from quietgrad.training.files.provenance import FILE, KEY

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("first_looks_alone")]
STEPS = 5
PLAN = replace(PRIVACY, epochs=1)
Found = dict[str, Any]


def texts(n: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Three to seven words."""
    draws = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(3, len(WORDS), (3 + i % 5,), generator=draws).tolist()}
        for i in range(n)
    ]


def language(tied: bool = True) -> Any:
    torch.manual_seed(7)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    words = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**sizes, **heads, **words, tie_word_embeddings=tied)
    return LlamaForCausalLM(config).double()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(8)
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    return get_peft_model(language(tied=False), lora).double()


def bert() -> nn.Module:
    """transformers counts its embeddings among the layers that are not split."""
    return classifier(dropout=0.0).double()


def sharding(**settings: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"fsdp_version": 2, **settings}}


def made(output: str, model: Any = None, stop_at: int = 0, **changes: Any) -> Any:
    model = language() if model is None else model
    reads = hasattr(model, "generate")
    told = {
        "train_dataset": texts(100) if reads else records(),
        "eval_dataset": texts(16, 1) if reads else records(16, 1),
    }
    if reads:
        told["data_collator"] = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    settings = {
        "privacy": PLAN,
        "per_device_train_batch_size": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 2,
        "callbacks": [StopAt(stop_at)] if stop_at else None,
    }
    return trainer(Path(output), model=model, **(told | settings | changes))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Found]:
    """What one process ends with, its files in ``Found["folder"]``."""

    @cache
    def of(make: Any) -> Found:
        folder = tmp_path_factory.mktemp("alone")
        (found,) = on_processes(1, folder / "work", lambda: trained(str(folder / "run"), make))
        assert not isinstance(found, str), found
        assert not found["any spread"]
        return {**found, "folder": folder / "run"}

    return of


def outcome(done: Any) -> Found:
    weights = {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()
        for name, t in done.model.state_dict().items()
    }
    spread = [type(p).__name__ == "DTensor" for p in done.model.parameters()]
    return {
        "weights": weights,
        "log": done.state.log_history,
        "epsilon": done.epsilon(),
        "all spread": all(spread),
        "any spread": any(spread),
    }


def trained(
    output: str, make: Any = language, resume: bool = False, stop_at: int = 0, **changes: Any
) -> Found:
    done = made(output, make(), stop_at, **changes)
    done.train(resume_from_checkpoint=resume)
    done.save_model(f"{output}/final")
    return outcome(done)


def shards(size: int, folder: Path, output: str, *more: Any, **changes: Any) -> list[Found]:
    given = sharding() | changes
    found = on_processes(size, folder, lambda: trained(output, *more, **given))
    assert not any(isinstance(one, str) for one in found), found
    assert all(one["all spread"] for one in found)
    return found


def refusals(folder: Path, work: Any) -> list[str]:
    found = on_processes(2, folder, work)
    assert all(isinstance(one, str) for one in found), found
    return found


def equal(found: Found, expected: Found) -> None:
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
    assert found["epsilon"] == expected["epsilon"]


def scores(found: Found) -> list[float]:
    return [line["eval_loss"] for line in found["log"] if "eval_loss" in line]


@pytest.mark.parametrize("make", [language, adapted, bert], ids=["full", "adapters", "bert"])
def test_two_processes_with_shards_end_with_the_weights_of_one(
    make: Any, alone: Callable[[Any], Found], tmp_path: Path
) -> None:
    expected = alone(make)
    place = tmp_path / "two"
    for found in shards(2, tmp_path / "both", str(place), make):
        equal(found, expected)
        assert scores(found) == pytest.approx(scores(expected), rel=1e-6)
        assert not any({"loss", "grad_norm", "total_flos"} & set(line) for line in found["log"])
    ledgers = (expected["folder"] / "ledger.jsonl", place / "ledger.jsonl")
    assert len({len(ledger.read_text().splitlines()) for ledger in ledgers}) == 1
    assert read_ledger(place / "ledger.jsonl").releases == STEPS
    assert not (place / "secrets.json").exists()
    for folder in (place / "final", place / f"checkpoint-{STEPS}"):
        assert KEY in (folder / FILE).read_text()
        loaded = loaded_from(folder, make)
        torch.testing.assert_close(loaded, expected["weights"], rtol=0, atol=0)


def loaded_from(folder: Path, make: Any) -> dict[str, torch.Tensor]:
    if make is adapted:
        from peft import PeftModel

        model = PeftModel.from_pretrained(language(tied=False), folder)
    else:
        kind = AutoModelForCausalLM if make is language else AutoModelForSequenceClassification
        model = kind.from_pretrained(folder)
    return {name: t.detach() for name, t in model.state_dict().items()}


@pytest.mark.parametrize(
    ("then", "how", "make"),
    [(3, "FULL_STATE_DICT", language), (2, "SHARDED_STATE_DICT", adapted)],
    ids=["whole, on three", "shards, adapters"],
)
def test_a_run_goes_on_from_its_checkpoint(
    then: int, how: str, make: Any, alone: Callable[[Any], Found], tmp_path: Path
) -> None:
    expected = alone(make)
    place = str(tmp_path / "run")
    settings = sharding(state_dict_type=how)
    shards(2, tmp_path / "first", place, make, False, 3, **settings)
    assert read_ledger(Path(place, "ledger.jsonl")).releases == 3
    for found in shards(then, tmp_path / "then", place, make, True, **settings):
        equal(found, expected)
    assert KEY in Path(place, f"checkpoint-{STEPS}", FILE).read_text()
    torch.testing.assert_close(
        loaded_from(Path(place, "final"), make), expected["weights"], rtol=0, atol=0
    )


def test_a_checkpoint_that_was_saved_otherwise_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    shards(2, tmp_path / "first", place, language, False, 2)
    before = Path(place, "ledger.jsonl").read_bytes()
    for found in refusals(
        tmp_path / "a",
        lambda: trained(place, resume=True, **sharding(state_dict_type="SHARDED_STATE_DICT")),
    ):
        assert "SHARDED" in found
    for found in on_processes(1, tmp_path / "b", lambda: trained(place, resume=True)):
        assert "this trainer runs without FSDP" in found and '"FULL_STATE_DICT"' in found
    assert Path(place, "ledger.jsonl").read_bytes() == before  # no start is counted


def test_the_best_model_is_what_is_evaluated(tmp_path: Path) -> None:
    """Embedding and head stay gathered after an evaluation, and would be those of the last step."""
    best = {"load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 2}

    def run(changes: dict[str, Any]) -> tuple[float, list[float], bool]:
        done = made(str(tmp_path / f"run{len(changes)}"), **best, **changes)
        done.train()
        before = {name: p for name, p in done.model.named_parameters()}
        score = done.evaluate()["eval_loss"]
        at_rest = all(p is before[name] for name, p in done.model.named_parameters())
        return score, scores({"log": done.state.log_history}), at_rest

    ((score, seen, _),) = on_processes(1, tmp_path / "a", run, {})
    assert score == max(seen) > min(seen)
    for found in on_processes(2, tmp_path / "b", run, sharding()):
        assert found[0] == pytest.approx(score, rel=1e-6), found
        assert found[2]


def test_what_is_evaluated_before_training_is_the_whole_model(tmp_path: Path) -> None:
    """accelerate shards a model together with its optimiser alone."""

    def run(place: str, changes: dict[str, Any]) -> tuple[float, list[float], int, bool]:
        done = made(str(tmp_path / place), bert(), **changes)
        first = done.evaluate()["eval_loss"]
        asked = done.predict(records(9, 2)).predictions
        done.train()
        return first, scores({"log": done.state.log_history}), len(asked), done.is_fsdp_enabled

    ((first, seen, _, _),) = on_processes(1, tmp_path / "a", run, "one", {})
    for found in on_processes(2, tmp_path / "b", run, "two", sharding()):
        assert found[0] == pytest.approx(first, rel=1e-6), found
        assert found[1] == pytest.approx(seen, rel=1e-6)
        assert found[2:] == (9, True)


def test_nothing_is_evaluated_with_weights_that_are_not_there_or_not_the_same(
    tmp_path: Path,
) -> None:
    def unlike() -> Any:
        done = made(str(tmp_path / "a"), bert(), **sharding())
        with torch.no_grad():
            next(done.model.parameters()).add_(int(os.environ["RANK"]))
        done.evaluate()

    def empty() -> Any:
        done = made(str(tmp_path / "b"), bert(), **sharding(cpu_ram_efficient_loading=True))
        done.evaluate()

    for found in refusals(tmp_path / "c", unlike):
        assert "the model's weights" in found
    for found in refusals(tmp_path / "d", empty):
        assert "evaluate() or predict() before train()" in found


def test_a_trainer_goes_on_and_its_model_starts_no_other_run(tmp_path: Path) -> None:
    def run() -> Any:
        private = replace(PLAN, data_are_public=False, seed=None)
        done = made(str(tmp_path / "run"), None, 2, privacy=private, **sharding())
        done.train()
        done.evaluate()
        done.train(resume_from_checkpoint=True)
        assert done.state.global_step == STEPS
        made(str(tmp_path / "other"), done.model, privacy=private, **sharding())

    for found in refusals(tmp_path / "a", run):
        assert "trained by another private run" in found


def test_shards_without_a_row_are_trained_on_when_a_trainer_goes_on(
    alone: Callable[[Any], Found], tmp_path: Path
) -> None:
    """Of three ranks the last has no row of what has two or four. accelerate tells parameters by
    their memory, and such shards have none.
    """

    def run() -> tuple[Found, int]:
        done = made(str(tmp_path / "run"), bert(), 2, **sharding())
        done.train()
        done.train(resume_from_checkpoint=True)
        rows = [p.to_local().numel() for p in done.model.parameters()]
        return outcome(done), rows.count(0)

    found = on_processes(3, tmp_path / "a", run)
    assert not any(isinstance(one, str) for one in found), found
    assert [empty for _, empty in found] == [0, 0, 3], found
    for one, _ in found:
        equal(one, alone(bert))


def test_without_what_keeps_them_a_trainer_does_not_go_on(tmp_path: Path) -> None:
    """Broken by hand: the rank without rows ends, and nobody waits for it."""

    def run() -> None:
        ShardingTrainer.create_scheduler = QuietTrainer.create_scheduler  # type: ignore[method-assign]
        done = made(str(tmp_path / "run"), bert(), 2, **sharding())
        done.train()
        done.train(resume_from_checkpoint=True)

    found = on_processes(3, tmp_path / "a", run)
    assert all(isinstance(one, str) for one in found), found
    assert found[2].startswith("KeyError"), found


def test_looks_draw_alike_on_all_ranks(tmp_path: Path) -> None:
    """Where one rank found that a collator draws, and another not, one would make passes alone."""

    def run() -> Any:
        from quietgrad.integrations.transformers import collating as module

        class Seen(Exception):
            pass

        def looking(*args: Any) -> Any:
            raise Seen(args[-1])

        module.Looking = looking  # type: ignore[misc, assignment]
        made(str(tmp_path / "run"), **sharding()).train()

    first, second = refusals(tmp_path / "a", run)
    assert first.startswith("Seen: ") and first == second


def test_texts_of_other_lengths_are_written_together(tmp_path: Path) -> None:
    """A rank that is done goes on with the others, who gather its shards at every word."""

    def run() -> Any:
        args = Seq2SeqTrainingArguments(
            str(tmp_path / "run"),
            per_device_eval_batch_size=1,
            predict_with_generate=True,
            generation_max_length=24,
            use_cpu=True,
            report_to=[],
            **sharding(),
        )
        model = language()
        model.generation_config.eos_token_id = [3, 4, 5]  # soon, or later
        words = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        done = PrivateSeq2SeqTrainer(
            model=model,
            args=args,
            data_collator=words,
            train_dataset=texts(100),
            privacy=PLAN,
            callbacks=[StopAt(1)],
        )
        done.train()
        written = torch.as_tensor(done.predict(texts(8, 2)).predictions)
        return (written > 0).sum(1).tolist()

    first, second = on_processes(2, tmp_path / "a", run)
    assert isinstance(first, list) and first == second and len(set(first)) > 1, first


def test_half_precision_and_checkpointing_run_as_a_launcher_asks(tmp_path: Path) -> None:
    def run() -> Any:
        os.environ |= {  # accelerate launch --use_fsdp --fsdp_version 2 ...
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        }
        done = made(
            str(tmp_path / "run"), language().float(), bf16=True, activation_checkpointing=True
        )
        done.train()
        return done.state.global_step, outcome(done)["all spread"]

    assert on_processes(2, tmp_path / "a", run) == [(STEPS, True)] * 2


def t5() -> Any:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=12, dropout_rate=0.0, **sizes))


def unlike() -> Any:
    model = language()
    with torch.no_grad():
        model.model.norm.weight.add_(int(os.environ["RANK"]))
    return model


SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP"}
UNSHARDABLE: list[tuple[Any, dict[str, Any], str]] = [
    (t5, {}, "'encoder.embed_tokens' uses the table"),
    (unlike, {}, "differ in the model's weights: call transformers.set_seed"),
    (bert, SIZE | {"min_num_params": 3000}, "'bert' by itself: accelerate shards a layer inside"),
    (bert, SIZE | {"min_num_params": 500}, "'bert.encoder.layer' by itself: torch cannot shard a"),
    (language, {"transformer_layer_cls_to_wrap": ["Embedding"]}, "the other end of the model"),
    (language, {"transformer_layer_cls_to_wrap": ["Nothing"]}, "layer class Nothing in the model"),
]


def require_refused(folder: Path, cases: list[tuple[Any, dict[str, Any], str]]) -> None:
    """On every rank, in the words that are expected, and no ledger is left."""

    def run() -> list[str]:
        dist.init_process_group("gloo")
        said = []
        for number, (make, settings, _) in enumerate(cases):
            forget_accelerate()
            place = folder / f"run{number}"
            quiet = {"eval_dataset": None, "eval_strategy": "no"}
            try:
                made(str(place), make(), **quiet, **settings).train()
            except (ValueError, RuntimeError) as error:
                said.append(f"{error} {list(place.glob('ledger*'))}")
        return said

    for found in on_processes(2, folder / "a", run):
        assert isinstance(found, list) and len(found) == len(cases), found
        for said, (_, _, text) in zip(found, cases, strict=True):
            assert text in said and said.endswith("[]"), said


def test_what_accelerate_cannot_shard_is_refused_before_anything_is_recorded(
    tmp_path: Path,
) -> None:
    require_refused(tmp_path, [(make, sharding(**how), said) for make, how, said in UNSHARDABLE])


def wrapped(by: Any, **options: Any) -> Any:
    model = language()
    model.model.norm = by(model.model.norm, **options)
    return model


def flat() -> Any:
    return wrapped(FullyShardedDataParallel, device_id=torch.device("cpu"))


def copied() -> Any:
    return wrapped(DistributedDataParallel)


def shards_of_ones_own() -> Any:
    return fully_shard(language())


# Those without the plugin first: asked for once, it stays in the environment.
WRAPPED: list[tuple[Any, dict[str, Any], str]] = [
    (flat, {}, "'model.norm' is wrapped in FullyShardedDataParallel (FSDP1)"),
    (copied, {}, "'model.norm' is wrapped in DistributedDataParallel"),
    (shards_of_ones_own, {}, "is wrapped in FSDPModule"),
    (flat, sharding(), "shard the model by fully_shard (FSDP2"),
    (copied, sharding(), "pass the model itself"),
]


def test_what_others_have_wrapped_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    require_refused(tmp_path, WRAPPED)


@pytest.mark.parametrize("least", [0, 10**6])
def test_a_size_that_no_layer_exceeds_shards_the_rest_together(
    least: int, alone: Callable[[Any], Found], tmp_path: Path
) -> None:
    settings = sharding(**SIZE, min_num_params=least)
    for found in shards(2, tmp_path / "both", str(tmp_path / "two"), **settings):
        equal(found, alone(language))
