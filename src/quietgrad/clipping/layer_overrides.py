"""What a user may override per layer, and the sensitivity claim that the overrides add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from quietgrad.checks import require_at_least, require_int, require_word
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.norms.choice import ESTIMATORS, SKETCHES, Estimator, Policy
from quietgrad.clipping.norms.cost import Throughput
from quietgrad.events import SMALLEST_SKETCH_DIM, ClippingClaim, ExactClipping, RandomizedClipping

# Columns from which on the convex envelope costs less than the mixed one.
FEWEST_CONVEX = 4

# (pattern of parameter names, estimator, k)
LayerOverrides = tuple[tuple[str, Estimator, int], ...]


def require_layer_overrides(
    layers: Mapping[str, str] | Iterable[tuple[str, Estimator, int]], sketch_dim: int
) -> LayerOverrides:
    """Checks ``layers``: parameter name pattern -> "ghost", "materialized", "exact", "hutch",
    "hutch++", or "hutch:64" with a k of its own.

    Raises:
        ValueError: for an unknown estimator, or a k that is not a multiple of ``sketch_dim``, which
            the accountant uses for all.
    """
    overrides = []
    for pattern, word, own in _read(layers):
        name, _, k_text = str(word).partition(":")
        estimator = require_word(f"layers[{pattern!r}]", name, ESTIMATORS)
        if k_text and (not k_text.isdecimal() or estimator not in SKETCHES):
            raise ValueError(
                f"layers[{pattern!r}]={word!r} is not understood; write an estimator, or a sketch "
                "with its k like 'hutch:64'"
            )
        k = int(k_text) if k_text else sketch_dim if own is None else own
        require_int(f"layers[{pattern!r}]", k)
        if estimator in SKETCHES and (k < sketch_dim or k % sketch_dim):
            raise ValueError(
                f"layers[{pattern!r}]={word!r}: k = {k} is not a multiple of "
                f"sketch_dim={sketch_dim}, so the envelope would not cover it; "
                f"use a multiple, or set sketch_dim to a common divisor"
            )
        overrides.append((str(pattern), estimator, k))
    return tuple(overrides)


def _read(
    layers: Mapping[str, str] | Iterable[tuple[str, Estimator, int]],
) -> list[tuple[str, str, int | None]]:
    """(pattern, word, k): those that were read before, as a copied clipper has them, bring their k,
    and are checked like all others.
    """
    if isinstance(layers, Mapping):
        return [(pattern, word, None) for pattern, word in layers.items()]
    return [(pattern, word, k) for pattern, word, k in layers]


def claim_of(
    estimator: Estimator, sketch_dim: int, overrides: LayerOverrides, engine: Engine
) -> ClippingClaim:
    """Exact unless some layer may be sketched; examples taken one at a time are exact whatever was
    asked for. The hutch++ envelope where every sketch is one of Hutch++, else the convex one; the
    mixed one with so few columns that the tail decides.
    """
    require_int("sketch_dim", sketch_dim)
    require_at_least(
        "sketch_dim", sketch_dim, SMALLEST_SKETCH_DIM, "it is the number of projections of a sketch"
    )
    sketches = {word for word in (estimator, *(word for _, word, _ in overrides))} & {*SKETCHES}
    if not sketches or engine == "one-example":
        return ExactClipping()
    # Beside exact parameters, which may be as many as they like, Hutch++ alone.
    if sketches == {"hutch++"}:
        return RandomizedClipping(sketch_dim, "hutch++")
    return RandomizedClipping(sketch_dim, "convex" if sketch_dim >= FEWEST_CONVEX else "mixed")


def policies_of(
    shapes: Mapping[str, Sequence[int]],
    estimator: Estimator,
    sketch_dim: int,
    overrides: LayerOverrides,
    speed: Throughput,
    may_keep: bool,
) -> dict[str, Policy]:
    """Parameter name -> how its estimator is chosen; the first override whose pattern matches
    decides, and is taken literally; else narrow matrices are not sketched (``Policy.for_shape``).
    ``shapes``: of whole parameters, also where ranks hold parts of them.

    Beside sketches all exact words mean formed gradients: norms are not measured again there, so
    which way they are measured must not follow from a batch.

    Raises:
        ValueError: for an override that matches no trainable parameter.
    """
    words = (estimator, *(word for _, word, _ in overrides))
    steady = any(word in SKETCHES for word in words)
    policies = {}
    used = set()
    for name, shape in shapes.items():
        override = next(
            (override for override in overrides if fnmatchcase(name, override[0])), None
        )
        used.add(override)
        word, k = (estimator, sketch_dim) if override is None else override[1:]
        policy = Policy(word, k, speed, may_keep=may_keep, steady=steady)
        policies[name] = policy.for_shape(shape) if override is None else policy
    unused = [override[0] for override in overrides if override not in used]
    if unused:
        raise ValueError(
            f"layers has pattern {unused[0]!r}, which matches no trainable parameter; correct it "
            "or take it out"
        )
    return policies
