"""Quietgrad's accountant under the name "prv"."""

from quietgrad.integrations.opacus.accountants.accountant import PRVAccountant

__all__ = ["PRVAccountant"]
