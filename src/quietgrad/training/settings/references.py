"""Reference results of the embedded default, measured once by the same code and recorded with the
command that measures them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quietgrad.training.settings.config import TrainConfig

RECORDED = Path(__file__).with_name("references.json")


def references_for(config: TrainConfig) -> dict[str, Any]:
    """The recorded references that apply to a configuration: same model, head, data and split;
    empty if there are none.
    """
    if not RECORDED.is_file():
        return {}
    for entry in json.loads(RECORDED.read_text(encoding="utf-8"))["references"]:
        same = (
            entry["model"] == config.model.name
            and entry.get("head", "mean") == config.model.head
            and entry["data"] == config.data.source
            and entry["test_fraction"] == config.data.test_fraction
            and entry["validation_fraction"] == config.data.validation_fraction
        )
        if same:
            return dict(entry)
    return {}
