"""A private Trainer whose model accelerate shards: its FSDP plugin in version 2, ``fully_shard``.

accelerate shards the model inside ``train()`` and gives the optimiser the shards; the run clips such
a model as it clips any that is sharded over all ranks (docs/fully_sharded.md). Here is what stands
around that: that all ranks begin alike, what is saved, and which settings are refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from quietgrad.clipping.capture.spread import put_away
from quietgrad.distributed.alike import weights_digest
from quietgrad.durable import make_folder
from quietgrad.integrations.transformers.quiet import QuietTrainer

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
# What a checkpoint holds beside the model -> how its weights were saved.
SAVED = {"pytorch_model_fsdp.bin": FULL, "pytorch_model_fsdp_0": SHARDED}
ALIKE = (
    "call transformers.set_seed, or torch.manual_seed, with one number on all ranks before the "
    "model, its new head or its adapters are made, or load them from one file"
)


class ShardingTrainer(QuietTrainer):
    """``QuietTrainer`` under accelerate's FSDP plugin, where that is asked for."""

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate leaves its plugin out on processors, where every process would go on with the
        whole model; here the processes of a group shard it there, too.
        """
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if state.distributed_type == DistributedType.MULTI_CPU:
            plugin = plugin_of(self.args)
            if plugin is not None:
                _shard_on_processors(state, plugin)
                self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            refuse_plugin(state.fsdp_plugin)
            _refuse_compiling(state)

    def _prepare_for_training(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Before accelerate shards: a shard of other weights than the others' would be taken as it
        is. (Of replicas, DistributedDataParallel sends the first one's to all.)
        """
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            put_away(self.model)
            if not plugin.cpu_ram_efficient_loading:  # else the first one's are sent
                self._session.together.require_same(
                    "the model's weights", weights_digest(self.model), ALIKE
                )
            leave_embeddings(plugin, self.model)
        found: tuple[Any, Any] = super()._prepare_for_training(*args, **options)
        return found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Raises:
        ValueError: for a checkpoint that was saved otherwise than this trainer saves.
        """
        place = Path(resume_from_checkpoint)
        saved = next((how for name, how in SAVED.items() if (place / name).exists()), "")
        asked = self._saves() if self.is_fsdp_enabled else ""
        if saved != asked:
            raise ValueError(
                f"cannot resume: {place.name} was saved {_how(saved)}, and this trainer runs "
                f"{_how(asked)}, which reads other files; go on as the run was begun"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; and the whole model also where checkpoints hold shards, of which Trainer's
        would save nothing. All processes call it.
        """
        if not self.is_fsdp_enabled or self._saves() == FULL:
            super().save_model(output_dir, _internal_call)
            return
        if not _internal_call:
            self._save(output_dir, state_dict=self.accelerator.get_state_dict(self.model))
        elif self.args.should_save:  # a checkpoint
            make_folder(Path(output_dir or self.args.output_dir))
            self._session.stamp(Path(output_dir or self.args.output_dir))

    def _saves(self) -> str:
        """How checkpoints are saved: the plugin's state_dict_type."""
        return str(self.accelerator.state.fsdp_plugin.state_dict_type.name)


def plugin_of(args: Any) -> Any:
    """accelerate's plugin as the arguments ask for it, or else the launcher; None without one."""
    given = getattr(args, "fsdp_plugin_args", None)
    if given is not None:
        return FullyShardedDataParallelPlugin(**given)
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return FullyShardedDataParallelPlugin() if launched else None


def refuse_sharding(args: Any) -> None:
    """Refuses settings of fully sharded training that cannot be private, or were not tried.

    Raises:
        ValueError: with the remedy.
    """
    config = getattr(args, "fsdp_config", None)
    if isinstance(config, dict) and config.get("xla"):
        raise ValueError("fsdp_config['xla'] is sharding by torch_xla, which is not offered; leave it out")
    plugin = plugin_of(args)
    if plugin is not None:
        refuse_plugin(plugin)


def refuse_plugin(plugin: Any) -> None:
    """As ``refuse_sharding``, of the plugin itself."""
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"FSDP in version {plugin.fsdp_version} has no gradients of single records: its "
            'parameters are flattened together; ask for version 2: fsdp_config={"fsdp_version": '
            "2}, or accelerate launch --fsdp_version 2 (FSDP_VERSION=2)"
        )
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise ValueError(
            "FSDP's cpu_offload: parameters would wait on another device than the model's, where "
            'they cannot be clipped; leave it out of fsdp_config (and "offload" out of fsdp)'
        )
    if plugin.activation_checkpointing:
        raise ValueError(
            "FSDP's activation_checkpointing renames the parameters, by whose names noise is "
            "drawn, and draws other dropout masks when it runs layers again; leave it out of "
            "fsdp_config, and set gradient_checkpointing=True among the training arguments"
        )


def _refuse_compiling(state: Any) -> None:
    backend = state.dynamo_plugin.backend
    if getattr(backend, "value", backend) not in ("NO", None):
        raise ValueError(
            "torch_compile with FSDP: accelerate would shard the compiled model, and records are "
            "clipped uncompiled; set torch_compile=False (ACCELERATE_DYNAMO_BACKEND=no)"
        )


def _shard_on_processors(state: Any, plugin: Any) -> None:
    """Tells accelerate's state what it is told where there are GPUs."""
    if torch.accelerator.is_available():
        raise ValueError(
            "args.use_cpu=True with FSDP, where there is an accelerator: fully_shard would move "
            "the model to it; leave use_cpu out, or hide the accelerator (CUDA_VISIBLE_DEVICES=)"
        )
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def leave_embeddings(plugin: Any, model: nn.Module) -> None:
    """Leaves the layers around the embedding to what is sharded together, where the user names no
    layers to shard by themselves. accelerate 1.15 shards the embedding on its own, also where it
    has sharded what is around it before (``BertEmbeddings`` is among the layers that transformers
    does not split), and torch refuses that.
    """
    layers = getattr(model, "_no_split_modules", None)
    find = getattr(model, "get_input_embeddings", None)
    if plugin.transformer_cls_names_to_wrap is not None or not layers or find is None:
        return
    embedding = find()
    around = {type(m).__name__ for m in model.modules() if any(c is embedding for c in m.modules())}
    plugin.transformer_cls_names_to_wrap = [name for name in layers if name not in around]


def _how(saved: str) -> str:
    return f"with FSDP's state_dict_type={saved!r}" if saved else "without FSDP"
