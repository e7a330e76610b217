"""Whether what the collator and the model make of a record depends on the records beside it.

The clipper's guard compares the rows of one batch, which the collator has made already: it sees
neither a collator that mixes records nor padding that the model does not mask. Here a few records
are collated alone and together. ``LookingTrainer`` says when: before the ledger is opened.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quietgrad.clipping.bindings import Bindings
from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.soundness.kept.lazily import as_before
from quietgrad.generators import keyed_generators
from quietgrad.integrations.transformers.sharding import ShardingTrainer
from quietgrad.loading.unsaid import collated
from quietgrad.plan import PrivacyPlan, PrivateRun
from quietgrad.tensors import to_device
from quietgrad.training.tasks.records import spread

GUARDED_RECORDS = 32  # of the evaluation data, for the clipper's guard
TOGETHER = 8  # records that are looked at
SEEDS = (1, 2, 3, 4, 5, 6)  # of collators that draw; nothing is released here
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
            return collated(self._collate, records)

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
            # The same draws for the first record, and another one at every place beside it.
            first = dict(leaves(self._collated(records, seed)))
            other = leaves(self._collated([records[0], *records[2:], records[1]], seed))
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
                    try:
                        own = loss(self._model, to_device(alone[i], device)).double()[0]
                    except Exception:  # an empty one; the run's loader looks at more of them
                        continue
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


class LookingTrainer(ShardingTrainer):
    """``ShardingTrainer`` that looks at model, loss and collator on a few records before the ledger
    is opened, so that what is refused is no run yet.
    """

    plan: PrivacyPlan
    _loss: PerExampleLoss
    _session: Any
    _read: Callable[[Any, str], tuple[Any, Collate]]
    _not_compiled: Callable[[Any], nn.Module]
    # What the model was like, and what is known of it.
    _looked: tuple[Any, Bindings] | None = None

    def _look_first(self) -> None:
        """Before the ledger is opened. (Not where ``train()`` makes the model or shards it, and all
        processes make its passes together: then as soon as that is done.)

        Raises:
            ValueError: with the remedy.
        """
        self._looked = None
        if self.is_fsdp_enabled or self.model_init is not None:
            return
        known = Bindings(self.plan.clipper)
        self._guard(self.model, known, secrets.randbits(62), secrets.randbits(62))
        self._looked = (told_of(self._not_compiled(self.model)), known)

    def _look_again(self, model: Any, run: PrivateRun) -> None:
        """Once Trainer has prepared the model: where it is still what was looked at (no shards, no
        half precision, no checkpointing, no weights of a checkpoint since), the run takes what is
        known of it.
        """
        looked, self._looked = self._looked, None
        same = looked is not None and looked[0] == told_of(self._not_compiled(model))
        if same and self._session.resumed is None:
            assert looked is not None
            run.bindings = looked[1]
        else:
            look_seed = self._session.look_seed()
            with run.looking(model):
                self._guard(model, run, look_seed, run.model_seed())

    def _guard(
        self, model: Any, known: Bindings | PrivateRun, look_seed: int, model_seed: int
    ) -> None:
        """The clipper's guard looks at evaluation records, where they have labels, so that what it
        refuses says nothing of private ones; collator and padding are looked at on these, then on
        training records.
        """
        public: Any = self.eval_dataset
        if isinstance(public, dict):
            public = next(iter(public.values()), None)
        if public is None or not hasattr(public, "__len__") or len(public) < 2:
            public = None
        elif self._look(model, public, "evaluation", look_seed):
            records, collate = self._read(public, "evaluation")
            batch = collate([records[int(i)] for i in spread(records, GUARDED_RECORDS)])
            model.train()
            plain = self._not_compiled(model)
            with keyed_generators(model_seed):
                device = next(plain.parameters()).device
                known.check(plain, self._loss, to_device(batch, device))
        self._look(model, self.train_dataset, "training", look_seed)

    def _look(self, model: Any, dataset: Any, description: str, seed: int) -> bool:
        """At the collator, and at padding; says whether there are labels."""
        records, collate = self._read(dataset, description)
        few = [records[int(i)] for i in spread(records, TOGETHER)]
        labelled = set(self.label_names) <= set(collated(collate, few[:1]))
        if labelled and len(few) > 1 and self.args.per_device_train_batch_size > 1:
            plain = self._not_compiled(model)
            looking = Looking(plain, collate, few, seed)
            if not looking.refuse_mixing():
                narrow = self.args.mixed_precision != "no"
                with as_before(plain, self._loss):
                    looking.refuse_padding(self._loss, rounding(plain, narrow))
        return labelled


def told_of(model: nn.Module) -> list[tuple[object, ...]]:
    """What decides how a model runs, as far as Trainer changes it before training: its modules,
    with their switches, functions and hooks, and where their parameters are.
    """
    return [
        (
            module,
            type(module),
            [(n, value) for n, value in vars(module).items() if n[0] != "_" and _is_told(value)],
            [*module._forward_hooks.values(), *module._forward_pre_hooks.values()],
            [(id(p), p.dtype, p.device, p.requires_grad) for p in module.parameters(recurse=False)],
        )
        for module in model.modules()
    ]


def _is_told(value: object) -> bool:
    return isinstance(value, bool | int | float | str) or callable(value)
