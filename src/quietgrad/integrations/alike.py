"""What the processes of a Trainer have to be given alike: with other arguments one of them would
step, evaluate or save where the others do not, and they would wait for it.
"""

from __future__ import annotations

from typing import Any

from quietgrad.distributed.compared.code import code_of

REMEDY = "give every process the same script, and the trainer in it the same arguments"
# Of TrainingArguments. Others may be a process's own: its rank, its folders, what it logs to.
ARGUMENTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "learning_rate", "weight_decay", "optim", "optim_args",
    "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type", "lr_scheduler_kwargs",
    "warmup_steps", "warmup_ratio", "bf16", "fp16", "bf16_full_eval", "label_smoothing_factor",
    "gradient_checkpointing", "activation_checkpointing", "torch_compile", "fsdp", "fsdp_config",
    "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps",
    "save_strategy", "save_steps", "save_only_model", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "logging_strategy", "logging_steps",
    "logging_first_step", "predict_with_generate",
)  # fmt: skip
PLAIN = bool | int | float | str | tuple | list | dict | None


def told_of(trainer: Any, model: Any, per_example_loss: Any) -> dict[str, object]:
    """By name.

    Args:
        trainer: with its arguments, and the optimiser that it was given, if any.
        model: without wrappers.
        per_example_loss: of its records.
    """
    args = trainer.args
    found: dict[str, object] = {
        f"args.{name}": str(getattr(args, name, None)) for name in ARGUMENTS
    }
    made = trainer.optimizer
    defaults = getattr(made, "defaults", {})
    given = {name: value for name, value in defaults.items() if isinstance(value, PLAIN)}
    found["the optimizer"] = type(made).__qualname__, sorted(given.items(), key=str)
    evaluated = trainer.eval_dataset
    several = evaluated if isinstance(evaluated, dict) else {"": evaluated}
    found["eval_dataset"] = [
        (name, len(one) if hasattr(one, "__len__") else one is None)
        for name, one in several.items()
    ]
    return found | dict(code_of(model, per_example_loss))
