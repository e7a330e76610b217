"""What Opacus has for Lightning, refused by name."""

from __future__ import annotations

from typing import Any


class DPLightningDataModule:
    """Not offered.

    Raises:
        ValueError: always.
    """

    def __init__(self, datamodule: Any, generator: Any = None) -> None:
        raise ValueError(
            "DPLightningDataModule is not offered: quietgrad.integrations.lightning has "
            "PrivateLightningModule, whose loader draws the batches (docs/lightning.md); give "
            "trainer.fit the data module as it is"
        )
