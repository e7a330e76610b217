"""Quietgrad's accountant under the name "gdp"."""

from quietgrad.integrations.opacus.accountants.accountant import GaussianAccountant

__all__ = ["GaussianAccountant"]
