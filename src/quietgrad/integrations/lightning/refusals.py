"""What a LightningModule and its Trainer can do that cannot be private, refused by name before any
work starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import callbacks, profilers
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from quietgrad.denoising import SpectralAdamW, SpectralSGD
from quietgrad.integrations.lightning.monitors import is_of
from quietgrad.integrations.lightning.strategies import refuse_strategy
from quietgrad.integrations.owners import Owners
from quietgrad.integrations.public import refuse_private_evaluation
from quietgrad.integrations.reporting import refuse_measuring, without_system_metrics
from quietgrad.plan import PrivacyConfig, PrivacyPlan

HALF = "use 32-true or bf16-mixed"


def precision_of(plugin: Any) -> str:
    """Name of a precision, or of a plugin with a backward pass of its own."""
    known = type(plugin) in (Precision, MixedPrecision)
    return str(plugin.precision) if known else type(plugin).__name__


# Setting of the Trainer -> (what it is set to, whether that is refused, why, what to do).
Setting = tuple[Callable[[Any], Any], Callable[[Any], Any], str, str]
SETTINGS: dict[str, Setting] = {
    "fast_dev_run": (
        lambda t: t.fast_dev_run,
        bool,
        "it trains on private records, and what it releases counts",
        "try the script on made-up records, or with PrivacyConfig(steps=1) and a directory of its "
        "own",
    ),
    "accumulate_grad_batches": (
        lambda t: t.accumulate_grad_batches,
        lambda v: v != 1,
        "a private step is one Poisson batch, whatever its size",
        "leave it at 1: PrivacyConfig(expected_batch_size=) says how large a batch is, the "
        "DataLoader's batch_size how much of it is read at once",
    ),
    "gradient_clip_val": (
        lambda t: t.gradient_clip_val,
        lambda v: v,
        "records are clipped one by one, and this would clip the noisy mean",
        "leave it out; PrivacyConfig(max_grad_norm=) is the norm that records are clipped to",
    ),
    "precision": (
        lambda t: precision_of(t.precision_plugin),
        lambda v: v not in ("32-true", "bf16-mixed"),
        "a gradient scaler skips steps by what it finds in the batch, and narrow weights are not "
        "what the noise was calibrated for",
        HALF,
    ),
    "overfit_batches": (
        lambda t: t.overfit_batches,
        bool,
        "it would train on the same few batches, and no epsilon covers that",
        "leave it out; give a small data set instead",
    ),
    "limit_train_batches": (
        lambda t: t.limit_train_batches,
        lambda v: isinstance(v, int) or v != 1.0,
        "an epoch is 1 / q steps, and the plan says how many there are",
        "leave it out; PrivacyConfig(epochs=) or PrivacyConfig(steps=)",
    ),
    "detect_anomaly": (
        lambda t: t._detect_anomaly,
        bool,
        "it prints what the forward pass on private records found",
        "leave it out, or debug on made-up records",
    ),
    "reload_dataloaders_every_n_epochs": (
        lambda t: t.reload_dataloaders_every_n_epochs,
        bool,
        "the plan is for one data set, and its rate follows from the number of its records",
        "leave it out",
    ),
}

# Callback or profiler -> (why, what to do).
COMPANIONS: dict[type, tuple[str, str]] = {
    callbacks.BatchSizeFinder: (
        "it tries batch sizes on private records, which no ledger counts",
        "set the DataLoader's batch_size; it changes memory and time and nothing else",
    ),
    callbacks.LearningRateFinder: (
        "it trains on private records, which no ledger counts, and chooses by their loss",
        "find a rate on public data",
    ),
    callbacks.GradientAccumulationScheduler: (
        "a private step is one Poisson batch",
        "PrivacyConfig(expected_batch_size=)",
    ),
    callbacks.StochasticWeightAveraging: (
        "it goes once more over the training records, which no ledger counts",
        "use EMAWeightAveraging, which looks at weights alone",
    ),
    callbacks.ModelPruning: (
        "pruning puts other parameters in the place of weights while the run trains them",
        "prune once fit has ended (torch.nn.utils.prune), which costs no privacy",
    ),
    callbacks.DeviceStatsMonitor: (
        "peaks of memory depend on the sizes of batches, which are private",
        "leave it out",
    ),
    callbacks.ThroughputMonitor: ("the sizes of batches are private", "leave it out"),
    SpikeDetection: (
        "it stops training by the loss of training records, and writes down which batches they "
        "were; that loss is private, and nobody sees it",
        "leave it out; EarlyStopping may watch a loss of public records",
    ),
    profilers.AdvancedProfiler: (
        "how often a function ran tells how many records were drawn",
        'use profiler="simple"',
    ),
    profilers.PyTorchProfiler: (
        "it records operations on private records, with their shapes",
        'use profiler="simple"',
    ),
}

# Methods of a module (or data module) that see records, or loss, of a whole batch.
HOOKS = {
    "training_step": "nothing would call it; return the loss of each record from per_example_loss",
    "backward": "the run makes the gradient; change what is learnt in per_example_loss",
}
# Lightning's own error sends to manual optimisation, which is refused.
SEVERAL_OPTIMIZERS = (
    "configure_optimizers returned several optimisers: a step is one release, and one optimiser "
    "steps on it; return one, with a group of parameters for each rate "
    '(torch.optim.AdamW([{"params": ..., "lr": ...}, ...])), or write the loop yourself '
    "(docs/loops.md)"
)
TRANSFERS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
WHERE = (
    "a batch of the run is read micro-batch by micro-batch, behind the Trainer's back; change "
    "records in the data set, in collate_fn or in per_example_loss"
)


def refuse_trainer(trainer: Any) -> None:
    """Refuses settings of a ``Trainer`` that cannot be private.

    Raises:
        ValueError: naming the setting, why, and the remedy.
    """
    refuse_strategy(trainer)
    for name, (value_of, refused, why, remedy) in SETTINGS.items():
        value = value_of(trainer)
        if refused(value):
            raise ValueError(f"Trainer({name}={value!r}): {why}; {remedy}")
    for kind, (why, remedy) in COMPANIONS.items():
        if any(is_of(one, kind) for one in (*trainer.callbacks, trainer.profiler)):
            raise ValueError(f"{kind.__name__}: {why}; {remedy}")
    refuse_measuring(trainer.loggers)
    without_system_metrics()


def refuse_module(module: Any, base: type) -> None:
    """Refuses a module that would train past the run.

    Args:
        module: to be trained.
        base: ``PrivateLightningModule``.

    Raises:
        ValueError, TypeError: with the remedy.
    """
    name = type(module).__name__
    if not isinstance(getattr(module, "privacy", None), PrivacyConfig):
        raise TypeError(f"{name}.privacy has to be a PrivacyConfig: it says how private a run is")
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}.automatic_optimization=False: steps would be made that no ledger counts; "
            "leave it True, or write the loop yourself (docs/loops.md)"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ValueError(
            f"{name} is compiled as a whole; clipping runs models uncompiled: give it as it was "
            "made, or compile its parts"
        )
    for hook, remedy in HOOKS.items():
        if getattr(type(module), hook) is not getattr(base, hook):
            raise ValueError(f"{name}.{hook} is a step of a whole batch: {remedy}")
    clips = "configure_gradient_clipping"
    if getattr(type(module), clips) is not getattr(base, clips):
        _, _, why, remedy = SETTINGS["gradient_clip_val"]
        raise ValueError(f"{name}.{clips}: {why}; {remedy}")
    if type(module).per_example_loss is base.per_example_loss:  # type: ignore[attr-defined]
        raise ValueError(f"{name} has no per_example_loss(self, batch) -> [records] losses")
    if not callable(module.per_example_loss):
        raise ValueError(
            f"{name}.per_example_loss={module.per_example_loss!r} is no method; write "
            "per_example_loss(self, batch) -> [records] losses"
        )
    if any(p._backward_hooks for p in module.parameters()):
        raise ValueError(
            f"parameters of {name} have hooks on their gradients, which would see them before "
            "their noise; remove them (a logger's watch(log='gradients'), say)"
        )


def refuse_transfers(owner: Any, plain: type) -> None:
    """Refuses hooks that move or change a batch.

    Args:
        owner: a module, or a data module.
        plain: Lightning's class of it.

    Raises:
        ValueError: with the remedy.
    """
    for hook in TRANSFERS:
        if getattr(type(owner), hook) is not getattr(plain, hook):
            raise ValueError(f"{type(owner).__name__}.{hook} would not see a record: {WHERE}")


def refuse_secrets(owner: Any, privacy: PrivacyConfig) -> None:
    """Refuses hyperparameters that hold the seed of a private run: they are logged, and saved.

    Raises:
        ValueError: with the remedy; no value.
    """
    if privacy.seed is None or privacy.data_are_public:
        return
    for name, value in dict(getattr(owner, "hparams", {})).items():
        held = isinstance(value, PrivacyConfig) and value.seed is not None
        if held or (value == privacy.seed and not isinstance(value, bool)):
            raise ValueError(
                f"hyperparameter {name!r} of {type(owner).__name__} holds the seed of a private "
                "run, and hyperparameters are logged and saved; leave the seed out, or "
                f"self.save_hyperparameters(ignore={name!r})"
            )


def refuse_optimizers(optimizers: list[Any]) -> None:
    """Refuses optimisers that do not step once a batch on ``.grad``, and none at all.

    Raises:
        TypeError: with the remedy.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, _MockOptimizer):
            raise TypeError(
                "configure_optimizers returned None: every step would cost privacy and train "
                "nothing; return an optimiser"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS asks for the gradient of a batch several times a step, and every one would "
                "be a release; use an optimiser that steps once a gradient"
            )
        if isinstance(optimizer, SpectralAdamW | SpectralSGD):
            raise TypeError(
                f"{type(optimizer).__name__} steps on the release itself, and the Trainer calls "
                "optimizer.step(); give PrivacyConfig(denoising=), which denoises .grad"
            )


def name_remedy(exception: BaseException) -> None:
    """Where Lightning refuses several optimisers, says what a private module does instead."""
    if isinstance(exception, RuntimeError) and "multiple optimizers" in str(exception):
        exception.args = (SEVERAL_OPTIMIZERS,)


def refuse_contradictions(trainer: Any, plan: PrivacyPlan) -> None:
    """Refuses numbers of the Trainer that say something else than the plan.

    Raises:
        ValueError: with the remedy.
    """
    if trainer.max_steps not in (-1, plan.steps):
        raise ValueError(
            f"Trainer(max_steps={trainer.max_steps}), and the plan has {plan.steps} steps, which "
            "its noise was calibrated for; leave max_steps out, or give PrivacyConfig(steps=)"
        )
    epochs, q = trainer.max_epochs, plan.sampler.sample_rate
    if epochs not in (None, -1) and max(1, round(epochs / q)) != plan.steps:
        raise ValueError(
            f"Trainer(max_epochs={epochs}) would be {max(1, round(epochs / q))} steps, and the "
            f"plan has {plan.steps}, which its noise was calibrated for; leave max_epochs out, or "
            "give PrivacyConfig(epochs=)"
        )


def refuse_private_loaders(loaders: Any, dataset: Any, owners: Owners | None = None) -> None:
    """Refuses the training records as validation or test records, whole or in part, and others of
    the same users.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    for loader in loaders if isinstance(loaders, list | tuple) else (loaders,):
        records = getattr(loader, "dataset", loader)
        refuse_private_evaluation(records, (dataset,), "what is validated or tested on")
        if owners is not None:
            owners.refuse_shared(records, "what is validated or tested on")
