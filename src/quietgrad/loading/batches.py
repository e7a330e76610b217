"""What a loader gives: the open batch, and the micro-batches that it is read in."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor

from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.loading.reading import digest_of
from quietgrad.tensors import Batch, fields_of

NOT_RECORDS = (
    "{name} holds no records of its own to index or unpack: give it to run.backward(model, "
    "per_example_loss, batch) as it is; per_example_loss(model, batch) is given the records, as "
    "collate_fn made them"
)

CHANGED = (
    "what a loop makes of a micro-batch (a mean that it takes off, MixUp) would make each record's "
    "row of the others, and is examined by nobody; change records in the data set, in collate_fn "
    "or in the loss"
)
LOOKED_AT = 64  # entries of each tensor


class AsRead:
    """What was read, to tell whether it is still that: the same tensors in the same version (some
    of their entries too: numpy writes past it), and the same things beside them.
    """

    def __init__(self, records: Batch) -> None:
        self._tensors: list[Tensor] = []
        self._form = _form(records, self._tensors)
        self._states = [_state(t) for t in self._tensors]

    def still(self, records: Batch) -> bool:
        """Whether nothing was changed, as far as this tells."""
        tensors: list[Tensor] = []
        if _form(records, tensors) != self._form:
            return False
        states = (_state(t) for t in tensors)
        return all(
            now is then and version == before and torch.equal(entries, kept)
            for now, then, (version, entries), (before, kept) in zip(
                tensors, self._tensors, states, self._states, strict=True
            )
        )


def _state(t: Tensor) -> tuple[int, Tensor]:
    places = torch.arange(0, t.numel(), max(1, t.numel() // LOOKED_AT), device=t.device)
    entries = t.detach().take(places).view(torch.uint8)  # so that no number is itself
    return 0 if t.is_inference() else t._version, entries


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """What a batch is made of, by value; its tensors are put into the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, Mapping):
        return {repr(key): _form(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        words = all(type(one) is str for one in value)  # of many records, in one look
        return tuple(value) if words else [_form(one, tensors) for one in value]
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return type(value).__name__, repr(value)
    inside = fields_of(value)
    return _form(inside, tensors) if inside else digest_of(value)


class ReadOnce:
    """Is read or clipped once, and so cannot be copied."""

    called = "this"

    if not TYPE_CHECKING:  # else no attribute would be unknown

        def __getattr__(self, name: str) -> NoReturn:
            told = NOT_RECORDS.format(name=self.called)
            raise AttributeError(f"{name!r}: {told} (moved to the model's device)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its records would count twice; "
            "pass on what the loader gave"
        )


class MicroBatch(ReadOnce):
    """Records of the open batch for one forward pass, as they were read. Private.

    Attributes:
        records: what ``collate_fn`` made of them; [examples, ...] tensors.
        is_last: whether it is the last of its batch.
        release: number of the release that it is for.
        source: the pass over the loader that read it.
        sizes: how many of the records are each user's, in order; None where records are protected.
    """

    called = "a MicroBatch"

    def __init__(
        self,
        records: Batch,
        is_last: bool,
        release: int,
        source: object,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.records = records
        self.sizes = sizes
        self.is_last = is_last
        self.release = release
        self.source = source
        self._as_read = AsRead(records)
        self._taken = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_taken" and name in vars(self):
            raise AttributeError(f"a MicroBatch's {name} cannot be set: {CHANGED}")
        super().__setattr__(name, value)

    def take(self) -> Batch:
        """What is clipped, once: clipped twice it would count twice.

        Raises:
            RuntimeError: the second time, and where the records were changed.
        """
        if self._taken:
            raise RuntimeError(
                "this micro-batch was clipped already; clip each micro-batch of a batch once"
            )
        if not self._as_read.still(self.records):
            raise RuntimeError(f"the records of this micro-batch were changed: {CHANGED}")
        self._taken = True
        return self.records if self.sizes is None else UserBatch(self.records, self.sizes)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(NOT_RECORDS.format(name=self.called))

    def __repr__(self) -> str:  # no sizes: they are private
        return f"MicroBatch(release={self.release}, is_last={self.is_last})"


class LoadedBatch(ReadOnce):
    """The open batch of a run. ``run.backward`` takes it whole; iterated over, it is its
    micro-batches in order, once. How many there are, and their sizes, are private.
    """

    called = "a batch of run.loader"

    def __init__(self, parts: Iterator[MicroBatch], release: int) -> None:
        self._parts: Iterator[MicroBatch] | None = parts
        self.release = release

    def __iter__(self) -> Iterator[MicroBatch]:
        if _unpacks(sys._getframe(1)):  # Python's own words would count the micro-batches
            raise TypeError(NOT_RECORDS.format(name=self.called))
        parts, self._parts = self._parts, None
        if parts is None:
            raise RuntimeError(
                "this batch was read already; its records are loaded once, so clip it once "
                "(run.backward, or run.clip for each of its micro-batches)"
            )
        return parts

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(NOT_RECORDS.format(name=self.called))

    def __repr__(self) -> str:
        return f"LoadedBatch(release={self.release})"


def _unpacks(caller: FrameType) -> bool:
    """Whether it is at ``x, y = batch``, or at ``for x, y in loader``."""
    code, place = caller.f_code.co_code, caller.f_lasti
    return dis.opname[code[place]] == "UNPACK_SEQUENCE" and code[place + 1] > 1


def parts_of(batch: Any) -> Iterator[Any]:
    """Micro-batches: those of a loaded batch or of an iterator, or the batch itself."""
    if isinstance(batch, LoadedBatch | Iterator):
        return iter(batch)
    return iter((batch,))


class Loading(Protocol):
    """What is asked of a loader here."""

    @property
    def newest_pass(self) -> object: ...


def records_of(part: Any, loader: Loading | None, release: int) -> Batch:
    """The records of a micro-batch, where they are those of the open batch.

    Args:
        part: a ``MicroBatch`` of the run's loader; where it has none, records as they are.
        loader: the run's, if it has one.
        release: number of the open batch.

    Raises:
        RuntimeError: for other records than the loader's, or than the open batch's.
    """
    if isinstance(part, MicroBatch):
        if loader is None or part.source is not loader.newest_pass or part.release != release:
            raise RuntimeError(
                "this micro-batch is not of the batch that is open; clip what the run's newest "
                "loader gave last, before it is asked for the next batch"
            )
        return part.take()
    if loader is not None:
        raise RuntimeError(
            "these records are not from the run's loader: with a loader, only its batches are "
            "clipped, so that no other records can be released in their place; pass on what it "
            "gives, and change records in the data set, in collate_fn or in the loss"
        )
    return part
