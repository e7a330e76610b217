"""Records are collated as the script says, and examined (``quietgrad.loading.collating``); for none
of them there is what a batch looks like, without rows.
"""

from __future__ import annotations

from typing import Any

from quietgrad.loading.collating import Collating


class CollateRows:
    """Collates records, and for none of them gives what a batch looks like, without rows.

    Args:
        collate_fn: of the script.
        dataset: whose first record shows what an empty batch looks like.
        batch_dim: the records' dimension.
    """

    def __init__(self, collate_fn: Any, dataset: Any, batch_dim: int) -> None:
        self.collate_fn = collate_fn
        self._dataset = dataset
        self._collating = Collating(collate_fn, batch_dim)

    def __call__(self, records: list[Any]) -> Any:
        if not len(records):
            return self._collating.without_records(self._dataset[0])
        return self._collating(records)
