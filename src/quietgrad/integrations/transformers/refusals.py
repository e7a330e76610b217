"""What Trainer can do that cannot be private, refused by name before any work starts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import IterableDataset

from quietgrad.clipping.soundness.processes import OTHERS, refuse_models_of, refuse_wrapped_model
from quietgrad.denoising import SpectralAdamW, SpectralSGD
from quietgrad.integrations.monitors import refuse_watched
from quietgrad.integrations.public import refuse_private_evaluation
from quietgrad.integrations.reporting import refuse_measuring, without_system_metrics
from quietgrad.integrations.transformers.loading import refuse_other_draws
from quietgrad.integrations.transformers.sharding import plugin_of
from quietgrad.loading.reading import require_by_number
from quietgrad.plan import PrivacyPlan

REPLICAS = (
    "keep the whole model in every process (torchrun, or accelerate launch --multi_gpu), or shard "
    'it by fsdp=True with fsdp_config={"fsdp_version": 2} (docs/fully_sharded.md)'
)
# What a launcher says in the environment -> the argument that says the same.
LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}

# Argument -> (whether its value is refused, why, what to do). Missing arguments are not refused.
ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "gradient_accumulation_steps": (
        lambda v: v != 1,
        "a private step is one Poisson batch, whatever its size",
        "leave it at 1: PrivacyConfig(expected_batch_size=) says how large a batch is, "
        "per_device_train_batch_size how much of it is read at once",
    ),
    "auto_find_batch_size": (
        bool,
        "it starts training again with another batch size, and what was released stays released",
        "set per_device_train_batch_size; it changes memory and time and nothing else",
    ),
    "train_sampling_strategy": (
        lambda v: v != "random",
        "batches are Poisson samples: grouping or ordering records makes one's batch depend on the "
        "others, and no epsilon covers that",
        'leave it at "random"',
    ),
    "group_by_length": (bool, "records would be batched by the others' lengths", "set it False"),
    "dataloader_drop_last": (
        bool,
        "a small batch must be released like any other",
        "set it False",
    ),
    "dataloader_in_order": (
        lambda v: not v,
        "micro-batches make up one batch after another",
        "set it True",
    ),
    "fp16": (
        bool,
        "a gradient scaler rescales gradients and skips steps by what it finds in the batch",
        "use bf16=True",
    ),
    "mixed_precision": (  # from a launcher's environment, whatever fp16 says
        lambda v: v not in ("no", "bf16", None),
        "a gradient scaler rescales gradients and skips steps by what it finds in the batch",
        "use bf16 (ACCELERATE_MIXED_PRECISION, accelerate launch --mixed_precision)",
    ),
    "neftune_noise_alpha": (
        lambda v: v is not None,
        "the noise that it puts on a record depends on the longest record of the micro-batch",
        "leave it out",
    ),
    "deepspeed": (bool, "it clips and reduces gradients itself", REPLICAS),
    "parallelism_config": (bool, "a record would be spread over processes", REPLICAS),
    "use_liger_kernel": (
        bool,
        "its loss is fused over the batch, and its layers have no per-example gradient",
        "set it False",
    ),
    "activation_offloading": (
        bool,
        "it takes hold of what the backward pass keeps",
        "set it False",
    ),
    "include_num_input_tokens_seen": (
        lambda v: v not in ("no", False),
        "how many tokens the batches held is private",
        'leave it at "no"',
    ),
    "skip_memory_metrics": (
        lambda v: not v,
        "peaks of memory depend on the sizes of batches, which are private",
        "leave it True",
    ),
    "debug": (bool, "it prints numbers of the forward passes on private records", "leave it out"),
    "push_to_hub": (
        bool,
        "while training lasts output_dir holds the secrets that the noise follows from",
        "call trainer.push_to_hub() once training has ended",
    ),
    "packing": (
        bool,
        "several records in one row share an attention window, a place and a clipping norm",
        "set packing=False; a record is a row",
    ),
    "padding_free": (bool, "the records of a batch would be one row", "set it False"),
    "optim": (
        lambda v: any(word in str(getattr(v, "value", v)) for word in ("lomo", "layerwise")),
        "it updates weights while the backward pass runs, before clipping and noise",
        "use an optimiser that steps on .grad",
    ),
}


# Methods of a subclass, or of what is mixed into it -> why not, what to do.
_NO_LOSS = (
    "would not be trained with: it returns one loss for a batch",
    "give per_example_loss= (model, batch -> [records] losses)",
)
_NO_STEP = (
    "stands where the private step is, and its gradients would be stepped on as they are",
    "give per_example_loss=, or use callbacks (on_step_begin, on_pre_optimizer_step)",
)
_NO_BATCHES = (
    "would give other batches than those that are accounted for",
    "give train_dataset and data_collator",
)
METHODS = {
    "compute_loss": _NO_LOSS,
    "training_step": _NO_STEP,
    "_run_epoch": _NO_STEP,
    "_inner_training_loop": _NO_STEP,
    "get_train_dataloader": _NO_BATCHES,
    "get_batch_samples": _NO_BATCHES,
    "_get_train_sampler": (
        "would not be asked: every record is drawn by a coin of its own, at one rate",
        "leave it out; losses of rare classes may be multiplied in per_example_loss=",
    ),
    "_prepare_inputs": (
        "would see no batch that is trained on",
        "change records in train_dataset, in data_collator or in per_example_loss=",
    ),
    "_get_grad_norm": ("stands where it is seen what the optimiser steps on", "leave it out"),
}
# Of these, what nobody would call or miss where it is put on the trainer itself.
UNCALLED = ("compute_loss", "_get_train_sampler", "_prepare_inputs")


def refuse_arguments(args: Any) -> None:
    """Refuses settings of ``TrainingArguments`` (or TRL's) that cannot be private.

    Raises:
        ValueError: naming the argument, why, and the remedy.
    """
    for name, (refused, why, remedy) in ARGUMENTS.items():
        value = getattr(args, name, None)
        if hasattr(args, name) and refused(value):
            raise ValueError(f"args.{name}={_shown(value)}: {why}; {remedy}")
    for name, argument in LAUNCHED.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            _, why, remedy = ARGUMENTS[argument]
            raise ValueError(
                f"{name} is set (accelerate launch, or its configuration): {why}; {remedy}"
            )
    plugin_of(args)
    refuse_other_draws(args)
    loss = getattr(args, "loss_type", "nll")
    if isinstance(loss, str) and loss != "nll":  # a list is DPOConfig's, whose trainer judges it
        raise ValueError(
            f"args.loss_type={loss!r} is a loss of the batch; leave it at 'nll', or give "
            "per_example_loss="
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"args.n_gpu={args.n_gpu}: one process would spread batches over devices "
            f"(DataParallel); start one process for each (torchrun --nproc-per-node {args.n_gpu} "
            "...), or show it one device (CUDA_VISIBLE_DEVICES=0)"
        )
    watched = os.environ.get("WANDB_WATCH", "false")
    if "wandb" in (args.report_to or ()) and watched in ("all", "gradients"):
        raise ValueError(
            f"WANDB_WATCH={watched} sends histograms of gradients before their noise; unset it, or "
            "use WANDB_WATCH=parameters"
        )
    refuse_measuring(args.report_to or ())
    without_system_metrics()


def refuse_before_training(trainer: Any) -> None:
    """Arguments once more, which may have been changed since; a model that was wrapped, or sharded
    by another than accelerate; and NEFTune where it was switched on
    past them: its hook acts in training alone, where no look at padding would find it.

    Raises:
        ValueError: with the remedy.
    """
    refuse_arguments(trainer.args)
    for name in UNCALLED:
        if name in vars(trainer):
            why, instead = METHODS[name]
            raise ValueError(f"trainer.{name} {why}; {instead}")
    _refuse_loss(trainer.compute_loss_func)
    refuse_watched(trainer)
    refuse_measuring(trainer.callback_handler.callbacks)
    refuse_models_of(trainer.model, OTHERS)
    if not trainer.is_fsdp_enabled:
        refuse_wrapped_model(trainer.model)
    noisy = [m for m in trainer.model.modules() if hasattr(m, "neftune_noise_alpha")]
    if noisy or getattr(trainer, "neftune_noise_alpha", None) is not None:
        where = "a layer of the model" if noisy else "the trainer"
        raise ValueError(
            f"neftune_noise_alpha is set on {where}: {ARGUMENTS['neftune_noise_alpha'][1]}; "
            "take it off (deactivate_neftune, trainer.neftune_noise_alpha = None)"
        )


def refuse_optimizer(options: dict[str, Any]) -> None:
    """Refuses optimisers that Trainer's loop cannot step.

    Args:
        options: what the trainer is made with.

    Raises:
        TypeError: naming the optimiser, and the remedy.
    """
    made = (options.get("optimizers") or (None,))[0]
    kind = (options.get("optimizer_cls_and_kwargs") or (type(made),))[0]
    if not isinstance(kind, type):
        return
    if issubclass(kind, SpectralAdamW | SpectralSGD):
        raise TypeError(
            "optimizers: Trainer calls optimizer.step(), and this one steps on the release "
            "itself; give PrivacyConfig(denoising=), which denoises what is written to .grad"
        )
    if issubclass(kind, torch.optim.LBFGS):
        raise TypeError(
            "optimizers: LBFGS asks for the gradient of a batch several times a step, and every "
            "one would be a release; use an optimiser that steps once a gradient (AdamW, SGD)"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"<{type(value).__name__}>"


def _refuse_loss(compute_loss_func: Any) -> None:
    if compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func returns one loss for a batch, in which records change each other's "
            f"weight; {_NO_LOSS[1]}"
        )


def refuse_functions(trainer: type, base: type, options: dict[str, Any]) -> None:
    """Refuses losses of a whole batch.

    Args:
        trainer: class of the trainer.
        base: the private trainer that it may be a subclass of.
        options: what it is made with.

    Raises:
        ValueError: with the remedy.
    """
    _refuse_loss(options.get("compute_loss_func"))
    own = trainer.__mro__[: trainer.__mro__.index(base)]
    for name, (why, instead) in METHODS.items():
        for kind in own:
            if name in vars(kind):
                raise ValueError(f"{kind.__name__}.{name} {why}; {instead}")


def refuse_data(train_dataset: Any, eval_dataset: Any) -> None:
    """Refuses streams, and private records where public ones are meant.

    Raises:
        TypeError, ValueError: with the remedy.
    """
    if train_dataset is None:
        raise ValueError("train_dataset=None: the plan needs to know how many records there are")
    if isinstance(train_dataset, IterableDataset) or not (
        hasattr(train_dataset, "__len__") and hasattr(train_dataset, "__getitem__")
    ):
        raise TypeError(
            f"train_dataset is of type {type(train_dataset).__name__}, a stream: Poisson sampling "
            "draws every record by a coin of its own, which needs a map-style data set "
            "(list(stream), or datasets.Dataset)"
        )
    require_by_number(train_dataset, "train_dataset")
    refuse_private_evaluation(eval_dataset, (train_dataset,))


def refuse_collator(data_collator: Any) -> None:
    """Refuses padding in front of a record: how much there is depends on the longest one that is
    read with it, and so do the record's positions, which many models learn. And masks that follow
    from a known seed: one record more moves the masks of all that come after it.

    Raises:
        ValueError: with the remedy.
    """
    tokenizer = getattr(data_collator, "tokenizer", None)
    if getattr(tokenizer, "padding_side", "right") == "left":
        raise ValueError(
            "the tokenizer's padding_side is 'left': a record's positions would depend on the "
            "longest record that is read with it; set tokenizer.padding_side = 'right'"
        )
    if getattr(data_collator, "seed", None) is not None:
        raise ValueError(
            "data_collator.seed is set: what it draws for a record would be known, and follow from "
            "how much it drew for others before; leave seed out (draws are keyed secretly)"
        )


def refuse_contradictions(args: Any, plan: PrivacyPlan) -> None:
    """Refuses numbers of ``TrainingArguments`` that say something else than the plan. What was left
    at its default says nothing.

    Raises:
        ValueError: with the remedy.
    """
    if args.max_steps > 0 and args.max_steps != plan.steps:
        raise ValueError(
            f"args.max_steps={args.max_steps}, and the plan has {plan.steps} steps, which its "
            "noise was calibrated for; leave max_steps out, or give PrivacyConfig(steps=), or a "
            "plan that was extended(steps=)"
        )
    epochs, q = args.num_train_epochs, plan.sampler.sample_rate
    if epochs != _default(args, "num_train_epochs") and max(1, round(epochs / q)) != plan.steps:
        raise ValueError(
            f"args.num_train_epochs={epochs} would be {max(1, round(epochs / q))} steps, and the "
            f"plan has {plan.steps}, which its noise was calibrated for; leave num_train_epochs "
            "out, or give PrivacyConfig(epochs=), or a plan that was extended(epochs=)"
        )
    norm, meant = args.max_grad_norm, (None, 0, 0.0, plan.max_grad_norm)
    if norm not in meant and norm != _default(args, "max_grad_norm"):
        raise ValueError(
            f"args.max_grad_norm={norm} clips a batch's gradient, which is clipped per record "
            f"already; leave it out, and give PrivacyConfig(max_grad_norm={norm}) if that is meant"
        )


def _default(args: Any, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(args) if field.name == name)
