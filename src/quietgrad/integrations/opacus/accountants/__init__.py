"""Accountants under Opacus' names: "prv" is Quietgrad's, "rdp" counts by moments."""

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
