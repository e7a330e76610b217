"""What the planner chose for a model, and why, as a record that prints and serialises."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from quietgrad.clipping.capture.backward import PerExampleLoss
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.engines.work import ENGINES, Engine
from quietgrad.clipping.norms.choice import ESTIMATOR_OF, Estimator
from quietgrad.clipping.norms.cost import seconds
from quietgrad.clipping.planner.execution import (
    ExecutionChoice,
    choices,
    kinds_of,
    nonprivate_bytes,
    nonprivate_seconds,
    predicted,
)
from quietgrad.clipping.planner.throughput import measured_throughput
from quietgrad.tensors import Batch, batch_size_of

SMALL_SKETCH = 8  # of Hutch++, which is charged little from there on (docs/hutchpp_envelope.md)

TEXTS: dict[Engine, str] = {
    "bookkeeping": "book-keeping: one backward pass, weighted products afterwards",
    "one-example": "one example at a time: its gradient is the per-example gradient",
}


def explain(
    clipper: Clipper, model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch
) -> dict[str, Any]:
    """Engine, micro-batch size and estimators for a batch like this one, with the alternatives'
    modelled time and memory.

    The choice is the clipper's own; times are modelled with this machine's measured speeds. Shapes
    are those of ``batch``: pass records that are not private.

    Returns:
        "engine", "physical_batch_size", "why" (where the model cannot be captured, the layer that
        it fails at); "layers": per shape of parameter the estimator and its cost; "alternatives":
        per engine; "non_private": the same for the plain step; "sketches": for Hutch with the
        clipper's k, and for Hutch++ with a small one, what it would save, as a share of the step.
    """
    layout = layout_of(model)
    bound = clipper.bind(model, per_example_loss)
    how = bound.execution_choice(batch)
    shapes = bound.planned(layout, bound.examples_of(batch).rows).model
    speed = measured_throughput(str(next(iter(layout.parameters.values())).device))
    n = batch_size_of(batch)
    size = how.physical_batch_size
    policies = clipper.policies(layout)
    rounds = -(-n // size)
    plain = nonprivate_seconds(shapes, n, speed)
    kinds: Counter[tuple[str, str, bool, float, int]] = Counter()
    chosen = choices(shapes, policies, size) if how.engine != "one-example" else {}
    for parameter in shapes.parameters:
        shape = " x ".join(str(s) for s in layout.parameters[parameter.name].shape) or "scalar"
        choice = chosen.get(parameter.name)
        cost = parameter.cost_for(size)
        if choice is None or cost is None:
            word = "its own gradient" if how.engine == "one-example" else "direct"
            kinds[(shape, word, True, 0.0, 0)] += 1
            continue
        estimator = ESTIMATOR_OF[choice.estimator]
        spent = rounds * seconds(estimator, cost, choice.kept, choice.sketch_dim, speed)
        work = int(estimator.multiplications(cost, choice.sketch_dim) / size)
        kinds[(shape, choice.estimator, choice.kept, spent, 0 if choice.kept else work)] += 1
    rows = [
        {
            "shape": s,
            "estimator": e,
            "kept": k,
            "seconds": t * count,
            "multiplications": m,
            "count": count,
        }
        for (s, e, k, t, m), count in sorted(kinds.items(), key=lambda item: -item[0][3] * item[1])
    ]
    alternatives = []
    for engine in ENGINES[1:] if shapes.captured else ENGINES[2:]:
        one = 1 if engine == "one-example" else size
        guess = predicted(engine, one, shapes, kinds_of(shapes, policies), n, speed)
        alternatives.append(_row(guess, plain))

    def seconds_with(estimator: Estimator, k: int) -> float:
        some = {
            name: policy._replace(estimator=estimator, sketch_dim=k).for_shape(
                layout.parameters[name].shape
            )
            for name, policy in policies.items()
        }
        return predicted("bookkeeping", size, shapes, kinds_of(shapes, some), n, speed).seconds

    best = seconds_with("exact", clipper.sketch_dim)
    offered: list[tuple[Estimator, int]] = [
        ("hutch", clipper.sketch_dim),
        ("hutch++", SMALL_SKETCH),
    ]
    return {
        "engine": TEXTS[how.engine],
        "physical_batch_size": size,
        "why": how.why,
        "layers": rows,
        "alternatives": alternatives,
        "non_private": {"seconds": plain, "mib": nonprivate_bytes(shapes, n) / 2**20},
        "sketches": [
            {
                "estimator": estimator,
                "sketch_dim": k,
                "saves": (best - seconds_with(estimator, k)) / best if shapes.captured else 0.0,
            }
            for estimator, k in offered
        ],
    }


def _row(guess: ExecutionChoice, plain_seconds: float) -> dict[str, Any]:
    return {
        "engine": guess.engine,
        "physical_batch_size": guess.physical_batch_size,
        "seconds": guess.seconds,
        "ratio": guess.seconds / plain_seconds,
        "mib": guess.bytes / 2**20,
    }
