"""Opacus' checks of per-sample gradients: here every layer's are autograd's."""

from quietgrad.integrations.opacus.absent import absent
from quietgrad.integrations.opacus.utils.module_utils import clone_module

_BY_AUTOGRAD = (
    "gradients by records are made at optimizer.step() alone and are autograd's own, so there is "
    "nothing to check; to look at them without training, torch.func.vmap(torch.func.grad(...)) on "
    "the bare model"
)
__getattr__ = absent(
    __name__,
    dict.fromkeys(
        (
            "check_per_sample_gradients_are_correct",
            "check_torch_version_for_ew_sample",
            "compute_grad_samples_microbatch_and_opacus",
            "compute_microbatch_grad_sample",
            "compute_microbatch_grad_sample_tensor_or_seq",
            "compute_opacus_grad_sample",
            "get_grad_sample_modes",
            "is_batch_empty",
            "ModelWithLoss",
            "unpack_packedsequences",
        ),
        _BY_AUTOGRAD,
    ),
)
__all__ = ["clone_module"]
