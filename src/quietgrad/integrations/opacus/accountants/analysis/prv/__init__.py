"""Opacus' parts of its "prv" accountant, each refused by name; the accountant itself is offered."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import WHOLE

__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "DiscretePRV",
            "Domain",
            "PoissonSubsampledGaussianPRV",
            "TruncatedPrivacyRandomVariable",
            "compose_heterogeneous",
            "compute_safe_domain_size",
            "discretize",
        ),
        WHOLE,
    ),
)
