"""What Opacus has for several processes, refused by name."""

from __future__ import annotations

from typing import Any

from quietgrad.integrations.opacus.absent import absent


class DifferentiallyPrivateDistributedDataParallel:
    """Not offered.

    Raises:
        ValueError: always.
    """

    def __init__(self, model: Any) -> None:
        raise ValueError(
            "DifferentiallyPrivateDistributedDataParallel is not offered: an Opacus script runs on "
            "one process here; several processes are one run in the loops of docs/loops.md, under "
            "torchrun or accelerate launch (docs/many_processes.md)"
        )


__getattr__ = absent(
    __name__,
    {
        "average_gradients": "an Opacus script runs on one process here (docs/many_processes.md)",
    },
)
