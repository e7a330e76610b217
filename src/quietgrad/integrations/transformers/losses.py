"""The loss of each record, for the heads of Hugging Face's models.

Their own losses are means over a batch, and over all its tokens: how much a record counts depends
on how long the others are. Here a record's loss is the mean over its own labels, computed from the
model's outputs and the record's labels alone.

Letters of shapes: b records, t positions, v words or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.tensors import Batch

_ONE_CLASS = "single_label_classification"
IGNORED = -100  # the label that Hugging Face's losses leave out

# Settings of adapters by which they add to the model's own loss, or weigh it -> what does not.
OWN_LOSS = {
    "orth_reg_weight": 0,  # AdaLoRA
    "auxiliary_loss_weight": 0,  # ShadowPEFT
    "opt_weighted_loss_type": "none",  # CPT
}

# model without adapters, its outputs, the batch, label smoothing -> [b]
Head = Callable[[Any, Any, Batch, float], Tensor]


@dataclass(frozen=True)
class RecordLoss:
    """``loss(model, batch)``: [b] losses, each a function of its record alone. Private.

    Attributes:
        head: from outputs and labels to losses.
        bare: the model as its class made it, without adapters or wrappers.
        labels: keys of a batch that are labels and not inputs.
        smoothing: share of the target spread evenly over the classes.
    """

    head: Head
    bare: Any
    labels: tuple[str, ...]
    smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        config = getattr(self.bare, "config", None)
        batch = with_a_position(batch, getattr(config, "pad_token_id", None) or 0)
        inputs = {name: value for name, value in batch.items() if name not in self.labels}
        missing = next((name for name in self.labels if name not in batch), None)
        if missing is not None:
            raise ValueError(
                f"the records have no {missing!r} after data_collator, so there is no loss; let it "
                "return it (labels that are words are left out by Trainer's own: number them), or "
                "give per_example_loss= (model, batch -> one loss a record)"
            )
        if self.head is _answer and "decoder_input_ids" not in inputs:
            # As the model does where it is given the labels.
            shifted = self.bare.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
            inputs["decoder_input_ids"] = shifted
        return self.head(self.bare, model(**inputs), batch, self.smoothing)


def with_a_position(batch: Batch, padding: int) -> Batch:
    """A batch of nothing but empty texts with one position of padding, as they have beside others:
    models of transformers cannot take none, and their error would say how many records there are.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1]:
        return batch
    filled = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() == 2 and not value.shape[1]:
            end = {"input_ids": padding, "labels": IGNORED}.get(name, 0)
            filled[name] = torch.full((len(value), 1), end, device=value.device)
    return filled


def record_loss_of(bare: Any, labels: Sequence[str], smoothing: float) -> PerExampleLoss:
    """The loss of each record for a model of transformers.

    Args:
        bare: the model without adapters.
        labels: keys of its batches that are labels.
        smoothing: ``label_smoothing_factor``.

    Raises:
        ValueError: for a model whose head has no loss here, or one that is not a cross entropy and
            cannot be smoothed, or a share outside [0, 1), with the remedy.
    """
    if not 0 <= smoothing < 1:
        raise ValueError(
            f"args.label_smoothing_factor={smoothing} is a share of the target; give one of at "
            "least 0 and below 1, usually 0.1"
        )
    head = _head_of(bare)
    name = type(bare).__name__
    if head is None:
        raise ValueError(
            f"no loss of each record is known for {name}: its own is a mean over the batch, in "
            "which records change each other's weight; give per_example_loss= (model, batch -> "
            "[records] losses)"
        )
    config = getattr(bare, "config", None)
    problem = getattr(config, "problem_type", None)  # None: told from the labels, where they come
    numbers = problem not in (None, _ONE_CLASS) or getattr(config, "num_labels", 2) == 1
    if smoothing and (head is _question or (head is _record_class and numbers)):
        raise ValueError(f"label_smoothing_factor={smoothing} has no meaning for {name}; set it 0")
    return RecordLoss(head, bare, tuple(labels), float(smoothing))


def refuse_own_losses(model: Any) -> None:
    """Refuses adapters that change the loss which the model itself returns: a private step takes
    the losses of records in its place, and what was added would be left out without a word.

    Raises:
        ValueError: with the remedy.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        for name, without in OWN_LOSS.items():
            value = getattr(config, name, without)
            if value not in (without, None):
                raise ValueError(
                    f"{type(config).__name__}({name}={value!r}) adds to the loss of a batch, or "
                    "weighs it, and a private step takes the losses of records, in which that "
                    f"would be left out; set {name}={without!r}, or use LoraConfig"
                )


def _head_of(bare: Any) -> Head | None:
    name, kind = type(bare).__name__, getattr(bare, "loss_type", None)
    if getattr(getattr(bare, "config", None), "is_encoder_decoder", False):
        return _answer if kind == "ForConditionalGeneration" else _HEADS.get(str(kind))
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or kind == "ForConditionalGeneration":
        return _next_token
    if name.endswith("ForMultipleChoice"):
        return _choice
    return _HEADS.get(str(kind))


def mean_of_own_tokens(logits_btv: Tensor, labels_bt: Tensor, smoothing: float = 0.0) -> Tensor:
    """[b] means of cross entropies over a record's own labelled positions; 0 for one without any.

    Args:
        logits_btv: of the same position as the label.
        labels_bt: words, or -100 where nothing is learnt.
        smoothing: as ``torch.nn.functional.cross_entropy``'s.
    """
    losses = _cross_entropies(logits_btv.flatten(0, 1), labels_bt.flatten(), smoothing)
    losses = losses.view(labels_bt.shape)
    return losses.sum(1) / (labels_bt != IGNORED).sum(1).clamp_min(1)


def _next_token(bare: Any, outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    logits, words = outputs["logits"], batch["labels"]
    logits = logits[:, logits.shape[1] - words.shape[1] :]  # virtual tokens of prompt tuning lead
    return mean_of_own_tokens(logits[:, :-1], words[:, 1:], smoothing)


def _same_token(bare: Any, outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    return mean_of_own_tokens(outputs["logits"], batch["labels"], smoothing)


def _answer(bare: Any, outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    return _same_token(bare, outputs, batch, smoothing)  # the decoder's inputs are shifted


def _choice(bare: Any, outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    return _cross_entropies(outputs["logits"], batch["labels"], smoothing)


def _cross_entropies(logits_bv: Tensor, labels_b: Tensor, smoothing: float) -> Tensor:
    try:
        return F.cross_entropy(
            logits_bv.float(),
            labels_b.view(-1),
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=smoothing,
        )
    except IndexError:  # which says what a record's label is
        raise ValueError(
            f"a label is none of the model's {logits_bv.shape[-1]} classes or words (whole numbers "
            f"from 0, or {IGNORED} where nothing is learnt); make the model with num_labels= of "
            "all that there may be, or number the labels of the data set so"
        ) from None


def _record_class(bare: Any, outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    """Classes, several labels a record, or numbers, told by the rule of Hugging Face's models."""
    logits, wanted = outputs["logits"], batch["labels"]
    problem = bare.config.problem_type
    if problem is None:
        whole = wanted.dtype in (torch.long, torch.int)
        many = _ONE_CLASS if whole else "multi_label_classification"
        problem = "regression" if bare.config.num_labels == 1 else many
    if problem == _ONE_CLASS:
        return _cross_entropies(logits, wanted, smoothing)
    if smoothing:
        raise ValueError(
            f"label_smoothing_factor={smoothing} smooths classes, and these labels are {problem}; "
            "set it 0"
        )
    if wanted.numel() != logits.numel():  # torch's own error says how many records there are
        raise ValueError(
            f"config.problem_type={bare.config.problem_type!r} with num_labels="
            f"{bare.config.num_labels} and labels of type {str(wanted.dtype)[6:]} is {problem}, "
            "which takes as many numbers a record as there are labels; give whole numbers for "
            "classes, a list of numbers a record, or num_labels=1 for one number"
        )
    wanted = wanted.to(logits.dtype).view(logits.shape)
    if problem == "regression":
        return F.mse_loss(logits, wanted, reduction="none").mean(1)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(1)


def _question(bare: Any, outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    def at(side: str) -> Tensor:
        logits, place = outputs[f"{side}_logits"], batch[f"{side}_positions"].view(-1)
        beyond = torch.zeros_like(logits, dtype=torch.bool)
        if "attention_mask" in batch:
            # The padding that longer records ask for is no place for an answer. Hugging Face's own
            # loss counts it among the places, and so depends on who else is in the batch.
            beyond = batch["attention_mask"] == 0
            logits = logits.masked_fill(beyond, torch.finfo(logits.dtype).min)
        nowhere = logits.shape[1]  # an answer beyond the text is none
        place = place.clamp(0, nowhere)
        none = F.pad(beyond, (0, 1), value=True).gather(1, place[:, None])[:, 0]
        place = place.masked_fill(none, nowhere)
        return F.cross_entropy(logits.float(), place, ignore_index=nowhere, reduction="none")

    return (at("start") + at("end")) / 2


_HEADS: dict[str, Head] = {
    "ForCausalLM": _next_token,
    "ForMaskedLM": _same_token,
    "ForTokenClassification": _same_token,
    "ForQuestionAnswering": _question,
    "ForSequenceClassification": _record_class,
    "ForImageClassification": _record_class,
    "ForVideoClassification": _record_class,
    "ForAudioClassification": _record_class,
}
