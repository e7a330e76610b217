"""Accountants by name."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.accountants.accountant import create_accountant

OWN_ALONE = {"register_accountant": "releases are counted by Quietgrad's own accountant alone"}
__getattr__ = absent(__name__, OWN_ALONE)
__all__ = ["create_accountant"]
