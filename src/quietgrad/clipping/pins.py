"""What a user may pin per layer, and the sensitivity claim that the pins add up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from quietgrad.checks import require_at_least, require_int, require_word
from quietgrad.clipping.engines import Engine
from quietgrad.clipping.planner import ESTIMATORS, SKETCHES, Estimator, Policy
from quietgrad.clipping.throughput import Throughput
from quietgrad.facts import SMALLEST_SKETCH_DIM, ClippingClaim, ExactClipping, RandomizedClipping

# (pattern of parameter names, estimator, k)
Pins = tuple[tuple[str, Estimator, int], ...]


def require_pins(layers: Mapping[str, str] | Iterable[tuple[str, Estimator, int]], sketch_dim: int) -> Pins:
    """Checks ``layers``: parameter name pattern -> "ghost", "materialized", "exact", "hutch", "hutch++", or "hutch:64" with a k of its own.

    Raises:
        ValueError: for an unknown estimator, or a k that is not a multiple of ``sketch_dim``, which the accountant uses for all.
    """
    if not isinstance(layers, Mapping):
        return tuple(layers)
    pins = []
    for pattern, word in layers.items():
        name, _, k_text = str(word).partition(":")
        estimator = require_word(f"layers[{pattern!r}]", name, ESTIMATORS)
        if k_text and (not k_text.isdecimal() or estimator not in SKETCHES):
            raise ValueError(
                f"layers[{pattern!r}]={word!r} is not understood; write an estimator, or a sketch with its k like 'hutch:64'"
            )
        k = int(k_text) if k_text else sketch_dim
        if estimator in SKETCHES and (k < sketch_dim or k % sketch_dim):
            raise ValueError(
                f"layers[{pattern!r}]={word!r}: k = {k} is not a multiple of sketch_dim={sketch_dim}, so the envelope would not cover it; "
                f"use a multiple, or set sketch_dim to a common divisor"
            )
        pins.append((str(pattern), estimator, k))
    return tuple(pins)


def claim_of(estimator: Estimator, sketch_dim: int, pins: Pins, engine: Engine) -> ClippingClaim:
    """Exact unless some layer may be sketched; examples taken one at a time are exact whatever was asked for."""
    require_int("sketch_dim", sketch_dim)
    require_at_least("sketch_dim", sketch_dim, SMALLEST_SKETCH_DIM, "it is the number of projections of a sketch")
    sketched = estimator in SKETCHES or any(word in SKETCHES for _, word, _ in pins)
    return RandomizedClipping(sketch_dim) if sketched and engine != "one-example" else ExactClipping()


def policies_of(
    names: Iterable[str], estimator: Estimator, sketch_dim: int, pins: Pins, speed: Throughput, may_keep: bool
) -> dict[str, Policy]:
    """Parameter name -> how its estimator is chosen; the first pin whose pattern matches decides.

    Raises:
        ValueError: for a pin that matches no trainable parameter.
    """
    names = list(names)
    policies = {}
    used = set()
    for name in names:
        pin = next((pin for pin in pins if fnmatchcase(name, pin[0])), None)
        used.add(pin)
        word, k = (estimator, sketch_dim) if pin is None else pin[1:]
        policies[name] = Policy(word, k, speed, may_keep=may_keep)
    unused = [pin[0] for pin in pins if pin not in used]
    if unused:
        raise ValueError(
            f"layers has pattern {unused[0]!r}, which matches no trainable parameter; correct it or take it out"
        )
    return policies
