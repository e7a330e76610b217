"""Bytes that devices send each other in a step.

All numbers are bytes that one device sends, of the device that sends most; what it receives is as
much on average. Replicas move what ``distributed.exchange`` moves, to the byte, and shards what
``fully_shard`` gathers and ``clipping.sharded.sums`` scatters; tests count both. The rest is on
paper. A ring's share (W - 1) / W is counted wherever a collective operation has one.
"""

from __future__ import annotations

from collections.abc import Mapping

from quietgrad.clipping.norms.cost import Cost
from quietgrad.distributed.alike import MOST_FACTS
from quietgrad.distributed.exchange import owners_of
from quietgrad.distributed.groups.telling import WORD_BYTES
from quietgrad.scaling.paper.micro_batch import Paper
from quietgrad.scaling.ways.memory import WIDE, Job, item_of, sizes_of

FACTS_BYTES = 8 * (3 + MOST_FACTS)  # of an agreement, from one rank to each other one


def sent_by(paper: Paper, job: Job, denoised: bool = False) -> list[dict[str, int]]:
    """Rank -> what it sends in a release of replicas, exactly.

    Args:
        paper: the model.
        job: the step.
        denoised: whether owners denoise their matrices and send them once more.
    """
    entries, size = sizes_of(paper), job.devices
    owner = owners_of(entries, size)
    own = [0] * size
    for name, rank in owner.items():
        own[rank] += entries[name]
    wide = item_of([p for p in paper.parameters if p.trained])
    total = sum(own)
    return [
        {
            "sums to owners": wide * (total - mine),
            "released to all": wide * mine * (size - 1) * (2 if denoised else 1),
            "agreement": (size - 1) * FACTS_BYTES,
            "ledger's word": (size - 1) * WORD_BYTES if rank == 0 else 0,
        }
        for rank, mine in enumerate(own)
    ]


def replicas(paper: Paper, job: Job) -> dict[str, float]:
    """Of the device that sends most."""
    if job.devices == 1:
        return {}
    rows = sent_by(paper, job)
    return {k: float(v) for k, v in max(rows, key=lambda row: sum(row.values())).items()}


def shards(paper: Paper, job: Job) -> dict[str, float]:
    """Fully sharded: blocks are gathered for the forward and for the backward pass of every
    micro-batch, what lies outside of them once for both (as ``fully_shard`` keeps the outermost
    module's parameters in between); weighted products are reduced and scattered. Noise is drawn
    shard by shard: none.
    """
    share = (job.devices - 1) / job.devices * job.micro_batches
    wide = item_of([p for p in paper.parameters if p.trained])
    return {
        "blocks gathered": share * (2.0 * paper.parameter_bytes - paper.outside_bytes),
        "products scattered": share * wide * paper.trained_entries,
    }


def copies(paper: Paper, job: Job, parts: int) -> float:
    """Of what each of ``parts`` devices holds whole, or the same shards of: sums go to an owner
    among them, and what was released to all, as replicas do.
    """
    wide = item_of([p for p in paper.parameters if p.trained])
    return 2.0 * (parts - 1) / parts * wide * paper.copied / job.devices


def over_positions(
    costs: Mapping[str, Cost], estimator: str, sketch_dim: int, parts: int, item: int
) -> float:
    """Of norms, where the positions of a record lie on ``parts`` devices (context parallel).

    A sketch is linear in the positions: the parts' sketches are added up. A Gram matrix is not: it
    pairs every position with every other one, so the factors of all positions have to meet. A
    materialized gradient is linear, and as large as the parameter.

    Args:
        costs: parameter -> sizes of the micro-batch, all positions.
        estimator: "ghost", "materialized", "hutch" or "hutch++".
        sketch_dim: k.
        parts: devices that share a record.
        item: bytes of an entry of the factors.
    """
    share = (parts - 1) / parts
    total = 0.0
    for c in costs.values():
        if estimator == "ghost":
            total += share * item * c.factor_entries
        elif estimator == "materialized":
            total += 2.0 * share * WIDE * c.gradient_entries
        else:
            sketches = 1 if estimator == "hutch" else 3
            small = (
                max(c.rows, c.columns) if max(c.rows, c.columns) <= 8192 else min(c.rows, c.columns)
            )
            total += 2.0 * share * WIDE * sketches * c.examples * c.blocks * sketch_dim * small
    return total
