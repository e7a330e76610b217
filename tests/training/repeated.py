"""What every run of the command line does before and after its steps, done once for runs that are
alike: most of the time of a run of six steps.

A figure of the same lines is drawn once and copied; the comparison with the oracle is made once for
each model, its loss and precision, and a micro-batch is timed once, not three times. What fails is
not remembered.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

DRAWN: dict[object, bytes] = {}
VERIFIED: dict[object, float] = {}


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the places from which the command line takes them."""
    from quietgrad.training import prepare
    from quietgrad.training.derived import speed
    from quietgrad.training.files import figure

    monkeypatch.setattr(figure, "score_figure", drawing_once(figure.score_figure))
    verify = verifying_once(prepare.verify_on_public_records)
    monkeypatch.setattr(prepare, "verify_on_public_records", verify)
    accounted = sys.modules.get("quietgrad.comparing.accounted")
    if accounted is not None:
        monkeypatch.setattr(accounted, "verify_on_public_records", verify)
    monkeypatch.setattr(speed, "REPEATS", 1)


def drawing_once(draw: Any) -> Any:
    def score_figure(
        metrics: list[dict[str, Any]], result: dict[str, Any], reference: float | None, path: Path
    ) -> None:
        kind = (
            tuple(tuple(sorted(record)) for record in metrics),
            tuple(sorted(result)),
            tuple(sorted(result["metrics"])),
            result["private"],
            result.get("neighbouring"),
            result.get("metric"),
            reference is None,
        )
        if kind not in DRAWN:
            draw(metrics, result, reference, path)
            DRAWN[kind] = path.read_bytes()
        path.write_bytes(DRAWN[kind])

    return score_figure


def verifying_once(verify: Any) -> Any:
    def verify_on_public_records(prepared: Any) -> float:
        classifier = prepared.model.classifier
        kind = (
            type(prepared.task).__qualname__,
            str(classifier),
            tuple((name, p.dtype, p.requires_grad) for name, p in classifier.named_parameters()),
            prepared.config.training.precision,
            str(prepared.device),
        )
        if kind not in VERIFIED:
            VERIFIED[kind] = verify(prepared)
        return VERIFIED[kind]

    return verify_on_public_records
