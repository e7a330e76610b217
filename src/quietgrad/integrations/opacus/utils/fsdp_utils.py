"""Opacus' sharded training, refused by name."""

from quietgrad.integrations.opacus.absent import absent

_FULLY_SHARDED = (
    "an Opacus script runs on one process here; a model of torch.distributed.fsdp.fully_shard "
    "trains in the loops of docs/loops.md (docs/many_processes.md)"
)
__getattr__ = absent(
    __name__, dict.fromkeys(("FSDP2Wrapper", "has_params", "iterate_submodules"), _FULLY_SHARDED)
)
