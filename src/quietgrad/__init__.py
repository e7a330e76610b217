"""Quietgrad: differentially private training in PyTorch, with every epsilon an upper bound.

``PrivacyConfig(...).build(dataset_size)`` gives a plan; ``plan.start()`` runs it. Nothing heavy is
imported until it is used; ``quietgrad.clipping.clipped_gradients`` needs no import of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from quietgrad.clipping import Clipping, Performance
    from quietgrad.plan import PrivacyConfig, PrivacyPlan, PrivateRun, Users

# Name -> module; and the rooms that are for users. Lazily (PEP 562), so that quietgrad.accounting
# never imports torch.
NAMES = {
    "Clipping": "clipping",
    "Performance": "clipping",
    "PrivacyConfig": "plan",
    "PrivacyPlan": "plan",
    "PrivateRun": "plan",
    "Users": "plan",
}
ROOMS = (
    "accounting",
    "auditing",
    "averaging",
    "beside",
    "clipping",
    "curvature",
    "denoising",
    "events",
    "loading",
    "noise",
    "sampling",
    "schedules",
)

__all__ = [
    "Clipping",
    "Performance",
    "PrivacyConfig",
    "PrivacyPlan",
    "PrivateRun",
    "Users",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"quietgrad.{name}")
    if name in NAMES:
        return getattr(importlib.import_module(f"quietgrad.{NAMES[name]}"), name)
    raise AttributeError(f"module 'quietgrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is for users, as they ask for it in a notebook."""
    own = (name for name in globals() if name.startswith("__"))
    return sorted({*own, *__all__, *ROOMS})
