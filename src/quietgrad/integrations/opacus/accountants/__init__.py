"""Accountants under Opacus' names: all of them are Quietgrad's."""

from quietgrad.integrations.opacus.accountants.accountant import (
    GaussianAccountant,
    OpenedBatch,
    PRVAccountant,
    QuietgradAccountant,
    RDPAccountant,
    create_accountant,
)

IAccountant = QuietgradAccountant

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "OpenedBatch",
    "PRVAccountant",
    "QuietgradAccountant",
    "RDPAccountant",
    "create_accountant",
]
