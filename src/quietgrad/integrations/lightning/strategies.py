"""How a Trainer spreads a private run over processes: what cannot be private, refused by name
before any work starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from quietgrad.clipping.soundness.processes import OTHERS, refuse_models_of, refuse_wrapped_model
from quietgrad.integrations.lightning.checkpoints import reads_archives, refuse_cut_off

REPLICAS = (
    'use strategy="ddp", which keeps the whole model in every process, devices=1, or '
    "ModelParallelStrategy, whose fully_shard gives each a shard (docs/lightning.md)"
)


def refuse_strategy(trainer: Any) -> None:
    """Refuses strategies other than one device's, replicas and shards over all processes.

    Raises:
        ValueError: naming the strategy, with the remedy.
    """
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy):
        if isinstance(strategy.launcher, _MultiProcessingLauncher):
            name = f"ddp_{strategy.launcher._start_method}"
            raise ValueError(
                f"Trainer(strategy={name!r}) trains in processes that end with fit, and what the "
                f"run knows ends with them; {REPLICAS}"
            )
    elif isinstance(strategy, ModelParallelStrategy):
        refuse_cut(strategy, trainer.world_size)
    elif trainer.world_size != 1 or not isinstance(strategy, SingleDeviceStrategy):
        raise ValueError(
            f"Trainer with {trainer.world_size} devices and {type(strategy).__name__}: "
            f"parameters or records would be spread over processes; {REPLICAS}"
        )


def refuse_cut(strategy: ModelParallelStrategy, world_size: int) -> None:
    """Refuses layers that are cut over processes; shards over all of them are taken.

    Raises:
        ValueError: with the remedy.
    """
    if world_size == 1:
        raise ValueError(
            "ModelParallelStrategy on one process, where there is nothing to shard: leave strategy "
            "out, and fully_shard too, or give devices=2 or more"
        )
    size = strategy._data_parallel_size
    if size == "auto" or int(size) != world_size or strategy._tensor_parallel_size not in (1, "1"):
        raise ValueError(
            f"ModelParallelStrategy(data_parallel_size={size!r}, "
            f"tensor_parallel_size={strategy._tensor_parallel_size!r}) on {world_size} processes: "
            "a private run shards parameters over all of them, and its layers are not cut; give "
            f"data_parallel_size={world_size}, tensor_parallel_size=1, and "
            'fully_shard(part, mesh=self.device_mesh["data_parallel"]) in configure_model'
        )


def refuse_shards(strategy: Any) -> Callable[[], None]:
    """From now on a checkpoint of shards, a directory, is refused by a strategy whose parameters
    are whole, and so is one that was cut off; Lightning tells which one is loaded to the strategy
    alone.

    Returns:
        Puts the strategy back as it was.
    """
    if isinstance(strategy, ModelParallelStrategy):
        return lambda: None
    load = strategy.load_checkpoint

    def checked(checkpoint_path: Any, *args: Any, **options: Any) -> Any:
        if Path(checkpoint_path).is_dir():
            raise ValueError(
                f"ckpt_path={str(checkpoint_path)!r} holds shards, which ModelParallelStrategy "
                f"saved, and {type(strategy).__name__} cannot read; go on with "
                "strategy=ModelParallelStrategy(N, 1) and devices=N, 2 or more (docs/lightning.md)"
            )
        if reads_archives(strategy.checkpoint_io):
            refuse_cut_off(checkpoint_path)
        return load(checkpoint_path, *args, **options)

    strategy.load_checkpoint = checked
    return lambda: vars(strategy).pop("load_checkpoint", None)


def refuse_wrapped(trainer: Any, module: Any) -> None:
    """Refuses parts that are wrapped by torch, and shards where the strategy makes none.

    Raises:
        ValueError: naming the part, with the remedy.
    """
    refuse_models_of(module, OTHERS)
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        refuse_wrapped_model(module)
