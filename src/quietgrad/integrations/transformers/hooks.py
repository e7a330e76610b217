"""The methods of Trainer that privacy rests on, looked for before anything is built on them."""

from __future__ import annotations

# Each one has to be there, or what replaces it is never called: losses would be logged, generators'
# states saved, batches shuffled.
HOOKS = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_num_items_in_batch",
    "_init_training_state",
    "_load_rng_state",
    "_prepare_for_training",
    "_run_epoch",
    "_save",
    "_save_checkpoint",
    "_save_rng_state",
    "create_accelerator_and_postprocess",
    "create_model_card",
    "create_scheduler",
    "evaluate",
    "evaluation_loop",
    "floating_point_ops",
    "get_total_train_batch_size",
    "get_train_dataloader",
    "log",
    "num_examples",
    "predict",
    "save_model",
    "training_step",
)


def require_hooks(trainer: type) -> None:
    """Refuses a version of transformers whose Trainer works otherwise.

    Raises:
        ImportError: naming what is missing.
    """
    missing = [name for name in HOOKS if not callable(getattr(trainer, name, None))]
    if missing:
        raise ImportError(
            f"this version of transformers has no Trainer.{missing[0]}, which a private trainer "
            "has to replace; install transformers 5.20 to 5.23"
        )
