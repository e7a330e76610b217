"""Augmentation multiplicity: several views of a record, whose gradients are averaged before they
are clipped.

Source: De, Berrada, Hayes, Smith and Balle 2022, "Unlocking high-accuracy differentially private
image classification through scale", section 3. A record's views are rows of the model's batch; in
factored form they are further positions of one example, so norms and sums cost what K times as many
positions cost.
"""

from __future__ import annotations

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
