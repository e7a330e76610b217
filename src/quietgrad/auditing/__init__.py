"""Attacks on a plan's own mechanism, and the lower bounds on epsilon that they prove: what an
accountant's upper bound is held against.

An audit can show that a claimed epsilon is wrong. It can never show that it is right: a lower bound
is a statement about the attack that was made.
"""

from quietgrad.auditing.bounds.errors import (
    ErrorCounts,
    lower_bound_clopper_pearson,
    lower_bound_gaussian,
    lower_bound_trade_off,
)
from quietgrad.auditing.bounds.guessing import lower_bound_one_run, p_value_one_run
from quietgrad.auditing.canaries import GradientCanaries, InputCanaries
from quietgrad.auditing.mechanism import audit_mechanism
from quietgrad.auditing.one_run import audit_one_run
from quietgrad.auditing.report import AuditReport, Finding
from quietgrad.auditing.stage import Stage

__all__ = [
    "AuditReport",
    "ErrorCounts",
    "Finding",
    "GradientCanaries",
    "InputCanaries",
    "Stage",
    "audit_mechanism",
    "audit_one_run",
    "lower_bound_clopper_pearson",
    "lower_bound_gaussian",
    "lower_bound_one_run",
    "lower_bound_trade_off",
    "p_value_one_run",
]
