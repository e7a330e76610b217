"""What Trainer can do that cannot be private is refused by name, before any work starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend
from private_trainers import (
    PRIVACY,
    StopAt,
    arguments,
    bert_loss,
    classifier,
    records,
    tokenizer,
    trainer,
)
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithPadding, EarlyStoppingCallback, Trainer
from transformers.integrations.neftune import activate_neftune

from quietgrad import PrivacyConfig
from quietgrad.denoising import PersistentAmplification, SpectralAdamW
from quietgrad.integrations.transformers import PrivateTrainer
from quietgrad.integrations.transformers.hooks import HOOKS, require_hooks
from quietgrad.integrations.transformers.quiet import QuietTrainer
from quietgrad.integrations.transformers.refusals import refuse_arguments
from quietgrad.integrations.transformers.sharding import (
    ShardingTrainer,
    refuse_compiling,
    shard_on_processors,
)

pytestmark = pytest.mark.usefixtures("examined_once")


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(records())


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        raise AssertionError


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2.*expected_batch_size"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ({"train_sampling_strategy": "group_by_length"}, "group_by_length.*Poisson"),
    ({"train_sampling_strategy": "sequential"}, "sequential.*Poisson"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last"),
    ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "dataloader_in_order"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
    ({"skip_memory_metrics": False}, "skip_memory_metrics"),
    ({"debug": "underflow_overflow"}, "debug"),
    ({"push_to_hub": True, "hub_model_id": "a/b"}, "push_to_hub"),
    ({"use_liger_kernel": True}, "use_liger_kernel"),
    ({"optim": "lomo"}, "optim"),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["query"]}, "optim"),
    ({"data_seed": 3}, "data_seed=3.*leave it out"),
    ({"accelerator_config": {"split_batches": True}}, "split_batches=True would have no effect"),
    ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler=False"),
    ({"max_steps": 7}, "max_steps=7.*10 steps"),
    ({"num_train_epochs": 5}, "num_train_epochs=5 would be 25 steps.*has 10"),
    ({"max_grad_norm": 0.5}, r"max_grad_norm=0.5.*PrivacyConfig\(max_grad_norm=0.5\)"),
    ({"compute_loss_func": lambda *_: None}, "compute_loss_func.*per_example_loss"),
    ({"kind": OwnLoss}, "OwnLoss.compute_loss.*per_example_loss"),
    ({"train_dataset": None}, "train_dataset=None"),
    ({"model": torch.nn.Linear(2, 2)}, "no loss of each record is known for Linear"),
    ({"label_smoothing_factor": 0.1, "per_example_loss": bert_loss}, "label_smoothing_factor"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[", ".join(c) for c, _ in REFUSED])
def test_what_cannot_be_private_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        trainer(tmp_path / "of" / "run", **changes)
    assert not (tmp_path / "of").exists()


def test_a_refusal_leaves_folders_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, left in (("empty", True), ("empty/new", False)):
        with pytest.raises(ValueError, match="max_steps=7"):
            trainer(tmp_path / folder, max_steps=7)
        assert (tmp_path / folder).exists() is left


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),  # not every machine lets TrainingArguments have it
        ("deepspeed", {"zero_optimization": {}}),
        ("parallelism_config", object()),
        ("group_by_length", True),
        ("packing", True),
        ("padding_free", True),
        ("activation_offloading", True),
        ("loss_type", "dft"),
        ("n_gpu", 2),
    ],
)
def test_settings_of_other_machines_and_versions(name: str, value: Any, tmp_path: Path) -> None:
    alone = {"n_gpu": 1, "report_to": []}
    refuse_arguments(SimpleNamespace(**alone))
    with pytest.raises(ValueError, match=f"args.{name}="):
        refuse_arguments(SimpleNamespace(**(alone | {name: value})))


ALONE = SimpleNamespace(n_gpu=1, report_to=[])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ACCELERATE_USE_FSDP", r"FSDP's version 1.*fsdp_version 2"),
        ("ACCELERATE_USE_DEEPSPEED", r"ACCELERATE_USE_DEEPSPEED.*fsdp_version"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", r"ACCELERATE_USE_PARALLELISM_CONFIG.*fsdp_version"),
    ],
)
def test_what_a_launcher_asks_for_is_refused(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "1")
    refuse_arguments(ALONE)
    monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match=why):
        refuse_arguments(ALONE)
    monkeypatch.setenv(name, "1")  # which accelerate takes for no
    with pytest.raises(ValueError, match=name):
        refuse_arguments(ALONE)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"fsdp_version": 1}, "FSDP's version 1.*fsdp_version"),
        ({"cpu_offload": True}, "cpu_offload.*leave it out"),
        ({"activation_checkpointing": True}, "activation_checkpointing.*training arguments"),
        ({"xla": True}, "xla.*leave it out"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_settings_of_sharding_are_refused(
    settings: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "false")  # what the arguments set is put back
    refuse_arguments(arguments(tmp_path, fsdp=True, fsdp_config={"fsdp_version": 2}))
    asked = arguments(tmp_path, fsdp=True, fsdp_config={"fsdp_version": 2, **settings})
    with pytest.raises(ValueError, match=why):
        refuse_arguments(asked)


def test_sharding_is_refused_where_the_model_would_be_compiled_or_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=DynamoBackend.NO))
    refuse_compiling(state)
    state.dynamo_plugin.backend = DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="torch_compile=False"):
        refuse_compiling(state)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(ValueError, match="use_cpu=True"):
        shard_on_processors(state, None)


def test_padding_in_front_is_refused(tmp_path: Path) -> None:
    words = tokenizer()
    words.padding_side = "left"
    for changes in ({"data_collator": DataCollatorWithPadding(words)}, {"processing_class": words}):
        with pytest.raises(ValueError, match="padding_side"):
            trainer(tmp_path, **changes)


def test_weights_of_an_earlier_run_have_to_be_asked_for(tmp_path: Path) -> None:
    own = replace(PRIVACY, seed=None, data_are_public=False)
    first = trainer(tmp_path / "one", privacy=own)
    first.train()
    first.save_model(str(tmp_path / "model"))
    model = type(first.model).from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r'epsilon adds.*set accept_start="epsilons-add"'):
        trainer(tmp_path / "two", model=model, privacy=own)
    second = trainer(tmp_path / "two", model=model, privacy=own, accept_start="epsilons-add")
    second.train()
    second.save_model(str(tmp_path / "next"))
    said = json.loads((tmp_path / "next" / "quietgrad.json").read_text())["quietgrad_trained_on"]
    assert [record["epsilon"] for record in said["started_from"]] == [first.epsilon()]


def test_streams_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Stream, a stream.*Poisson"):
        trainer(tmp_path, train_dataset=Stream(), max_steps=5)


def test_arguments_that_were_changed_later_are_refused_too(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    trained.args.gradient_accumulation_steps = 4
    with pytest.raises(ValueError, match="gradient_accumulation_steps=4"):
        trained.train()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_neftune_is_refused_however_it_is_switched_on(tmp_path: Path) -> None:
    """Its hook is silent in evaluation, where padding is looked at."""
    trained = trainer(tmp_path)
    trained.neftune_noise_alpha = 5.0
    with pytest.raises(ValueError, match=r"on the trainer: .*longest record.*take it off"):
        trained.train()
    trained.neftune_noise_alpha = None
    activate_neftune(trained.model, 5.0, trained.accelerator)
    with pytest.raises(ValueError, match=r"on a layer of the model: .*longest record"):
        trained.train()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_gradients_are_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    args = SimpleNamespace(n_gpu=1, report_to=["wandb"])
    with pytest.raises(ValueError, match="WANDB_WATCH=gradients"):
        refuse_arguments(args)


def test_training_records_are_not_evaluated(tmp_path: Path) -> None:
    data = records()
    for eval_dataset in (data, {"a": records(9), "b": data}):
        with pytest.raises(ValueError, match="eval_dataset is the training data"):
            trainer(tmp_path, train_dataset=data, eval_dataset=eval_dataset)
    with pytest.raises(ValueError, match="eval_dataset is the training data"):
        trainer(tmp_path, train_dataset=data).evaluate(data)


def test_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="epsilons add"):
        trainer(tmp_path).hyperparameter_search()


def test_an_optimiser_that_steps_on_releases_is_refused(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SpectralAdamW(model, PersistentAmplification(), lr=1e-3)
    with pytest.raises(TypeError, match=r"PrivacyConfig\(denoising=\)"):
        PrivateTrainer(
            model, arguments(tmp_path), train_dataset=records(), privacy=PRIVACY,
            optimizers=(optimizer, None),
        )  # fmt: skip


def test_an_optimiser_that_asks_for_several_gradients_a_step_is_refused(tmp_path: Path) -> None:
    model = classifier()
    lbfgs = torch.optim.LBFGS(model.parameters())
    for given in ({"optimizers": (lbfgs, None)}, {"optimizer_cls_and_kwargs": (type(lbfgs), {})}):
        with pytest.raises(TypeError, match=r"LBFGS asks for.*steps once a gradient"):
            PrivateTrainer(
                model, arguments(tmp_path), train_dataset=records(), privacy=PRIVACY, **given
            )


def test_a_run_is_neither_begun_twice_nor_gone_on_with_unasked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no private run to go on with"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    trainer(tmp_path, callbacks=[StopAt(3)]).train()
    with pytest.raises(ValueError, match="holds a private run already"):
        trainer(tmp_path).train()
    with pytest.raises(RuntimeError, match="quietgrad epsilon --ledger"):
        trainer(tmp_path).epsilon()
    with pytest.raises(ValueError, match="changed privacy setting"):
        other = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=20, epochs=2)
        trainer(tmp_path, privacy=other).train(resume_from_checkpoint=True)


def test_checkpoints_of_other_runs_are_not_gone_on_from(tmp_path: Path) -> None:
    own = replace(PRIVACY, seed=None)  # the runs of one public seed are one and the same
    for name in ("one", "other"):
        stopping = {"callbacks": [StopAt(3)], "save_strategy": "steps"}
        trainer(tmp_path / name, privacy=own, **stopping).train()
    with pytest.raises(ValueError, match="no whole checkpoint of the private run"):
        trainer(tmp_path / "one", privacy=own).train(str(tmp_path / "other" / "checkpoint-3"))
    (tmp_path / "one" / "checkpoint-3").rename(tmp_path / "kept")
    (tmp_path / "other" / "checkpoint-3").rename(tmp_path / "one" / "checkpoint-3")
    again = trainer(tmp_path / "one", privacy=own)
    with pytest.warns(UserWarning, match="holds no whole checkpoint of its run"):
        again.train(resume_from_checkpoint=True)


def test_a_trainer_that_works_otherwise_is_refused() -> None:
    class Older:
        pass

    with pytest.raises(ImportError, match=r"no Trainer\._clip_grad_norm"):
        require_hooks(Older)
    kinds = (PrivateTrainer, ShardingTrainer, QuietTrainer)
    ours = {name for kind in kinds for name in vars(kind)}
    replaced = {name for name in ours if name in dir(Trainer) and not name.startswith("__")}
    public = {"train", "push_to_hub", "hyperparameter_search", "call_model_init"}
    assert replaced - public == set(HOOKS)


def of_public(**changes: Any) -> dict[str, Any]:
    public = records(20, seed=1)
    return {"eval_dataset": public, "eval_strategy": "epoch", **changes}


STOP = EarlyStoppingCallback()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"callbacks": [STOP], "metric_for_best_model": "loss"}, "has nothing to watch.*eval_loss"),
        (of_public(callbacks=[STOP]), "has nothing to watch"),
        (of_public(callbacks=[STOP], metric_for_best_model="train_loss"), "train_loss.*private"),
        (of_public(metric_for_best_model="eval_train/loss"), "eval_train/loss.*private"),
        (of_public(metric_for_best_model="accuracy"), "'accuracy'.*or give compute_metrics="),
    ],
)
def test_numbers_that_no_evaluation_gives(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        trainer(tmp_path, **changes).train()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_a_public_loss_may_be_watched(tmp_path: Path) -> None:
    made = trainer(tmp_path, **of_public(callbacks=[STOP], metric_for_best_model="eval_loss"))
    made.train()
    assert made.state.best_metric is not None


def test_a_refused_trainer_without_arguments_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: tmp_trainer, which transformers makes where nothing is said."""
    monkeypatch.chdir(tmp_path)

    class Seeded:
        seed = 3

        def __call__(self, found: Any) -> Any:
            return found

    given: dict[str, Any] = {"train_dataset": records(), "privacy": PRIVACY}
    with pytest.raises(ValueError, match=r"data_collator\.seed is set"):
        PrivateTrainer(classifier(), data_collator=Seeded(), **given)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tmp_trainer").mkdir()
    with pytest.raises(ValueError, match=r"data_collator\.seed is set"):
        PrivateTrainer(classifier(), data_collator=Seeded(), **given)
    assert (tmp_path / "tmp_trainer").is_dir()  # it was there
