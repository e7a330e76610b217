"""torch's own collation, where records have values of one type: of two it makes a third for the
whole micro-batch (whole numbers beside one with a point become float32, pictures of bytes beside
one of floats no longer wrap), so that one record would change the others' numbers. And it takes the
keys of the first record for those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data._utils.collate import collate, default_collate_fn_map

from quietgrad.tensors import Batch

TYPES = (
    "records have values of different types in one place (whole numbers beside floats, arrays of "
    "two types), of which collation makes one type for the whole micro-batch, so that one record "
    "would change the numbers of others; let the data set give every record the same types, such "
    "as float(value)"
)
KEYS = (
    "records are dictionaries with different keys, of which collation takes the first record's for "
    "the whole micro-batch, so that one record would take a mask or a weight away from others; let "
    "the data set give every record the same keys, with a value that stands for none"
)


def collate_one_type(records: list[Any]) -> Batch:
    """``torch.utils.data.default_collate``.

    Raises:
        ValueError: for values of different types in one place, and different keys. It names no
            record.
    """
    _require_one_form(records)
    return collate(records, collate_fn_map=_STRICT)


def _require_one_form(values: Sequence[Any]) -> None:
    """The same keys in all dictionaries of one place.

    Raises:
        ValueError: otherwise.
    """
    first = values[0]
    if isinstance(first, Mapping):
        if any(not isinstance(one, Mapping) or one.keys() != first.keys() for one in values):
            raise ValueError(KEYS)
        for key in first:
            _require_one_form([one[key] for one in values])
    elif _has_containers(first) and all(
        isinstance(one, list | tuple) and len(one) == len(first) for one in values
    ):
        for place in zip(*values, strict=True):
            _require_one_form(place)


def _has_containers(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(one, Mapping | list | tuple) for one in value)


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

LEFT_OUT = "left out"
# Of transformers: in these the first record's types are taken for all, or one type is made.
_PLACE = "transformers.data.data_collator"
_OF_ONE_TYPE = {"default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding"}


def of_hugging_face(collate_fn: Any) -> bool:
    """Whether a collator is of transformers or TRL, which take the first record's keys for all."""
    module = getattr(_kind_of(collate_fn), "__module__", None) or ""
    return module.partition(".")[0] in ("transformers", "trl")


def require_one_type(records: list[Any], collate_fn: Any) -> None:
    """Of the columns that such a collator is given: those of all records, and where it makes one
    type of them, of one.

    Raises:
        ValueError: for a column that some records lack, and values of different types in one place.
            It names no record.
    """
    kind = _kind_of(collate_fn)
    one_type = kind.__module__ == _PLACE and kind.__qualname__ in _OF_ONE_TYPE
    kept = getattr(collate_fn, "_remove_columns", lambda record: record)
    found = [record for record in map(kept, records) if isinstance(record, Mapping)]
    for name in dict.fromkeys(name for record in found for name in record):
        values = [record[name] for record in found if name in record]
        kinds = {_kind(value) for value in values} - {None}
        if one_type and len(kinds) > 1:
            raise ValueError(TYPES)
        if len(values) < len(found) and kinds != {LEFT_OUT}:
            raise ValueError(KEYS)


def _kind_of(collate_fn: Any) -> Any:
    """The function or class; of what removes columns first, that of the collator within."""
    collator = getattr(collate_fn, "data_collator", collate_fn)
    return collator if hasattr(collator, "__qualname__") else type(collator)


def _kind(value: Any) -> str | None:
    """Of numbers, and lists of them by the first; None for a list without any."""
    if value is None or isinstance(value, str):  # both are left out, where the first is one
        return LEFT_OUT
    if isinstance(value, list | tuple):
        inside = _kind(value[0]) if len(value) else None
        return None if inside is None else f"list of {inside}"
    return str(getattr(value, "dtype", type(value)))
