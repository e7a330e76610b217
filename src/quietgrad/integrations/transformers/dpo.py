"""TRL's DPOTrainer with private steps: learning from preferences, a record a prompt with its chosen
and its rejected answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trl import DPOTrainer

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.distributed.groups.news import telling
from quietgrad.integrations.folders import leaves_no_folder
from quietgrad.integrations.transformers.losses import refuse_own_losses
from quietgrad.integrations.transformers.sft import (
    no_records_in_warnings,
    require_columns,
    table_of,
    without_gaps,
)
from quietgrad.integrations.transformers.sharding import plugin_of
from quietgrad.integrations.transformers.trainer import PrivateTrainer
from quietgrad.plan import PrivacyConfig, PrivacyPlan
from quietgrad.tensors import Batch

TOKENISED = ("prompt_ids", "chosen_ids", "rejected_ids")
PAIRED = ("input_ids", "attention_mask", "completion_mask")


@dataclass(frozen=True)
class Pair:
    """What a model thinks of the two answers of each record; everything is [b]. Private.

    Attributes:
        chosen, rejected: log-ratios of the answer's probability, the policy's over the reference's.
        chosen_length, rejected_length: learnt tokens, as TRL counts them.
        beta: how near to the reference.
        smoothing: of the labels, for the robust loss.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    beta: float
    smoothing: float

    @property
    def delta(self) -> Tensor:
        """By how much more the policy has moved to the chosen answer."""
        return self.chosen - self.rejected

    @property
    def delta_per_token(self) -> Tensor:
        """The same of means over tokens."""
        return self.chosen / self.chosen_length - self.rejected / self.rejected_length


def _robust(p: Pair) -> Tensor:
    right, wrong = F.logsigmoid(p.beta * p.delta), F.logsigmoid(-p.beta * p.delta)
    return (p.smoothing * wrong - (1 - p.smoothing) * right) / (1 - 2 * p.smoothing)


# Losses of one record, by TRL's names and formulas; what is not here is a loss of the batch (aot
# sorts it, sft is a mean over its tokens), or is not offered.
LOSSES: dict[str, Callable[[Pair], Tensor]] = {
    "sigmoid": lambda p: -F.logsigmoid(p.beta * p.delta),
    "sigmoid_norm": lambda p: -F.logsigmoid(p.beta * p.delta_per_token),
    "hinge": lambda p: torch.relu(1 - p.beta * p.delta),
    "ipo": lambda p: (p.delta_per_token - 1 / (2 * p.beta)) ** 2,
    "robust": _robust,
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.chosen) + torch.sigmoid(p.beta * p.rejected),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.chosen) + 1 - torch.sigmoid(p.beta * p.delta),
}


@dataclass(frozen=True)
class PreferenceLoss:
    """``loss(model, batch)``: [b] losses, each a function of its record alone. Private.

    Attributes:
        names, weights: losses that are added up.
        beta, smoothing: TRL's.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    beta: float
    smoothing: float

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        moved, lengths = [], []
        for answer in (0, 1):  # one after the other: a record stays one row of every layer
            ids, mask, learnt = (batch[name][:, answer] for name in PAIRED)
            logits = model(input_ids=ids, attention_mask=mask)["logits"]
            logits = logits[:, logits.shape[1] - ids.shape[1] :]  # virtual tokens lead
            each = -F.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
            ).view(ids.shape[0], -1)
            moved.append((each * learnt[:, 1:]).sum(1) - batch["ref_logps"][:, answer])
            lengths.append(learnt.sum(1).clamp_min(1))
        pair = Pair(
            moved[0], moved[1], lengths[0], lengths[1], beta=self.beta, smoothing=self.smoothing
        )
        total = torch.zeros_like(pair.chosen)
        for name, weight in zip(self.names, self.weights, strict=True):
            total = total + weight * LOSSES[name](pair)
        return total


@dataclass(frozen=True)
class CollatePairs:
    """[b, 2, t] tensors in place of TRL's [2 b, t]: a record is one row, chosen before rejected.

    Attributes:
        collate: TRL's DataCollatorForPreference.
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, records: list[Any]) -> dict[str, Tensor]:
        made = self.collate(records)
        batch = {name: torch.stack(made[name].chunk(2), 1) for name in PAIRED}
        refs = [made["ref_chosen_logps"], made["ref_rejected_logps"]]
        return batch | {"ref_logps": torch.stack(refs, 1).float()}


class PrivateDPOTrainer(PrivateTrainer, DPOTrainer):
    """``trl.DPOTrainer`` that trains privately; arguments as its own, and ``PrivateTrainer``'s
    ``privacy``, ``record_owner`` and ``accept_start``.

    What the reference thinks of a record is computed once, before the first step, of that record
    alone: a function of the record and of weights that are known before. Every record counts
    towards N, also one whose prompt fills ``max_length``: it contributes zero, where DPOTrainer
    leaves it out, and so would change N.

    Raises:
        ValueError, TypeError: as ``PrivateTrainer``; for losses of a batch, images, a reference
            that moves, and a collator of one's own.
    """

    @telling
    @leaves_no_folder
    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        privacy: PrivacyConfig | PrivacyPlan,
        record_owner: str | Iterable[Any] | None = None,
        accept_start: str = "",
        **options: Any,
    ) -> None:
        _refuse(args, data_collator, options)
        train_dataset = table_of(train_dataset, "train_dataset")
        eval_dataset = table_of(eval_dataset, "eval_dataset")
        if {"image", "images"} & set(getattr(train_dataset, "column_names", None) or ()):
            raise ValueError(
                "train_dataset has images, whose prompts are padded in front, by the longest "
                "record that is read with them; leave the images out"
            )
        args = copy.copy(args)
        args.precompute_ref_log_probs = True
        with no_records_in_warnings(DPOTrainer.__module__, record_owner is not None):
            super().__init__(
                model,
                args,
                None,
                train_dataset,
                eval_dataset,
                privacy=privacy,
                record_owner=record_owner,
                accept_start=accept_start,
                ref_model=ref_model,
                **options,
            )
        if self.aux_loss_enabled:
            raise ValueError(
                "the router's auxiliary loss is a mean over the batch; set router_aux_loss_coef=0.0"
            )
        if ref_model is not None:
            self._session.starts_from(ref_model, ref_model, "ref_model")
        self.data_collator = CollatePairs(self.data_collator)
        self.label_names = ["completion_mask"]

    def _loss_of_a_record(self) -> PerExampleLoss:
        refuse_own_losses(self.model)
        weights = tuple(float(w) for w in self.loss_weights)
        return PreferenceLoss(tuple(self.loss_types), weights, self.beta, self.label_smoothing)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """DPOTrainer's drops the records whose prompt leaves no room for an answer, and so N would
        depend on what is in them; here they stay, and the collator cuts them off.
        """
        require_columns(dataset, dataset_name, [("chosen", "rejected"), TOKENISED])
        columns = set(getattr(dataset, "column_names", None) or ())
        if set(TOKENISED) <= columns and not {"chosen", "rejected"} <= columns:
            return dataset  # DPOTrainer would look for their texts
        if dataset_name == "train":
            dataset, args = without_gaps(dataset), copy.copy(args)
            args.max_length = None
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """One record at a time: beside longer ones it would be padded, and rounded otherwise."""
        model: nn.Module = self.ref_model or self.model  # type: ignore[assignment]
        was = model.training
        model.eval()
        at_once = 1 if name == "train" else batch_size
        try:
            return super()._precompute_ref_logps(dataset, name, at_once)
        finally:
            model.train(was)

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        """Of an evaluation: TRL's own, in its own form of a batch."""
        if "ref_logps" in inputs:
            halves = {name: torch.cat(inputs[name].unbind(1)) for name in PAIRED}
            chosen, rejected = inputs["ref_logps"].unbind(1)
            inputs = halves | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return super()._compute_loss(model, inputs, return_outputs)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Without the number of training tokens, which DPOTrainer shows beside evaluations."""
        self._metrics["eval"].pop("num_tokens", None)
        super().log(logs, *args, **options)


def _refuse(args: Any, data_collator: Any, options: dict[str, Any]) -> None:
    """Raises:
    ValueError, TypeError: with the remedy.
    """
    if args is None:
        raise TypeError("args=None; give a trl.DPOConfig with output_dir")
    if data_collator is not None:
        raise ValueError(
            "data_collator is not the caller's to give: a record is one row of two answers; leave "
            "it out"
        )
    if "per_example_loss" in options:
        raise ValueError("per_example_loss: the loss is args.loss_type's; leave it out")
    if plugin_of(args) is not None:
        raise ValueError(
            "FSDP: DPOTrainer makes its reference from the model's name again, and asks it before "
            "the model is sharded; leave fsdp out, and keep the whole model in every process "
            "(torchrun, or accelerate launch --multi_gpu)"
        )
    names = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
    unknown = [name for name in names if name not in LOSSES]
    if unknown:
        raise ValueError(
            f"args.loss_type={unknown[0]!r} is a loss of the batch (aot sorts it, sft is a mean "
            f"over its tokens), or is not offered; use one of {', '.join(LOSSES)}"
        )
    _refuse_smoothing(args, names)
    for name, default in (
        ("use_weighting", False),
        ("ld_alpha", None),
        ("f_divergence_type", "reverse_kl"),
        ("sync_ref_model", False),
    ):
        value = getattr(args, name, default)
        if getattr(value, "value", value) != default:
            raise ValueError(
                f"args.{name}={value!r} is not offered: the reference is computed once, and the "
                f"loss is DPO's of one record; leave it at {default!r}"
            )


def _refuse_smoothing(args: Any, names: list[str]) -> None:
    """TRL's DPOTrainer looks at neither where it has no effect.

    Raises:
        ValueError: with the remedy.
    """
    if args.label_smoothing_factor:
        raise ValueError(
            f"args.label_smoothing_factor={args.label_smoothing_factor} has no effect on losses of "
            'preferences; set it 0, and use loss_type="robust" with label_smoothing='
        )
    share = args.label_smoothing
    if share and "robust" not in names:
        raise ValueError(
            f"args.label_smoothing={share} has no effect on loss_type={', '.join(names)}; set it "
            '0, or use loss_type="robust"'
        )
    if not 0 <= share < 0.5:
        raise ValueError(
            f"args.label_smoothing={share} is the share of labels that are wrong; the robust loss "
            "takes one of at least 0 and below 0.5"
        )
