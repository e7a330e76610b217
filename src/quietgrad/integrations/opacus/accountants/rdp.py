"""Quietgrad's accountant under the name "rdp"."""

from quietgrad.integrations.opacus.accountants.accountant import RDPAccountant

__all__ = ["RDPAccountant"]
