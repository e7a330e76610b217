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
from quietgrad.scaling import memory, pace, traffic
from quietgrad.scaling.devices import Device
from quietgrad.scaling.memory import Job, Memory
from quietgrad.scaling.paper import Paper

USABLE = (
    0.9  # of a device's memory: the rest is the context's, kernels' and what lies between blocks
)
EFFICIENCY = 0.4
TENSOR = 8  # devices that share a record, where a way has that

# What each way is today. Whoever makes one run changes its line.
RUNS: Mapping[str, str] = MappingProxyType(
    {
        "replicas": "runs today",
        "sharded": "runs today, by training.sharded or in loops of your own",
        "sharded, tensor parallel": "runs today, in loops of your own",
    }
)

PaperOf = Callable[[int, Engine], Paper]


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
        width, positions, blocks: of the residual stream, where the model has one: tokens an
            example.
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
    width: int = 0
    positions: int = 1
    blocks: int = 0

    def __post_init__(self) -> None:
        require_at_least("devices", self.devices, 1, "a plan is for one device or more")
        require_at_least("batch", self.batch, 1, "a step has one example or more")
        require_at_least("bands", self.bands, 1, "1 is independent noise")
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
        engine, examples, micro_batches: how a device's share is cut.
        largest: examples that would fit; 0 where not even one does.
        memory: of the device that holds most.
        sent: bytes a step, of the device that sends most.
        seconds: of a step, by what they are for; ``hidden`` ones run beside others.
        hidden: names of those.
    """

    name: str
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
        paper_of: (examples, engine) -> that micro-batch on paper.
    """
    names = ["replicas"]
    if asked.devices > 1:
        names.append("sharded")
    if asked.devices >= TENSOR and asked.width:
        names.append("sharded, tensor parallel")
    return [_way(name, asked, paper_of) for name in names]


def _job(asked: Asked, micro_batches: int) -> Job:
    fused = asked.device.kind == "cuda"
    return Job(asked.devices, micro_batches, asked.bands, asked.rows, asked.slots, fused)


def _memory(name: str, paper: Paper, job: Job) -> Memory:
    if name == "replicas":
        return memory.replicas(paper, job)
    return memory.shards(paper, job, TENSOR if "tensor" in name else 1)


def _way(name: str, asked: Asked, paper_of: PaperOf) -> Way:
    tensor = TENSOR if "tensor" in name else 1
    share = -(-asked.batch * tensor // asked.devices)
    room = USABLE * asked.device.memory
    engine: Engine = "bookkeeping"
    two, four = paper_of(2, engine), paper_of(4, engine)
    largest = _largest(name, asked, two, four, room)
    size = min(share, max(largest, 1))
    if name == "replicas" and not asked.clipper.sketched:
        # Where exact norms are taken, a run may take one example at a time instead.
        held = sum(_memory(name, two, _job(asked, 2)).resident.values())
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
    paper = paper_of(1, engine) if engine == "one-example" else two.at(size, four)
    job = _job(asked, rounds)
    kept = _memory(name, paper, job)
    if name == "replicas":
        sent = traffic.replicas(paper, job)
    else:
        sent = traffic.shards(paper, job, tensor)
        if tensor > 1:
            item = min(p.item for p in paper.parameters)
            places = share * asked.positions
            sent["activations added up"] = traffic.tensor_parallel(
                places, asked.width, asked.blocks, item, tensor
            )
    seconds = _seconds(asked, paper, engine, size, rounds, job, sent, tensor)
    hidden = frozenset({"blocks gathered", "products scattered"} & set(seconds))
    return Way(name, engine, size, rounds, largest, kept, sent, seconds, hidden)


def _largest(name: str, asked: Asked, two: Paper, four: Paper, room: float) -> int:
    """Examples whose micro-batch fits, by the line through two and four of them."""
    low, high = (_memory(name, paper, _job(asked, 2)) for paper in (two, four))
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
    tensor: int,
) -> dict[str, float]:
    device, share = asked.device, asked.efficiency
    examples = -(-asked.batch * tensor // asked.devices)
    found = {k: v / tensor for k, v in pace.computing(paper, examples, device, share).items()}
    if engine == "bookkeeping":
        norms = pace.norms_of(paper.trace, asked.policy(), size, device.throughput(share))
        found["norms"] = rounds * norms.seconds / tensor
    else:
        found["norms"] = examples * 20.0 * paper.trained_entries / device.bandwidth
    # Shards are even; an owner of whole parameters may have more than its part.
    entries = paper.trained_entries / job.devices
    if "sums to owners" in sent:
        wide = memory.item_of([p for p in paper.parameters if p.trained])
        entries = paper.trained_entries - sent["sums to owners"] / wide
    elif job.devices == 1:
        entries = paper.trained_entries
    found["noise"] = pace.noise_seconds(
        entries, job.bands, job.rows, (asked.steps or 1) / 2, device
    )
    weights = sum(p.entries * p.item for p in paper.parameters if p.trained)
    cut = 1 if "sums to owners" in sent or job.devices == 1 else job.devices
    found["optimiser"] = pace.optimiser_seconds(weights / cut, device)
    link = device.link_for(job.devices)
    for what, amount in sent.items():
        found[what] = amount / (device.link if what == "activations added up" else link)
    return found


def as_record(way: Way, device: Device) -> dict[str, Any]:
    """A way for ``--json``: bytes and seconds."""
    return {
        "way": way.name,
        "runs": way.runs,
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
