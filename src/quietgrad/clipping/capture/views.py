"""Augmentation multiplicity: several views of a record, whose gradients are averaged before they
are clipped.

Source: De, Berrada, Hayes, Smith and Balle 2022, "Unlocking high-accuracy differentially private
image classification through scale", section 3. A record's views are rows of the model's batch; in
factored form they are further positions of one example, so norms and sums cost what K times as many
positions cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from quietgrad.tensors import Batch, map_tensors, tensors_of


def rows_of(batch: Batch, views: int) -> Batch:
    """[b, K, ...] to [b K, ...], the rows that the model sees.

    Raises:
        ValueError: for a tensor without a dimension of K views.
    """
    if views == 1:
        return batch
    for tensor in tensors_of(batch):
        if tensor.dim() < 2 or tensor.shape[1] != views:
            raise ValueError(
                f"views={views}, but a tensor of the batch has no second dimension of that size; "
                "give every tensor the shape [records, views, ...], "
                "labels too (labels.unsqueeze(1).expand(-1, views))"
            )
    return map_tensors(batch, lambda t: t.flatten(0, 1))


def chosen_rows(batch: Batch, rows: slice | list[int]) -> Batch:
    """Some examples of a batch: of every tensor, and of lists and arrays beside them that hold one
    thing for each example (its words, say): a loss may count those.
    """
    n = next((len(t) for t in tensors_of(batch) if t.dim()), -1)

    def of_each(things: Any) -> Any:
        if len(things) != n and isinstance(things, list | tuple):
            return type(things)(map_tensors(one, lambda t: t, of_each) for one in things)
        if len(things) != n:
            return things
        if isinstance(rows, slice) or not isinstance(things, list | tuple):
            return things[rows]
        return type(things)(things[row] for row in rows)

    return map_tensors(batch, lambda t: t[rows], of_each)


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Examples start .. stop - 1 of a batch (views, no copies)."""
    return chosen_rows(batch, slice(start, stop))


@contextlib.contextmanager
def naming_stacked(batch: Batch, views: int) -> Iterator[None]:
    """What torch says of a model that was given K views of K views has nothing to do with either.

    Args:
        batch: tensors [b, K, ...].
        views: K.

    Raises:
        RuntimeError, IndexError, ValueError: the same, and what to do where a record came with its
            views stacked, which the loader asks for one at a time.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        ours = type(error) not in (RuntimeError, IndexError, ValueError) or _is_ours(error)
        twice = any(t.dim() > 2 and t.shape[2] == views for t in tensors_of(batch))
        if views == 1 or ours or not twice:
            raise
        raise type(error)(
            f"{error}; views={views}, and a record has a dimension of {views} beside that of its "
            f"views: if those are its views too, the loader asks the data set for each record "
            f"{views} times, so return one view, without stacking them"
        ) from error


def _is_ours(error: BaseException) -> bool:
    """Whether this library raised it: it says more than a guess does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    names = {} if trace is None else trace.tb_frame.f_globals
    return str(names.get("__name__", "")).startswith("quietgrad.")
