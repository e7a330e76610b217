"""Initial weights that were trained on public images, with what is needed to refuse them where some
of those images are private.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from quietgrad.curvature.spectrum import record_hash

KEY = "quietgrad"  # of the safetensors header, whose values are strings


def save_public_weights(
    weights: dict[str, Tensor], path: Path, public_ids: Sequence[bytes], image_shape: Sequence[int]
) -> None:
    """Writes a safetensors file, whole or not at all; its header names every image that the weights
    may have seen.

    Args:
        weights: name -> tensor.
        path: of the file.
        public_ids: contents of the public records.
        image_shape: [channels, height, width]: images are known by their pixels, so overlaps are
            found at one size only.
    """
    from safetensors.torch import save_file

    described = {
        "record_hashes": sorted({record_hash(i) for i in public_ids}),
        "image_shape": list(image_shape),
    }
    temporary = path.with_suffix(".tmp")
    tensors = {name: value.detach().contiguous().cpu() for name, value in weights.items()}
    save_file(tensors, str(temporary), {KEY: json.dumps(described)})
    os.replace(temporary, path)


def check_public_weights(
    weights: str, private_ids: Iterable[bytes], image_shape: tuple[int, ...] | None
) -> None:
    """Refuses weights that say that they were trained on a private record, or on images of another
    form, so that no overlap could be found.

    Files of other origin say nothing of their data: that they are public is for their user to know.

    Args:
        weights: the file; "" for none.
        private_ids: contents of the private training records.
        image_shape: of the private images.

    Raises:
        ValueError: naming the file, what is wrong and the remedy.
    """
    if not weights or not Path(weights).is_file():  # loading says what is missing
        return
    described = _described(weights)
    if described is None:
        return
    if image_shape is not None and tuple(described["image_shape"]) != image_shape:
        raise ValueError(
            f"model.weights={weights!r} were trained on public images of the form "
            f"{described['image_shape']}, the private ones have {list(image_shape)}: images are "
            "known by their "
            "pixels, so private ones among the public could not be told; make the weights again "
            "with this data.image_size"
        )
    shared = set(described["record_hashes"]) & {record_hash(i) for i in private_ids}
    if shared:
        raise ValueError(
            f"model.weights={weights!r} were trained without privacy on private training records, "
            "which no epsilon accounts for; keep those out of the training data "
            "(the data.public_fraction and validation_fraction that quietgrad spectrum ran with), "
            "or make the weights from other images"
        )


def _described(weights: str) -> dict[str, list[str]] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, "pt") as file:
            header = file.metadata() or {}
    except SafetensorError:
        return None  # loading says so, with the remedy
    if KEY not in header:
        return None
    try:
        described = json.loads(header[KEY])
        return {
            "record_hashes": list(described["record_hashes"]),
            "image_shape": list(described["image_shape"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"model.weights={weights!r}: its header does not say which images it is from: "
            f"{error!r}; make it again with quietgrad spectrum"
        ) from error
