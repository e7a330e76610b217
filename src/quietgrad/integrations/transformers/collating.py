"""Whether what the collator and the model make of a record depends on the records beside it.

The clipper's guard compares the rows of one batch, which the collator has made already: it sees
neither a collator that mixes records nor padding that the model does not mask. Here a few records
are collated alone and together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.generators import keyed_generators
from quietgrad.tensors import to_device

TOGETHER = 8  # records that are looked at
SEEDS = (1, 2, 3)  # of collators that draw; nothing is released here
SINGLE, TENSOR_CORES, HALF = 2e-5, 1e-3, 5e-2  # what rounding may change of a loss

MIXED = (
    "what data_collator makes of a record depends on the records beside it ({key}), so one record "
    "would change the gradients of others; mix none, keep one row a record in the order that they "
    "come, give numbers of one type, and pad on the right (tokenizer.padding_side = 'right'), to "
    "labels of -100"
)
PADDED = (
    "a record's loss depends on how long the records beside it are: the model does not mask its "
    "padding; let data_collator return attention_mask (tokenizer.pad does), pad every record to "
    "one length (padding='max_length'), or leave padding out of per_example_loss="
)
Collate = Callable[[list[Any]], Any]


class Looking:
    """One look at a few records. What it refuses with names no record.

    Args:
        model: without wrappers.
        collate: the collator.
        records: two or more.
        seed: secret.
    """

    def __init__(self, model: nn.Module, collate: Collate, records: list[Any], seed: int) -> None:
        self._model, self._collate, self._records = model, collate, records
        self._seed = seed

    def _collated(self, records: list[Any], seed: int) -> Any:
        with keyed_generators(self._seed ^ seed):
            return self._collate(records)

    def refuse_mixing(self) -> bool:
        """Compares rows of the collator.

        Returns:
            Whether it draws at random, so that a record is another one every time.

        Raises:
            ValueError: with the remedy.
        """
        records = self._records
        once, again = (self._collated(records, seed) for seed in SEEDS[:2])
        drawn = {k for k, one in leaves(once) if not same(one, dict(leaves(again)).get(k))}
        for key, together in leaves(once):
            if together.dim() == 0 or len(together) != len(records):
                raise ValueError(MIXED.format(key=f"{key}: not one row a record"))
        for i, record in enumerate(records):
            alone = dict(leaves(self._collated([record], SEEDS[0])))
            for key, together in leaves(once):
                if key not in alone or not _compatible(together[i], alone[key], key in drawn):
                    raise ValueError(MIXED.format(key=key))
        for seed in SEEDS if drawn else ():
            # The same draws for the first record, and the others in another order beside it.
            first = dict(leaves(self._collated(records, seed)))
            other = leaves(self._collated([records[0], *records[:0:-1]], seed))
            for key, rows in other:
                if rows.shape == first[key].shape and not same(rows[0], first[key][0]):
                    raise ValueError(MIXED.format(key=key))
        return bool(drawn)

    def refuse_padding(self, loss: PerExampleLoss, tolerance: float) -> None:
        """Compares losses of records that were padded with those of the same alone.

        Raises:
            ValueError: with the remedy.
        """
        once = self._collated(self._records, SEEDS[0])
        alone = [self._collated([record], SEEDS[0]) for record in self._records]
        padded = [i for i, one in enumerate(alone) if _shapes(one) != _shapes(once)]
        if not padded:
            return
        device = next(self._model.parameters()).device
        was = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad(), keyed_generators(self._seed):
                together = loss(self._model, to_device(once, device)).double()
                for i in padded[:4]:
                    own = loss(self._model, to_device(alone[i], device)).double()[0]
                    if abs(float(own - together[i])) > tolerance * (1 + abs(float(own))):
                        raise ValueError(PADDED)
        finally:
            for module, training in was.items():
                module.training = training


def rounding(model: nn.Module, autocast: bool) -> float:
    """What batches of other shapes may change of a loss."""
    first = next(model.parameters())
    if autocast or any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
        return HALF
    return TENSOR_CORES if first.device.type == "cuda" else SINGLE


def leaves(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a batch by their place in it."""
    batch = dict(batch) if hasattr(batch, "keys") else batch
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor):
            yield pytree.keystr(path), leaf


def same(one: Tensor, other: Tensor | None) -> bool:
    """In shape, type and value."""
    return (
        other is not None
        and one.shape == other.shape
        and one.dtype == other.dtype
        and torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-8, equal_nan=True)
    )


def _compatible(row: Tensor, alone: Tensor, drawn: bool) -> bool:
    """Whether a row is what its record is alone, and padding behind it."""
    if len(alone) != 1 or alone[0].dim() != row.dim() or alone.dtype != row.dtype:
        return False
    if any(a > r for a, r in zip(alone.shape[1:], row.shape, strict=True)):
        return False
    return drawn or same(row[tuple(slice(n) for n in alone.shape[1:])], alone[0])


def _shapes(batch: Any) -> list[torch.Size]:
    return [leaf.shape[1:] for _, leaf in leaves(batch)]
