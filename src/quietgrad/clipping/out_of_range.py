"""A number of a record that is none of those a layer or a loss knows: a token beyond the
vocabulary, a class beyond the last. What torch says of it is too little (it names no layer) or too
much (it tells the number, which is the record's, or how many records the batch has).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import Tensor, nn

from quietgrad.clipping.capture.examples import Examples
from quietgrad.clipping.capture.views import naming_stacked

# Torch's words for it. Most are followed, or begun, by the number itself.
_SAID = re.compile(
    r"index out of range in self|is out of bounds|not in the valid range|idx < num_embeddings"
    r"|tried to access index|Class values must be"
)
_TABLES = ("embedding", "embedding_bag")
_CLASSES = ("cross_entropy", "nll_loss")


@contextmanager
def naming_numbers(model: nn.Module, batch: Examples | None) -> Iterator[None]:
    """While the model meets records: of this process, or None where it keeps others company.

    Raises:
        ValueError: in place of torch's error, with the layer and what to do; without the number.
    """
    try:
        stacked = nullcontext() if batch is None else naming_stacked(batch.records, batch.views)
        with stacked:
            yield
    except (IndexError, RuntimeError) as error:
        if type(error) not in (IndexError, RuntimeError) or not _SAID.search(str(error)):
            raise
        raise ValueError(_told(model, list(_frames(error)))) from None


def _told(model: nn.Module, frames: list[tuple[FrameType, int]]) -> str:
    for frame, _ in reversed(frames):
        if frame.f_globals.get("__name__") != "torch.nn.functional":
            continue
        name, held = frame.f_code.co_name, frame.f_locals
        if name in _TABLES and isinstance(held.get("weight"), Tensor):
            return _of_table(model, held["weight"])
        if name in _CLASSES and isinstance(held.get("input"), Tensor):
            scores = held["input"]
            classes = scores.shape[0] if scores.dim() == 1 else scores.shape[1]
            return (
                f"a record's label is none of the {classes} classes that the model gives scores "
                "for (whole numbers from 0); give its last layer as many outputs as there may be "
                "labels, or number the labels so"
            )
    return (
        f"a number of a record, used as a place in a tensor, is beyond it{_where(frames)}; make "
        "the tensor as long as the largest number there may be, and one more"
    )


def _of_table(model: nn.Module, weight: Tensor) -> str:
    rows = weight.shape[0]
    named = next((n for n, p in model.named_parameters() if _same(p, weight)), "")
    layer = named.rpartition(".")[0]
    which = f"layer {layer!r}" if layer else "an embedding"
    return (
        f"{which} has {rows} rows, and a number of a record is none of 0 to {rows - 1}. Tokens: "
        "take the model's own tokenizer, or, where tokens were added to it, "
        "model.resize_token_embeddings(len(tokenizer)); positions: cut texts to the model's length "
        "(truncation=True, max_length=...); categories: as many rows as there may be (a padding "
        "number has to be one of them)"
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they are one tensor, or views of one (as a captured layer's weight may be)."""
    return one is other or (one.shape == other.shape and _place(one) == _place(other) != 0)


def _place(tensor: Tensor) -> int:
    try:
        return torch.Tensor.data_ptr(tensor)
    except RuntimeError:  # a tensor without memory of its own
        return 0


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    cause: BaseException | None = error
    while cause is not None:
        trace: TracebackType | None = cause.__traceback__
        if trace is not None:
            yield from traceback.walk_tb(trace)
        cause = cause.__cause__


def _where(frames: list[tuple[FrameType, int]]) -> str:
    """The last line that is neither this library's nor torch's."""
    for frame, line in reversed(frames):
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("quietgrad.", "torch.", "contextlib")):
            return f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return ""
