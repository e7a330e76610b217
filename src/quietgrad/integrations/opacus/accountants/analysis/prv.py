"""Opacus' parts of its "prv" accountant, each refused by name; the accountant itself is offered."""

from quietgrad.integrations.opacus.absent import absent

_WHOLE = (
    "privacy-loss distributions are composed by create_accountant('prv'), whose step() and "
    "get_epsilon() take what is to be composed; single ones are dp_accounting.pld's"
)
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
        _WHOLE,
    ),
)
