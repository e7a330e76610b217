"""What to look at in a plan: the price of every noise memory and estimator, what does not fit or
waits for one device, and what a number of hours buys.
"""

from __future__ import annotations

from typing import Any

from quietgrad.clipping.norms.choice import Estimator
from quietgrad.scaling.paper.micro_batch import Paper
from quietgrad.scaling.ways import pace, traffic
from quietgrad.scaling.ways.forecast import POSITIONS, REPLICAS, USABLE, Asked, PaperOf, Way
from quietgrad.scaling.ways.memory import item_of, most_owned

BANDS = (1, 2, 4, 8, 16, 32, 64)
ESTIMATORS: tuple[tuple[Estimator, int], ...] = (
    ("exact", 0),
    ("ghost", 0),
    ("materialized", 0),
    ("hutch", 8),
    ("hutch", 32),
    ("hutch", 128),
    ("hutch++", 8),
    ("hutch++", 32),
)
STEPS = 1000  # of a run, where nothing says: rows are drawn again at half of them
SMALL = 1e8  # bytes that no warning is about
LARGE_SHARE = 0.2  # of a step, from which on a part of it is worth a word


def noise_table(asked: Asked, paper_of: PaperOf, way: Way) -> list[dict[str, Any]]:
    """What every number of bands holds and takes on a device, rows kept or drawn again."""
    paper = paper_of(2, "bookkeeping", way.parts)
    wide = item_of([p for p in paper.parameters if p.trained])
    entries = kept_by_one(asked, paper, way)
    drawn = entries * paper.drawn_entries / paper.trained_entries
    weights = paper_of(2, "bookkeeping", 1).parameter_bytes
    steps = asked.steps or STEPS
    rows = []
    for bands in BANDS:
        kept, again = (
            pace.noise_seconds(drawn, bands, keep, steps / 2, asked.device)
            for keep in (True, False)
        )
        held = (bands - 1) * wide * entries
        rows.append(
            {
                "bands": bands,
                "rows_bytes": held,
                "rows_over_weights": held / weights,
                "rows_fit": way.memory.peak - way.memory.resident["noise rows"] + held
                <= USABLE * asked.device.memory,
                "rows_seconds": kept,
                "regenerate_seconds": again,
                "regenerate_step": steps // 2,
            }
        )
    return rows


def kept_by_one(asked: Asked, paper: Paper, way: Way) -> float:
    """Entries of the releases that one device covers: of the one that has most."""
    if way.name != REPLICAS:
        return paper.trained_entries * way.parts / asked.devices
    return most_owned(paper, asked.devices)


def estimator_table(asked: Asked, paper_of: PaperOf, way: Way) -> list[dict[str, Any]]:
    """What every estimator takes in a step of one device, and would send if the positions of a
    record lay on several devices (context parallel, which no version runs yet).
    """
    whole, paper = paper_of(2, "bookkeeping", 1), paper_of(2, "bookkeeping", way.parts)
    plain = pace.computing(paper, way.examples * way.micro_batches, asked.device, asked.efficiency)
    speed = asked.device.throughput(asked.efficiency)
    item = min(p.item for p in paper.parameters)
    costs = {
        p.name: cost
        for p in whole.trace.parameters
        if (cost := p.cost_for(way.examples)) is not None
    }
    rows = []
    for name, sketch_dim in ESTIMATORS:
        policy = asked.policy()._replace(estimator=name, sketch_dim=max(sketch_dim, 1))
        norms = pace.norms_of(paper.trace, policy, way.examples, speed)
        spent = way.micro_batches * norms.seconds
        meeting = "materialized" if name == "exact" else name
        positions = traffic.over_positions(costs, meeting, sketch_dim, POSITIONS, item)
        if name == "exact":
            ghost = traffic.over_positions(costs, "ghost", 0, POSITIONS, item)
            positions = min(positions, ghost)
        rows.append(
            {
                "estimator": name,
                "sketch_dim": sketch_dim or None,
                "seconds": spent,
                "over_plain_step": spent / sum(plain.values()),
                "kept_bytes": norms.kept,
                "context_parallel_bytes": way.micro_batches * positions,
            }
        )
    return rows


def best_of(ways: list[Way], asked: Asked) -> Way:
    """What tables and hours are about: the fastest that fits; where none does, the smallest."""
    fitting = [way for way in ways if way.fits(asked.device)]
    if fitting:
        return min(fitting, key=lambda way: way.step_seconds)
    return min(ways, key=lambda way: way.memory.peak)


def warnings_of(asked: Asked, paper: Paper, ways: list[Way]) -> list[str]:
    """What does not fit, what dwarfs the model, what waits."""
    found = []
    room = USABLE * asked.device.memory
    for way in ways:
        if not way.fits(asked.device):
            parts = {**way.memory.resident, "a step": max(way.memory.phases.values())}
            most = max(parts, key=lambda name: parts[name])
            found.append(
                f"{way.name}: {_gb(way.memory.peak)} do not fit in {_gb(room)} of "
                f"{asked.device.name}; most of it is {most} ({_gb(parts[most])})"
            )
        rows = way.memory.resident["noise rows"]
        if rows > paper.parameter_bytes:
            found.append(
                f"{way.name}: {asked.bands - 1} rows of noise take {_gb(rows)} a device, more than "
                f"the model ({_gb(paper.parameter_bytes)}); noise.memory='regenerate' keeps none, "
                "fewer bands keep less"
            )
        step = way.step_seconds
        for what in way.sent:
            if way.seconds[what] > LARGE_SHARE * step and what not in way.hidden:
                found.append(
                    f"{way.name}: {what!r} takes {way.seconds[what] / step:.0%} of a step, and "
                    "nothing else runs meanwhile; more examples a device make it less"
                )
        rest = sum(v for k, v in way.seconds.items() if k not in way.hidden)
        if way.hidden and step > rest:
            found.append(f"{way.name}: a step waits for its blocks, not for products")
    if asked.batch < asked.devices:
        found.append(
            f"batch={asked.batch} gives {asked.devices - asked.batch} of {asked.devices} devices "
            "no record; expect larger batches, or take fewer devices"
            + (", or have devices share records" if asked.parts > 1 else "")
        )
    if asked.cached and asked.devices > 1:
        found.append(
            "sharded: not planned, as frozen layers run in every step there, and replicas keep "
            "their outputs; --set training.sharded=true plans both without"
        )
    replicas = ways[0]
    trained = sorted((p for p in paper.parameters if p.trained), key=lambda p: -p.entries)
    even = paper.trained_entries / asked.devices
    wide = item_of(trained)
    received = trained[0].entries * wide * asked.devices
    if asked.devices > 1 and trained[0].entries > 2 * even and received > SMALL:
        share = trained[0].entries / paper.trained_entries
        found.append(
            f"replicas: {trained[0].name} ({share:.0%} of what is trained) has one owner, who "
            f"draws its noise alone and receives {_gb(received)} "
            "of sums for it"
        )
    if replicas.largest == 0 and replicas.fits(asked.device):
        found.append("replicas: one example at a time is all that fits")
    return found


def in_hours(asked: Asked, way: Way, hours: float) -> dict[str, Any]:
    """What can be trained in so many hours."""
    steps = int(3600 * hours / way.step_seconds)
    return {
        "hours": hours,
        "way": way.name,
        "runs": way.runs,
        "steps": steps,
        "examples": steps * asked.batch,
        "positions": steps * asked.batch * asked.positions,
    }


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
