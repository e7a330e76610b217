"""Bytes on one device, by what they are: what stays from step to step, and the most that each part
of a step adds to it.

The parts are those of the code that runs (``plan.run``, ``distributed.exchange``,
``clipping.sharded.sums``, ``noise.mechanism``), counted tensor by tensor; tests hold the sum
against real steps. What ``fully_shard`` gathers is taken to be two blocks, and what lies outside of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from quietgrad.clipping.sharded.sums import buckets_of, rows_of_each
from quietgrad.distributed.exchange import buckets, owners_of
from quietgrad.scaling.paper.micro_batch import Paper, PaperParameter

IN_DOUBT = "clip, a norm in doubt"
WIDE = 4  # bytes of an entry of sums and noise, for weights of float32 and shorter


@dataclass(frozen=True)
class Job:
    """What a step is, beside the model.

    Attributes:
        devices: W.
        micro_batches: of one device in a step.
        bands: b.
        rows: whether earlier rows of noise are kept; else they are drawn again.
        slots: copies of the weights that the optimiser keeps (AdamW 2, SGD 0).
        fused: whether the optimiser steps on all parameters at once, with copies of all.
    """

    devices: int
    micro_batches: int = 1
    bands: int = 1
    rows: bool = True
    slots: int = 2
    fused: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes of the device that holds the most.

    Attributes:
        resident: what stays, by name.
        phases: part of a step -> the most that is there over what stays.
        activations: of ``phases["clip"]``, what autograd and the engine keep; the rest are sums.
    """

    resident: Mapping[str, float]
    phases: Mapping[str, float]
    activations: float

    @property
    def peak(self) -> float:
        """The most at once."""
        return sum(self.resident.values()) + max(self.phases.values())


def sizes_of(paper: Paper) -> dict[str, int]:
    """Trained parameter -> entries."""
    return {p.name: p.entries for p in paper.parameters if p.trained}


def most_owned(paper: Paper, devices: int) -> int:
    """Entries of the replica that owns most: it draws their noise, and keeps rows of them."""
    entries, loads = sizes_of(paper), [0] * devices
    for name, rank in owners_of(entries, devices).items():
        loads[rank] += entries[name]
    return max(loads)


def item_of(trained: list[PaperParameter]) -> int:
    """Bytes of an entry of the sums: float32 at least."""
    return max((p.item for p in trained if p.item > WIDE), default=WIDE)


def replicas(paper: Paper, job: Job) -> Memory:
    """A whole copy of the model on every device, as runs today.

    Args:
        paper: a micro-batch, counted without earlier sums.
        job: the step.
    """
    trained = [p for p in paper.parameters if p.trained]
    wide = item_of(trained)
    sums = wide * paper.trained_entries
    weights = sum(p.entries * p.item for p in trained)
    largest = max(p.entries * p.item for p in trained)
    entries = sizes_of(paper)
    owner = owners_of(entries, job.devices)
    own = wide * most_owned(paper, job.devices)
    resident = {
        "parameters": float(paper.parameter_bytes + paper.buffer_bytes),
        "optimiser": float(job.slots * weights),
        "gradients": float(weights),
        "noise rows": float((job.bands - 1) * own if job.rows else 0),
    }
    clip = max(paper.peak(), sums)  # of a parameter that is never called there are zeros
    phases = {"clip": float(clip)}
    if job.micro_batches > 1:  # each has sums of its own, which are added to those so far
        phases["clip"] += sums
        phases["add"] = 3.0 * sums
    # An example whose norm's rounding is in doubt has its gradient formed and added by itself.
    phases[IN_DOUBT] = (
        paper.peak("backward 0", "backward -1")
        + 2.0 * sums
        + (sums if job.micro_batches > 1 else 0)
    )
    of_rank: dict[int, list[int]] = {}
    for p in trained:
        of_rank.setdefault(owner[p.name], []).append(wide * p.entries)
    phases["noise"] = sums + max(_drawn(sizes, job) for sizes in of_rank.values())
    if job.devices > 1:
        most = _exchanged(trained, owner, job.devices, wide)
        phases["sums to owners"] = sums + most[0]
        phases["released to all"] = sums + most[1]
    phases["write"] = 2.0 * sums
    phases["optimiser step"] = float(2 * weights if job.fused else 2 * largest)
    return Memory(resident, phases, float(clip - sums))


def neighbours(paper: Paper, job: Job) -> Memory:
    """One group of devices that share each record, layers cut over them, nothing sharded. What is
    in doubt is formed layer by layer, as where models are sharded, and not counted.
    """
    found = replicas(paper, job)
    phases = {k: v for k, v in found.phases.items() if k != IN_DOUBT}
    return replace(found, phases=phases)


def _drawn(own: list[int], job: Job) -> float:
    """The most that drawing holds beside the sums: of each parameter the draw, that times its
    standard deviation, and the sum with it, which stays. A row of correlated noise is made whole
    before; so are the sums of all ranks.
    """
    done, most = 0, 0
    for size in own:
        most = max(most, done + (3 if job.bands == 1 else 2) * size)
        done += size
    return float(most + sum(own) * ((job.devices > 1) + (job.bands > 1)))


def _exchanged(
    trained: list[PaperParameter], owner: Mapping[str, int], size: int, wide: int
) -> tuple[float, float]:
    """The most that the two exchanges hold beside the sums, on the owner of most: buckets as they
    are cut (``distributed.exchange``), each let go when the next one is made.
    """
    kind = torch.float64 if wide == 8 else torch.float32
    like = {p.name: torch.empty(p.shape, dtype=kind, device="meta") for p in trained}
    by_name = {p.name: p.entries for p in trained}
    cut = list(buckets(like))
    most = [0.0, 0.0]
    ranks = {owner[p.name] for p in sorted(trained, key=lambda p: -p.entries)[:2]} | {0}
    for rank in ranks:
        whole, found = 0, 0
        sent = received = 0
        own = sum(n for name, n in by_name.items() if owner[name] == rank)
        for names in cut:
            all_of = sum(by_name[name] for name in names)
            mine = sum(by_name[name] for name in names if owner[name] == rank)
            # The bucket before is there until its names are bound anew.
            first = whole + sent + received + all_of
            sent, before = all_of, received
            second = whole + sent + before + mine * size
            received = mine * size
            third = whole + sent + received + mine
            whole += mine
            most[0] = max(most[0], wide * max(first, second, third))
        back = 0
        for names in cut:
            all_of = sum(by_name[name] for name in names)
            mine = sum(by_name[name] for name in names if owner[name] == rank)
            # What was received stays: the released values are cut from it.
            found += all_of
            held = 2 * own + found + mine + max(back, mine * size) + min(back, mine * size)
            back = mine * size
            most[1] = max(most[1], wide * held)
    return most[0], most[1]


def shards(paper: Paper, job: Job) -> Memory:
    """Parameters, sums, optimiser and noise cut over all devices (``fully_shard``), blocks gathered
    as they are needed.

    Two blocks are whole at a time (one runs, the next one arrives), and what lies outside of them
    all the time, as ``fully_shard`` keeps it.

    Args:
        paper: as above; where several devices share a record, of one of them.
        job: the step. With groups of devices that share a record, its devices are the groups.
    """
    trained = [p for p in paper.parameters if p.trained]
    wide = item_of(trained)
    sums = wide * paper.trained_entries / job.devices
    weights = sum(p.entries * p.item for p in trained) / job.devices
    gathered = paper.outside_bytes + 2.0 * paper.largest_block_bytes
    resident = {
        "parameters": paper.parameter_bytes / job.devices + paper.buffer_bytes,
        "optimiser": job.slots * weights,
        "gradients": weights,
        "noise rows": (job.bands - 1) * sums if job.rows else 0.0,
    }
    kept = paper.peak("forward", "backward")
    earlier = sums if job.micro_batches > 1 else 0.0
    own = [wide * _rows_here(p, job.devices) for p in trained]
    phases = {
        "clip": earlier + kept + gathered,
        "clip, sums to shards": earlier + _scattered(paper, trained, job, wide),
        "noise": sums + _drawn(own, replace(job, devices=1)),
        "write": 2.0 * sums,
        "optimiser step": 2.0 * weights,
    }
    return Memory(resident, phases, kept)


def _rows_here(p: PaperParameter, devices: int) -> int:
    """Entries of the first device's shard of a parameter."""
    rows = p.shape[0] if p.shape else 1
    return rows_of_each(rows, devices) * (p.entries // max(rows, 1))


def _scattered(paper: Paper, trained: list[PaperParameter], job: Job, wide: int) -> float:
    """The most, over earlier sums, while weighted products are formed one after the other, written
    into buckets and scattered (``clipping.sharded.sums``): what was kept goes as they come, and one
    bucket is on its way while the next is filled.
    """
    kind = torch.float64 if wide == 8 else torch.float32
    like = {p.name: torch.empty(p.shape, dtype=kind, device="meta") for p in trained}
    entries = sizes_of(paper)
    total = sum(entries.values())
    factors = paper.peak("backward 0")
    most = done = sums = away = 0.0
    for bucket in buckets_of(like, job.devices):
        filled = job.devices * wide * sum(bucket.widths.values())
        for name in bucket.widths:
            product = wide * entries[name]
            left = factors * (1.0 - done / total)
            most = max(most, left + sums + away + filled + product)
            done += entries[name]
        # What has arrived of the one before becomes sums while this one is still there.
        arrived = away / (job.devices + 1) if job.micro_batches == 1 else 0.0
        left = factors * (1.0 - done / total)
        most = max(most, left + sums + away + arrived + filled + product)
        sums += arrived
        away = filled * (1.0 + 1.0 / job.devices)
    return most
