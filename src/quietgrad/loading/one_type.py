"""torch's own collation, where records have values of one type: of two it makes a third for the
whole micro-batch (whole numbers beside one with a point become float32, pictures of bytes beside
one of floats no longer wrap), so that one record would change the others' numbers.
"""

from __future__ import annotations

from collections.abc import Callable
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
