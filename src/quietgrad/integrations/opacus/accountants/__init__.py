"""Accountants under Opacus' names: "prv" is Quietgrad's, "rdp" counts by moments."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.accountants.accountant import (
    GaussianAccountant,
    IAccountant,
    OpenedBatch,
    PRVAccountant,
    QuietgradAccountant,
    RDPAccountant,
    create_accountant,
)
from quietgrad.integrations.opacus.accountants.registry import OWN_ALONE

__getattr__ = absent(__name__, OWN_ALONE)

__all__ = [
    "GaussianAccountant",
    "IAccountant",
    "OpenedBatch",
    "PRVAccountant",
    "QuietgradAccountant",
    "RDPAccountant",
    "create_accountant",
]
