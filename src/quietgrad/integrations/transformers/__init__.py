"""Hugging Face's Trainer, and TRL's SFTTrainer and DPOTrainer, as private runs; each
imported when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.integrations.transformers.dpo import PrivateDPOTrainer
    from quietgrad.integrations.transformers.sft import PrivateSFTTrainer
    from quietgrad.integrations.transformers.trainer import PrivateSeq2SeqTrainer, PrivateTrainer

NAMES = {
    "PrivateDPOTrainer": "dpo",
    "PrivateSFTTrainer": "sft",
    "PrivateSeq2SeqTrainer": "trainer",
    "PrivateTrainer": "trainer",
}

__all__ = ["PrivateDPOTrainer", "PrivateSFTTrainer", "PrivateSeq2SeqTrainer", "PrivateTrainer"]


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(importlib.import_module(f"{__name__}.{NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
