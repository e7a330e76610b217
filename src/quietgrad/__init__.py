"""Quietgrad: differentially private training in PyTorch, with every epsilon an upper bound.

``PrivacyConfig(...).build(dataset_size)`` gives a plan; ``plan.start()`` runs it. Nothing heavy is
imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quietgrad.plan import PrivacyConfig, PrivacyPlan, PrivateRun

__all__ = ["PrivacyConfig", "PrivacyPlan", "PrivateRun", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazily, so that quietgrad.accounting never imports torch.
    if name in ("PrivacyConfig", "PrivacyPlan", "PrivateRun"):
        from quietgrad import plan

        return getattr(plan, name)
    raise AttributeError(f"module 'quietgrad' has no attribute {name!r}")
