"""Lightning's Trainer with private steps; imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.integrations.lightning.module import PrivateLightningModule

__all__ = ["PrivateLightningModule"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from quietgrad.integrations.lightning.module import PrivateLightningModule

        return PrivateLightningModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
