"""The whole plan for a number of devices, way by way: what each holds, sends and takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quietgrad.checks import require_at_least, require_positive
from quietgrad.clipping.clipper import Clipper
from quietgrad.clipping.engines.work import Engine
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.cost import MODELLED_GPU, MODELLED_PROCESSOR
from quietgrad.clipping.planner.execution import choose_execution
from quietgrad.scaling.paper.micro_batch import Paper
from quietgrad.scaling.ways import memory, pace, traffic
from quietgrad.scaling.ways.devices import Device
from quietgrad.scaling.ways.memory import Job, Memory

USABLE = (
    0.9  # of a device's memory: the rest is the context's, kernels' and what lies between blocks
)
EFFICIENCY = 0.4
ACTIVATIONS, COPIES = "activations of cut layers", "layers held whole"
POSITIONS = 8  # devices that would share a record's positions (context parallel)

REPLICAS, SHARDED, CUT = "replicas", "sharded", "sharded, tensor parallel"

# What each way is today. Whoever makes one run changes its line.
RUNS: Mapping[str, str] = MappingProxyType(
    {
        REPLICAS: "runs today",
        SHARDED: "runs today, by training.sharded or in loops of your own",
        CUT: "runs today, in loops of your own",
    }
)

PaperOf = Callable[[int, Engine, int], Paper]


@dataclass(frozen=True)
class Asked:
    """What a plan is for.

    Attributes:
        devices: W.
        device: the kind.
        batch: B, examples expected in a step, of all devices together.
        clipper: settings of the norms.
        bands, rows: of the noise, and whether earlier rows are kept.
        slots: copies of the weights that the optimiser keeps.
        steps: T; None where nothing says.
        efficiency: share of the peak that products reach.
        positions: tokens an example.
        parts: devices that share each record where layers are cut; 1: no way to cut them is known.
        cached: whether frozen layers are not run in a step, as shards have to.
    """

    devices: int
    device: Device
    batch: int
    clipper: Clipper
    bands: int = 1
    rows: bool = True
    slots: int = 2
    steps: int | None = None
    efficiency: float = EFFICIENCY
    positions: int = 1
    parts: int = 1
    cached: bool = False

    def __post_init__(self) -> None:
        require_at_least("devices", self.devices, 1, "a plan is for one device or more")
        require_at_least("batch", self.batch, 1, "a step has one example or more")
        require_at_least("bands", self.bands, 1, "1 is independent noise")
        if self.parts < 1 or self.devices % self.parts:
            raise ValueError(
                f"parts={self.parts} devices cannot share each record among {self.devices}; give "
                "a divisor"
            )
        require_positive("efficiency", self.efficiency, "0.4 is usual")
        if self.efficiency > 1:
            raise ValueError(
                f"efficiency={self.efficiency!r} is above 1: it is the share of the peak that "
                "products reach; 0.4 is usual"
            )

    def policy(self) -> Policy:
        """How estimators are chosen, by the speeds that a run of that kind of device chooses by."""
        stated = MODELLED_GPU if self.device.kind == "cuda" else MODELLED_PROCESSOR
        return Policy(self.clipper.estimator, self.clipper.sketch_dim, stated)


@dataclass(frozen=True)
class Way:
    """One way to run it.

    Attributes:
        name: of the way; ``runs`` says whether it does.
        parts: devices that share each record.
        engine, examples, micro_batches: how a device's share is cut.
        largest: examples that would fit; 0 where not even one does.
        memory: of the device that holds most.
        sent: bytes a step, of the device that sends most.
        seconds: of a step, by what they are for; ``hidden`` ones run beside others.
        hidden: names of those.
    """

    name: str
    parts: int
    engine: Engine
    examples: int
    micro_batches: int
    largest: int
    memory: Memory
    sent: Mapping[str, float]
    seconds: Mapping[str, float]
    hidden: frozenset[str] = field(default_factory=frozenset)

    @property
    def runs(self) -> str:
        """Whether it does."""
        return RUNS[self.name]

    @property
    def step_seconds(self) -> float:
        """Of a whole step: what is hidden costs where it takes longer than all else."""
        shown = sum(v for k, v in self.seconds.items() if k not in self.hidden)
        return max(shown, sum(v for k, v in self.seconds.items() if k in self.hidden))

    def fits(self, device: Device) -> bool:
        """Whether the most at once is in the usable memory."""
        return self.memory.peak <= USABLE * device.memory


def ways_of(asked: Asked, paper_of: PaperOf) -> list[Way]:
    """Every way, the ones that run first.

    Args:
        asked: what for.
        paper_of: (examples, engine, devices that share a record) -> what one of these has of that
            micro-batch, on paper.
    """
    names = [REPLICAS]
    if asked.devices > 1 and not asked.cached:
        names.append(SHARDED)
    if asked.parts > 1:
        names.append(CUT)
    return [_way(name, asked, paper_of) for name in names]


def _parts(name: str, asked: Asked) -> int:
    return asked.parts if name == CUT else 1


def _job(name: str, asked: Asked, micro_batches: int) -> Job:
    fused = asked.device.kind == "cuda"
    groups = asked.devices // _parts(name, asked)
    return Job(groups, micro_batches, asked.bands, asked.rows, asked.slots, fused)


def memory_of(way: str, paper: Paper, job: Job) -> Memory:
    """Of one device.

    Args:
        way: its name.
        paper: what the device has of a micro-batch.
        job: the step; where several devices share each record, its devices are their groups.
    """
    if way == REPLICAS:
        return memory.replicas(paper, job)
    return memory.shards(paper, job) if job.devices > 1 else memory.neighbours(paper, job)


def sent_in(way: str, paper: Paper, job: Job, positions: int, parts: int = 1) -> dict[str, float]:
    """What one device sends in a step, by name, in bytes.

    Args:
        way, paper, job: as for ``memory_of``.
        positions: that the device runs in the step, of all records.
        parts: devices that share each record.
    """
    if way == REPLICAS:
        return traffic.replicas(paper, job)
    sent = traffic.shards(paper, job) if job.devices > 1 else {}
    if way == CUT:
        sent[ACTIVATIONS] = positions * paper.sent_per_position
        sent[COPIES] = traffic.copies(paper, job, parts)
    return sent


def _way(name: str, asked: Asked, paper_of: PaperOf) -> Way:
    parts = _parts(name, asked)
    share = -(-asked.batch * parts // asked.devices)
    room = USABLE * asked.device.memory
    engine: Engine = "bookkeeping"
    two, four = paper_of(2, engine, parts), paper_of(4, engine, parts)
    largest = _largest(name, asked, two, four, room)
    size = min(share, max(largest, 1))
    if name == REPLICAS and not asked.clipper.sketched:
        # Where exact norms are taken, a run may take one example at a time instead.
        held = sum(memory_of(name, two, _job(name, asked, 2)).resident.values())
        policies = {p.name: asked.policy().for_shape(p.shape) for p in two.trace.parameters}
        how = choose_execution(
            two.trace,
            policies,
            size,
            asked.device.throughput(asked.efficiency),
            max(room - held, 1.0),
            ("bookkeeping", "one-example"),
        )
        engine, size = how.engine, how.physical_batch_size
    rounds = -(-share // size)
    size = -(-share // rounds)
    paper = paper_of(1, engine, parts) if engine == "one-example" else two.at(size, four)
    job = _job(name, asked, rounds)
    kept = memory_of(name, paper, job)
    sent = sent_in(name, paper, job, share * asked.positions, parts)
    seconds = _seconds(asked, paper, engine, size, rounds, job, sent, parts)
    hidden = frozenset({"blocks gathered", "products scattered"} & set(seconds))
    return Way(name, parts, engine, size, rounds, largest, kept, sent, seconds, hidden)


def _largest(name: str, asked: Asked, two: Paper, four: Paper, room: float) -> int:
    """Examples whose micro-batch fits, by the line through two and four of them."""
    low, high = (memory_of(name, paper, _job(name, asked, 2)) for paper in (two, four))
    fixed = sum(low.resident.values())
    if fixed + max(v for k, v in low.phases.items() if not k.startswith("clip")) > room:
        return 0
    found = []
    for phase, held in low.phases.items():
        if phase.startswith("clip"):  # which grow with the examples
            slope = max((high.phases[phase] - held) / 2, 1.0)
            found.append(int(2 + (room - fixed - held) // slope))
    return max(0, min(found))


def _seconds(
    asked: Asked,
    paper: Paper,
    engine: Engine,
    size: int,
    rounds: int,
    job: Job,
    sent: Mapping[str, float],
    parts: int,
) -> dict[str, float]:
    device, share = asked.device, asked.efficiency
    examples = -(-asked.batch * parts // asked.devices)
    found = pace.computing(paper, examples, device, share)
    if engine == "bookkeeping":
        norms = pace.norms_of(paper.trace, asked.policy(), size, device.throughput(share))
        found["norms"] = rounds * norms.seconds
    else:
        found["norms"] = examples * 20.0 * paper.trained_entries / device.bandwidth
    # Shards are even; an owner of whole parameters may have more than its part.
    entries = paper.drawn_entries / job.devices
    if "sums to owners" in sent:
        entries = memory.most_owned(paper, job.devices)
    found["noise"] = pace.noise_seconds(
        entries, job.bands, job.rows, (asked.steps or 1) / 2, device
    )
    weights = sum(p.entries * p.item for p in paper.parameters if p.trained)
    cut = 1 if "sums to owners" in sent or job.devices == 1 else job.devices
    found["optimiser"] = pace.optimiser_seconds(weights / cut, device)
    link = device.link_for(asked.devices)
    for what, amount in sent.items():
        found[what] = amount / (device.link if what in (ACTIVATIONS, COPIES) else link)
    return found


def as_record(way: Way, device: Device) -> dict[str, Any]:
    """A way for ``--json``: bytes and seconds."""
    return {
        "way": way.name,
        "runs": way.runs,
        "tensor_parallel": way.parts,
        "fits": way.fits(device),
        "engine": way.engine,
        "examples": way.examples,
        "micro_batches": way.micro_batches,
        "largest_physical_batch": way.largest,
        "peak_bytes": way.memory.peak,
        "resident_bytes": dict(way.memory.resident),
        "phase_bytes": dict(way.memory.phases),
        "activation_bytes": way.memory.activations,
        "sent_bytes": dict(way.sent),
        "seconds": dict(way.seconds),
        "step_seconds": way.step_seconds,
    }
