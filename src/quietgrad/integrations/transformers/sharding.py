"""A private Trainer whose model accelerate shards: its FSDP plugin in version 2, ``fully_shard``.

accelerate shards the model inside ``train()`` and gives the optimiser the shards; the run clips it
as any model that is sharded over all ranks (docs/fully_sharded.md). Here is what stands around
that: ranks begin alike, parameters are put away, the whole model is saved, settings are refused.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
from torch import nn

from quietgrad.clipping.capture.spread import put_away
from quietgrad.distributed.alike import weights_digest
from quietgrad.distributed.groups.news import in_public
from quietgrad.distributed.together import here
from quietgrad.durable import make_folder
from quietgrad.integrations.transformers.quiet import QuietTrainer
from quietgrad.tensors import is_spread

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
# What a checkpoint holds beside the model -> how its weights were saved.
SAVED = {"pytorch_model_fsdp.bin": FULL, "pytorch_model_fsdp_0": SHARDED}
ALIKE = (
    "call transformers.set_seed, or torch.manual_seed, with one number on all ranks before the "
    "model, its new head or its adapters are made, or load them from one file"
)

LAYERS = (
    'give fsdp_config={"fsdp_version": 2} alone, which shards the layers that transformers names, '
    "or name classes of layers of this model by transformer_layer_cls_to_wrap"
)


class ShardingTrainer(QuietTrainer):
    """``QuietTrainer`` under accelerate's FSDP plugin, where that is asked for."""

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate leaves its plugin out on processors, where every process would go on with the
        whole model; here the processes of a group shard it there, too.
        """
        plugin = plugin_of(self.args)
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            shard_on_processors(state, plugin)
            self.is_fsdp_enabled = True
        if self.is_fsdp_enabled:
            refuse_plugin(state.fsdp_plugin)
            refuse_compiling(state)

    def _require_shardable(self) -> str:
        """Before anything is recorded: that accelerate can shard this model. Gives a digest of the
        weights: a shard of others than the first rank's would be taken as it is. (Of replicas,
        DistributedDataParallel sends the first one's to all.)

        Raises:
            ValueError: with the remedy.
        """
        if not self.is_fsdp_enabled:
            return ""
        plugin, model = self._plugin, self._rested()
        refuse_tables(model)
        if not any(is_spread(p) for p in model.parameters()):
            leave_embeddings(plugin, model)
            refuse_layers(plugin, model)
        return "" if plugin.cpu_ram_efficient_loading else weights_digest(model)

    def _prepare_for_training(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        """accelerate tells the optimiser's parameters by their memory. Of a model that an earlier
        ``train()`` sharded, shards without a row have none, so they are kept here meanwhile.
        """
        if self.model_init is not None:  # the model was made a moment ago
            together = self._session.together
            held = together.all_of(self._require_shardable, "shard the model", in_public)
            together.require_same("the model's weights", held, ALIKE)
        self._as_sharded: list[list[nn.Parameter]] | None = None
        if self.is_fsdp_enabled and any(is_spread(p) for p in self._rested().parameters()):
            made: Any = self.create_optimizer()
            self._as_sharded = [list(group["params"]) for group in made.param_groups]
        found: tuple[Any, Any] = super()._prepare_for_training(*args, **options)
        return found

    def create_scheduler(self, *args: Any, **options: Any) -> Any:
        """Trainer makes it once accelerate is done with the optimiser, and loads a checkpoint into
        both then.
        """
        kept, self._as_sharded = getattr(self, "_as_sharded", None), None
        if kept is not None:
            made: Any = self.optimizer
            for group, parameters in zip(made.param_groups, kept, strict=True):
                group["params"] = parameters
        return super().create_scheduler(*args, **options)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Then parameters are put away: no backward pass does it, and as they were gathered they
        would be old after the next step, and unknown to the optimiser's state.
        """
        with self._whole():
            found = super().evaluation_loop(*args, **options)
        self._rested()
        return found

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Before training nothing is sharded yet, and accelerate, which shards a model with its
        optimiser alone, ends an evaluation there: every process evaluates its part with the whole
        model, which then is as before.

        Raises:
            ValueError: where a process holds other weights than the first, or none.
        """
        prepared: Any = self.accelerator._models
        if not self.is_fsdp_enabled or len(prepared):
            yield
            return
        if self._plugin.cpu_ram_efficient_loading and self.args.world_size > 1:
            raise ValueError(
                "evaluate() or predict() before train() with FSDP's cpu_ram_efficient_loading: "
                "the first process alone holds the weights until train() sends them; leave it out "
                "of fsdp_config, or train first"
            )
        model: Any = self.model
        here().require_same("the model's weights", weights_digest(model), ALIKE)
        rests = next(model.parameters()).device
        prepared.append(model.to(self.args.device))
        try:
            yield
        finally:
            prepared.clear()
            model.to(rests)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Of parameters at rest, whatever a callback has done with the model."""
        self._rested()
        super()._save_checkpoint(*args, **options)

    def _require_readable(self, place: Path) -> None:
        """Before anything is recorded: a checkpoint is read as this trainer saves them.

        Raises:
            ValueError: for one that was saved otherwise.
        """
        saved = next((how for name, how in SAVED.items() if (place / name).exists()), "")
        asked = self._saves
        if saved != asked:
            raise ValueError(
                f"cannot resume: {place.name} was saved {_how(saved)}, and this trainer runs "
                f"{_how(asked)}, which reads other files; {_as(saved)} (the number of processes "
                "may be another)"
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; and the whole model also where checkpoints hold shards, of which Trainer's
        would save nothing. All processes call it.
        """
        if not self._saves or self._saves == FULL:
            super().save_model(output_dir, _internal_call)
            return
        place = Path(output_dir or str(self.args.output_dir))
        if not _internal_call:
            self._save(str(place), state_dict=self.accelerator.get_state_dict(self._rested()))
        elif self.args.should_save:  # a checkpoint, which Trainer fills
            make_folder(place)
            self._session.stamp(place)

    @property
    def _plugin(self) -> Any:
        return self.accelerator.state.fsdp_plugin

    @property
    def _saves(self) -> str:
        """How checkpoints are saved: the plugin's ``state_dict_type``; empty without it."""
        return str(self._plugin.state_dict_type.name) if self.is_fsdp_enabled else ""

    def _bare_model(self) -> Any:
        """Without adapters and wrappers."""
        bare = self.accelerator.unwrap_model(self.model)
        return bare.get_base_model() if hasattr(bare, "get_base_model") else bare

    def _rested(self) -> Any:
        """The model, its parameters at rest."""
        model: Any = self.model
        put_away(model)
        return model


def plugin_of(args: Any) -> Any:
    """accelerate's plugin as the arguments ask for it, or else the launcher; None without one.

    Raises:
        ValueError: for settings that cannot be private, or were not tried, with the remedy.
    """
    given = getattr(args, "fsdp_plugin_args", None)
    said = os.environ.get("ACCELERATE_USE_FSDP", "false").lower()
    launched = said == "true"
    if said in ("1", "y", "yes", "t", "on"):
        raise ValueError(
            f"ACCELERATE_USE_FSDP={said}: transformers reads it as true, and accelerate, which "
            "would shard the model, does not; set it to true, or unset it"
        )
    config = getattr(args, "fsdp_config", None)
    if isinstance(config, dict) and config.get("xla"):
        raise ValueError("fsdp_config['xla'] is torch_xla's, which is not offered; leave it out")
    if given is None and not launched:
        return None
    version = (given or {}).get("fsdp_version") or os.environ.get("FSDP_VERSION", "1")
    if int(version) != 2:
        raise ValueError(
            f"FSDP's version {version} has no gradients of single records, as it makes one flat "
            'tensor of many parameters; set fsdp=True and fsdp_config={"fsdp_version": 2}, or '
            "start by accelerate launch --use_fsdp --fsdp_version 2 (FSDP_VERSION=2)"
        )
    plugin = FullyShardedDataParallelPlugin(**(given or {}))
    refuse_plugin(plugin)
    return plugin


def refuse_plugin(plugin: Any) -> None:
    """As ``plugin_of``, of a plugin of version 2."""
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise ValueError(
            "FSDP's cpu_offload: parameters would wait on another device than the model's, where "
            'they cannot be clipped; leave it out of fsdp_config (and "offload" out of fsdp)'
        )
    if plugin.activation_checkpointing:
        raise ValueError(
            "FSDP's activation_checkpointing renames the parameters, by whose names noise is "
            "drawn, and draws other dropout masks when it runs layers again; leave it out of "
            "fsdp_config, and set activation_checkpointing=True (gradient_checkpointing=True in "
            "older versions) among the training arguments"
        )


def refuse_compiling(state: Any) -> None:
    backend = state.dynamo_plugin.backend
    if getattr(backend, "value", backend) not in ("NO", None):
        raise ValueError(
            "torch_compile with FSDP: accelerate would shard the compiled model, and records are "
            "clipped uncompiled; set torch_compile=False (ACCELERATE_DYNAMO_BACKEND=no)"
        )


def shard_on_processors(state: Any, plugin: Any) -> None:
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


def refuse_layers(plugin: Any, model: nn.Module) -> None:
    """Refuses layers that accelerate 1.15 picks to be sharded by themselves and torch cannot shard
    so: lists of layers, and what is around the ends of the model, which accelerate shards besides.
    ``plugin`` is told the model's layers.

    Raises:
        ValueError: with the remedy.
    """
    try:
        plugin.set_auto_wrap_policy(model)
    except ValueError as error:
        raise ValueError(f"fsdp_config: {str(error).rstrip('.')}; {LAYERS}") from None
    told = getattr(plugin.auto_wrap_policy, "keywords", {})
    kinds, least = told.get("transformer_layer_cls", ()), told.get("min_num_params", math.inf)

    def picked(layer: Any) -> bool:
        return isinstance(layer, tuple(kinds)) or sum(p.numel() for p in layer.parameters()) > least

    embedding, head = _ends(model)
    norm = getattr(fsdp_utils, "_find_final_norm", lambda _: None)(model)
    table = getattr(embedding, "weight", None)
    tied = table is not None and getattr(head, "weight", None) is table
    ends = [end for end in (embedding, norm, head) if end is not None and not picked(end)]
    for name, layer in model.named_modules():
        if layer is model or not picked(layer):
            continue
        if isinstance(layer, nn.ModuleList | nn.ModuleDict):
            why = "torch cannot shard a list of layers"
        elif tied and (layer is embedding or layer is head):
            why = "it shares its weight with the other end of the model, which torch cannot part"
        elif any(m is end for m in layer.modules() for end in ends):
            why = "accelerate shards a layer inside it once more, which torch refuses"
        else:
            continue
        how = "auto_wrap_policy" if least == math.inf else f"min_num_params={least}"
        raise ValueError(f"FSDP's {how} shards {name!r} by itself: {why}; {LAYERS}")


def _ends(model: nn.Module) -> tuple[Any, Any]:
    """Embedding and head."""
    found = [getattr(model, f"get_{end}put_embeddings", lambda: None)() for end in ("in", "out")]
    return found[0], found[1]


def refuse_tables(model: nn.Module) -> None:
    """Refuses an embedding that more than the input and the output layer use.

    Raises:
        ValueError: with the remedy.
    """
    ends = _ends(model)
    table = getattr(ends[0], "weight", None)
    for name, module in model.named_modules():
        if table is not None and module not in ends and module._parameters.get("weight") is table:
            raise ValueError(
                f"FSDP: {name!r} uses the table of the input embedding, too, and accelerate shards "
                "that with the output layer alone, which torch refuses; keep the whole model in "
                "every process (torchrun, or accelerate launch --multi_gpu), or shard it in a loop "
                "of your own (docs/fully_sharded.md)"
            )


def _how(saved: str) -> str:
    return f"with FSDP's state_dict_type={saved!r}" if saved else "without FSDP"


def _as(saved: str) -> str:
    settings = f'{{"fsdp_version": 2, "state_dict_type": "{saved}"}}'
    return f"set fsdp=True and fsdp_config={settings}" if saved else "leave fsdp out"
