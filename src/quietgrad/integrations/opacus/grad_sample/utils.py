"""``register_grad_sampler`` under Opacus' older name for its place."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.absent_modules import BY_AUTOGRAD
from quietgrad.integrations.opacus.grad_sample import register_grad_sampler, register_norm_sampler

__all__ = ["register_grad_sampler", "register_norm_sampler"]
__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "create_or_accumulate_grad_sample",
            "get_gsm_class",
            "get_hooks_class",
            "prepare_module",
            "wrap_model",
        ),
        BY_AUTOGRAD,
    ),
)
