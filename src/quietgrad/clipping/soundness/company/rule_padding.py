"""A user's layer rules on records that are padded longer, at the shapes and in the types of the
model at hand: when it was added, a rule was tried on others.
"""

from __future__ import annotations

from quietgrad.clipping.capture.backward import (
    forward_captured,
    visit_captured_calls,
    with_any_checkpointing,
)
from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.norms.rules.checked import CheckedRule
from quietgrad.clipping.norms.rules.own import other_bits
from quietgrad.clipping.norms.rules.padded import moved_by_padding
from quietgrad.clipping.soundness.company.rule_gradients import own_rules
from quietgrad.clipping.soundness.held_still import seeded
from quietgrad.clipping.soundness.subject import Subject
from quietgrad.tensors import Batch


def require_rules_ignore_padding(subject: Subject, one: Batch) -> None:
    """Refuses a user's rule that gives records other bits where they are padded longer, at the
    shapes and in the types that this model has.

    Raises:
        ValueError: naming the layer's class and the parameter.
    """
    seen: set[object] = set()

    def receive(use: Use) -> None:
        rule = use.site.rule
        if not isinstance(rule, CheckedRule) or 0 not in use.output_gradients:
            return
        x, grad = use.input, use.output_gradients[0]
        known = id(rule.rule), x.shape[1:], x.dtype, grad.dtype, tuple(use.site.parameters)
        if known in seen:
            return
        seen.add(known)
        name = moved_by_padding(rule, use.site.module, x, grad, tuple(use.site.parameters))
        if name is not None:
            raise other_bits(type(use.site.module).__name__, name)

    def run(reentrant: bool) -> None:
        passes = forward_captured(
            subject.model, subject.layout, subject.trained_loss, one, receive, reentrant
        )
        with seeded(subject.devices), passes as (losses, recording):
            visit_captured_calls(losses, recording, subject.layout)

    if own_rules(subject.layout):
        with_any_checkpointing(subject.checkpointing, run)
