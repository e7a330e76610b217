"""Opacus' sharded training, refused by name."""

from quietgrad.integrations.opacus.absent import absent

__getattr__ = absent(
    __name__,
    {
        "FSDP2Wrapper": "an Opacus script runs on one process here; a model of "
        "torch.distributed.fsdp.fully_shard trains in the loops of docs/loops.md "
        "(docs/many_processes.md)"
    },
)
