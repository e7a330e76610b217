"""``register_grad_sampler`` under Opacus' older name for its place."""

from quietgrad.integrations.opacus.grad_sample import register_grad_sampler, register_norm_sampler

__all__ = ["register_grad_sampler", "register_norm_sampler"]
