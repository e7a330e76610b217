"""What ran: data, model and settings, and engine per layer, time and memory as they were expected.

What a run really took is nowhere in its directory: time and peak memory follow from the sizes of
batches, which are private. So both are the forecast, which was measured on public records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quietgrad.report.run.facts import RunFacts

IMAGE = "image:"  # before the name of an image model
UNKEPT = "what it took is not kept, as it tells of private batch sizes"


def what_ran(facts: RunFacts) -> list[tuple[str, str]]:
    """(what, in words): data, model, settings, engine, time and memory, machine."""
    at, result, machine = facts.setting, facts.result, facts.environment
    answers = at("task", "kind") == "generate"
    trained = {
        "head": "the head alone",
        "lora": "LoRA adapters" if answers else "LoRA adapters and the head",
        "full": "all weights",
    }
    count = result.get("trainable_parameters")
    tune = str(at("model", "tune", ""))
    name = str(at("model", "name", ""))
    headed = (":" not in name or name.startswith("packaged:")) and not answers
    head = f", head {at('model', 'head')}" if at("model", "head") and headed else ""
    rows = [
        ("Data", _named(str(at("data", "source", "")))),
        ("Model", f"{_named(name)}{head}"),
        ("Trained", trained.get(tune, tune) + (f": {count:,} numbers" if count else "")),
        ("Optimiser", f"{at('optimizer', 'name', 'adamw')}, learning rate "
         f"{at('optimizer', 'learning_rate', '?')}"),
        ("Batch and steps", f"{at('training', 'expected_batch_size', '?')} expected, "
         f"{facts.steps} steps"),
        ("Clipping", f"estimator {at('clipping', 'estimator', 'auto')}, norm {_norm(facts)}"),
    ]  # fmt: skip
    rows += list(_expected(facts))
    if machine:
        rows.append(("Machine", f"{machine.get('system', '?')}, {machine.get('processors', '?')} "
                     f"processors, {machine.get('device', '?')}"))  # fmt: skip
    return [(name, text) for name, text in rows if text.strip(", ")]


def _norm(facts: RunFacts) -> str:
    """In words, where it is not the same in every step."""
    first = str(facts.setting("privacy", "max_grad_norm", "?"))
    if facts.norm_adapts:
        return f"{first} in the first step, then by a noisy count"
    if facts.norms is not None and facts.norms[0] != facts.norms[1]:
        return f"{facts.norms[0]:g} to {facts.norms[1]:g}, by a schedule"
    return first


def _named(source: str) -> str:
    """A data set or model as others are told of it: of a path on this machine, the last name."""
    kind = IMAGE if source.startswith(IMAGE) else ""
    path = Path(source.removeprefix(kind))
    here = path.is_absolute() or str(path).startswith(("..", "~")) or path.exists()
    return f"{kind}{path.name}" if here else source


def _expected(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Of a run that kept none nothing is said."""
    kept = facts.forecast
    if not kept:
        return
    frozen = "; frozen layers run once a record" if kept.get("cached_frozen_layers") else ""
    yield "Engine", f"{kept['engine']}{frozen}"
    yield "Time", f"about {_duration(float(kept['predicted_seconds']))} expected; {UNKEPT}"
    mib = float(kept["predicted_memory_mib"])
    yield (
        "Memory",
        f"about {max(1, math.ceil(mib)):,} MiB expected for weights and a step; {UNKEPT}",
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1, math.ceil(seconds))} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def estimators(facts: RunFacts) -> list[list[str]]:
    """How gradients' lengths are taken, by shape of parameter, the heads first; [] where nothing
    says.
    """
    layers = facts.forecast.get("layers", ())
    if not layers:
        return []
    rows = [
        [layer["shape"], layer["estimator"] + (", kept for the sum" * _kept(layer)),
         str(layer["count"])]
        for layer in layers
    ]  # fmt: skip
    return [["shape of weights", "how gradients are measured", "how many"], *rows]


def _kept(layer: Any) -> bool:
    return bool(layer["kept"]) and layer["estimator"] == "materialized"
