"""On several ranks, too, a step does not wait for a GPU more often because a model has more layers
(tests/waits.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from distributed.sharding import sharded
from distributed.world import on_ranks, without_looks
from waits import Waits, difference, waits_of

from quietgrad.distributed.alike import message

pytestmark = pytest.mark.distributed

# Where a shard lies torch computes on the processor, with tensors.
ON_THE_PROCESSOR = "tensors.py:"


def of_one_rank(rank: int, way: str, estimator: str) -> tuple[Waits, ...]:
    clipping = {"estimator": estimator, "sketch_dim": 4}
    with without_looks():
        return tuple(
            waits_of(layers, clipping, sharded if way == "sharded" else lambda model: model)
            for layers in (2, 6)
        )


@pytest.mark.parametrize(
    ("way", "estimator"), [("whole", "auto"), ("sharded", "auto"), ("sharded", "hutch++")]
)
def test_waits_do_not_grow_with_layers(way: str, estimator: str, tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, of_one_rank, way, estimator):
        assert isinstance(found, tuple), found
        few, many = found
        grown = Counter(difference(few, many))
        assert {w for w in grown if not w[1].startswith(ON_THE_PROCESSOR)} == set()
        assert few.total() > 0


def test_messages_lie_on_the_processor_whatever_the_default() -> None:
    with torch.device("meta"):
        assert message(True, "release", {"claim": "one"}, 3).device.type == "cpu"
