"""torch's own collation, where records have values of one type: of two it makes a third for the
whole micro-batch (whole numbers beside one with a point become float32, pictures of bytes beside
one of floats no longer wrap), so that one record would change the others' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data._utils.collate import collate, default_collate_fn_map

from quietgrad.tensors import Batch

TYPES = (
    "records have values of different types in one place (whole numbers beside floats, arrays of "
    "two types), of which collation makes one type for the whole micro-batch, so that one record "
    "would change the numbers of others; let the data set give every record the same types, such "
    "as float(value)"
)


def collate_one_type(records: list[Any]) -> Batch:
    """``torch.utils.data.default_collate``.

    Raises:
        ValueError: for values of different types in one place. It names no record.
    """
    return collate(records, collate_fn_map=_STRICT)


def _strict(collated: Callable[..., Any]) -> Callable[..., Any]:
    def of_one_type(values: Any, *, collate_fn_map: Any = None) -> Any:
        if len({getattr(value, "dtype", type(value)) for value in values}) > 1:
            raise ValueError(TYPES)
        return collated(values, collate_fn_map=collate_fn_map)

    return of_one_type


_STRICT: Any = {
    kind: made if kind in (str, bytes) else _strict(made)
    for kind, made in default_collate_fn_map.items()
}

# Of transformers: in these the first record's types are taken for all, or one type is made.
_HUGGING_FACES = {"default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding"}


def of_hugging_face(collate_fn: Any) -> bool:
    """Whether records have to have one type, as a collator of transformers makes one of them."""
    collator = getattr(collate_fn, "data_collator", collate_fn)  # within one that removes columns
    kind = collator if hasattr(collator, "__qualname__") else type(collator)
    place = getattr(kind, "__module__", "")
    return place == "transformers.data.data_collator" and kind.__qualname__ in _HUGGING_FACES


def require_one_type(records: list[Any], collate_fn: Any) -> None:
    """Of the columns that such a collator is given.

    Raises:
        ValueError: for values of different types in one place. It names no record.
    """
    kept = getattr(collate_fn, "_remove_columns", lambda record: record)
    kinds: dict[Any, Any] = {}
    for record in map(kept, records):
        if isinstance(record, Mapping):
            for name, value in record.items():
                kind = _kind(value)
                if kind is None:
                    continue
                if kinds.setdefault(name, kind) != kind:
                    raise ValueError(TYPES)


def _kind(value: Any) -> str | None:
    """Of numbers, and lists of them by the first; None for a list without any."""
    if value is None or isinstance(value, str):  # both are left out, where the first is one
        return "left out"
    if isinstance(value, list | tuple):
        inside = _kind(value[0]) if len(value) else None
        return None if inside is None else f"list of {inside}"
    return str(getattr(value, "dtype", type(value)))
