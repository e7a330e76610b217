"""How a plan becomes a run: the ledger is locked, and the session gets a root of its own.

On several ranks the first one does that, and tells the others: it alone has the ledger and the
secret file, and its roots are theirs. What has to be the same everywhere is compared before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from quietgrad.checks import require_int
from quietgrad.clipping.soundness.processes import refuse_launcher
from quietgrad.distributed.alike import digest, versions
from quietgrad.distributed.cut.ranks import CutRanks
from quietgrad.distributed.groups.failing import require_to_end_at_failures, setting_that_goes_on
from quietgrad.distributed.groups.restarts import begun_before, counted
from quietgrad.distributed.ranks import FIRST, Ranks
from quietgrad.distributed.team import Alone, Team
from quietgrad.keyring import KeyRing, Session, rows_path
from quietgrad.ledger import LedgerContents, LedgerWriter, holds_records, read_ledger
from quietgrad.noise.mechanism import GaussianNoise
from quietgrad.plan.by_step.course import require_run_to_extend
from quietgrad.plan.planned import Planned
from quietgrad.plan.run import PrivateRun
from quietgrad.plan.seeds import Seed, SeedUse, claim_seed, key_of_seed, root_key
from quietgrad.plan.session.noise_session import NoiseSession
from quietgrad.plan.session.starts import Begun, begin_session, new_session
from quietgrad.randomness import RandomKey
from quietgrad.schedules import Course

DIFFERS = {
    "versions": "install the same versions of torch, numpy and quietgrad everywhere",
    "mechanism": "build the plan from the same settings on every rank",
    "sampling": "build the plan for the same records (ids, owners, number) on every rank",
    "seed": "give every rank the same seed, or none: the first rank then draws a root for all",
    "ranks": "give plan.start the same tensor_parallel on every rank",
    "files": "give ledger and keys on every rank or on none, and the same resume; the first rank "
    "alone writes them",
}


class Startable(Planned, Protocol):
    """What a start reads of a plan, beside what runs."""

    @property
    def seed(self) -> Seed | None: ...
    @property
    def data_are_public(self) -> bool: ...
    @property
    def noise(self) -> GaussianNoise: ...
    @property
    def extensions(self) -> tuple[tuple[Course, float | None], ...]: ...
    @property
    def first_planned(self) -> Course: ...
    @property
    def first_event(self) -> Any: ...
    @property
    def dataset_size(self) -> int: ...
    @property
    def max_grad_norm(self) -> float: ...
    @property
    def record_identity(self) -> str: ...
    @property
    def denoising(self) -> Any: ...
    def sampling_facts(self) -> dict[str, object]: ...
    def require_same_mechanism(self, contents: LedgerContents) -> None: ...


@dataclass
class Started:
    """What a run begins with, on the process that keeps the ledger.

    Attributes:
        begun: roots, and the block that goes on.
        writer: of the ledger; None without one.
        released, given_up, max_grad_norm: what the ledger says of earlier sessions.
        use: of a secret seed.
    """

    begun: Begun
    writer: LedgerWriter | None = None
    released: int = 0
    given_up: bool = False
    max_grad_norm: float | None = None
    use: SeedUse | None = None


def start_run(
    plan: Startable,
    ledger: str | Path | None,
    keys: str | Path | None,
    resume: bool | None,
    tensor_parallel: int = 1,
) -> PrivateRun:
    """See ``PrivacyPlan.start``."""
    require_run_to_extend(plan.extensions, ledger)
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    _require_divisor(tensor_parallel, size)
    secret = None if keys is None else Path(keys)
    if size > 1:
        refuse_launcher(group_size=size)
        ranks = Ranks() if tensor_parallel == 1 else CutRanks(tensor_parallel)
        found = _started_together(plan, ledger, secret, resume, ranks)
        return _run(plan, found, None, ranks)
    refuse_launcher()
    _require_known_past(ledger, resume, counted())
    found = _started(plan, ledger, secret, resume)
    return _run(
        plan, found, None if secret is None or ledger is None else rows_path(secret), Alone()
    )


def _require_divisor(tensor_parallel: int, size: int) -> None:
    require_int("tensor_parallel", tensor_parallel)
    if tensor_parallel < 1 or size % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel} with {size} ranks: so many ranks share a record, "
            "and all ranks are in groups of so many; give a divisor of the number of ranks, 1 for "
            "records that lie on one rank each (docs/tensor_parallel.md)"
        )


def _run(plan: Startable, found: Started, rows: Path | None, team: Team) -> PrivateRun:
    noise = NoiseSession(plan.noise, found.begun, found.writer, rows)
    return PrivateRun(
        plan,
        noise,
        found.writer,
        found.released,
        found.given_up,
        found.use,
        found.max_grad_norm,
        team,
    )


def _started(
    plan: Startable, ledger: str | Path | None, secret: Path | None, resume: bool | None
) -> Started:
    """On the process that keeps the ledger: locked, compared with the plan, and the session's
    start written down.
    """
    key, planned = root_key(plan.seed), plan.first_planned
    if ledger is None:
        session = new_session(0, plan.seed, plan.data_are_public)
        return Started(Begun(KeyRing((session,))), use=_claim(plan, key, None, 0))
    if secret is not None and secret.exists() and not holds_records(Path(ledger)):
        raise ValueError(
            f"keys={str(secret)!r} is there, but no ledger of its run at ledger={str(ledger)!r}, "
            "so nothing is known of what was released; restore the ledger with its count "
            "file, or "
            "begin in a new run directory"
        )
    # Locked before it is read: nobody else can add releases in between.
    writer = LedgerWriter(ledger, resume)
    try:
        contents = writer.contents
        if contents.header:
            plan.require_same_mechanism(contents)
        use = _claim(plan, key, ledger, contents.releases)
        if not contents.header:
            writer.mechanism(
                plan.first_event,
                planned if planned.varies else None,
                planned_steps=planned.steps,
                delta=plan.delta,
                dataset_size=plan.dataset_size,
                max_grad_norm=plan.max_grad_norm,
                seeded=plan.seed is not None,
                **plan.sampling_facts(),
                **plan.sampler.sizes_of_parts(plan.record_identity),
            )
        for more, target in plan.extensions[len(contents.extensions) :]:
            writer.extension(more, target)
        session = new_session(contents.releases, plan.seed, plan.data_are_public)
        begun = Begun(KeyRing((session,)))
        if contents.releases < plan.steps:  # else nothing is left to draw, or to write down
            begun = begin_session(session, writer, contents, plan.seed, secret, plan.noise.digest)
    except BaseException:
        writer.close()
        raise
    given_up = contents.not_private is not None
    return Started(begun, writer, contents.releases, given_up, contents.max_grad_norm, use)


def _claim(
    plan: Startable, key: RandomKey, ledger: str | Path | None, releases: int
) -> SeedUse | None:
    secret = plan.seed is not None and not plan.data_are_public
    return claim_seed(key, ledger, releases) if secret else None


def _started_together(
    plan: Startable,
    ledger: str | Path | None,
    secret: Path | None,
    resume: bool | None,
    ranks: Ranks,
) -> Started:
    """The first rank starts; the others get its roots, and nothing to write with."""
    own = _facts(plan, ledger, secret, resume, ranks), counted(), setting_that_goes_on()
    told_by_rank = ranks.all_said(own)
    _require_alike([facts for facts, _, _ in told_by_rank])
    require_to_end_at_failures([setting for _, _, setting in told_by_rank])
    # Agents of several machines count restarts each for itself.
    restarts = max(count for _, count, _ in told_by_rank)
    ranks.form()
    found: Started | None = None
    error: BaseException | None = None
    if ranks.rank == FIRST:
        try:
            _require_known_past(ledger, resume, restarts)
            found = _started(plan, ledger, secret, resume)
        except BaseException as raised:
            error = raised
    told = ranks.from_first(_told(found, error))
    if error is not None:
        raise error
    if "error" in told:
        raise RuntimeError(f"rank {FIRST} could not start the run: {told['error']}")
    if found is None:
        sessions = tuple(
            Session(step, name, RandomKey(root, reproducible), source)
            for step, name, root, reproducible, source in told["sessions"]
        )
        begun = Begun(KeyRing(sessions), told["block"], told["drawn"])
        found = Started(
            begun, None, told["released"], told["given_up"], told["max_grad_norm"], None
        )
    try:
        _require_newest(ranks, ledger, found.released)
    except BaseException:
        if found.writer is not None:
            found.writer.close()
        raise
    return found


def _told(found: Started | None, error: BaseException | None) -> dict[str, Any]:
    """What the first rank tells the others; with the secret roots."""
    if found is None:
        return {"error": str(error) or type(error).__name__}
    return {
        "sessions": [
            (s.step, s.name, s.root.root, s.root.reproducible, s.source)
            for s in found.begun.ring.sessions
        ],
        "block": found.begun.block,
        "drawn": found.begun.drawn,
        "released": found.released,
        "given_up": found.given_up,
        "max_grad_norm": found.max_grad_norm,
    }


def _facts(
    plan: Startable,
    ledger: str | Path | None,
    secret: Path | None,
    resume: bool | None,
    ranks: Ranks,
) -> dict[str, str]:
    """Digests of what has to be the same on all ranks."""
    sampler, noise = plan.sampler, plan.noise
    users = sampler.users
    return {
        "versions": versions(),
        "mechanism": digest(
            plan.first_event.to_json(),
            plan.first_planned.to_json(),
            [(course.to_json(), target) for course, target in plan.extensions],
            plan.clipper,
            (noise.noise_multiplier, noise.memory, noise.source.name, noise.digest),
            (plan.delta, plan.dataset_size, plan.steps, plan.data_are_public),
            re.sub(r" at 0x[0-9a-f]+", "", repr(plan.denoising)),
        ),
        "sampling": digest(
            plan.sampling_facts(),
            (sampler.dataset_size, sampler.sample_rate, sampler.bands),
            "" if sampler.parts is None else sampler.parts.tobytes().hex(),
            "" if users is None else users.order.tobytes().hex() + users.offsets.tobytes().hex(),
            "" if users is None else b"".join(users.identities).hex(),
        ),
        "seed": "" if plan.seed is None else digest(key_of_seed(plan.seed).root.hex()),
        "files": digest(ledger is None, secret is None, resume),
        "ranks": digest(type(ranks).__name__, ranks.share[1]),
    }


def _require_alike(told: list[dict[str, str]]) -> None:
    for name in told[0]:
        for rank, facts in enumerate(told):
            if facts[name] != told[0][name]:
                raise RuntimeError(
                    f"ranks 0 and {rank} differ in {name}, so they would not be one run: "
                    f"{DIFFERS[name]}"
                )


def _require_known_past(ledger: str | Path | None, resume: bool | None, restarts: int) -> None:
    """After a restart by torchrun, a run that finds no ledger would forget what was released."""
    again = begun_before("a run")  # asked by every start: later ones find its mark
    if not (restarts or again) or resume is False:
        return
    if ledger is None or not holds_records(Path(ledger)):
        times = f"{restarts} times" if restarts else "after a run had begun"
        raise ValueError(
            f"torchrun has restarted these processes {times}, and there is no ledger at "
            f"ledger={None if ledger is None else str(ledger)!r} that says what was released "
            "before; give plan.start a ledger on a disk that every machine sees, or, where nothing "
            "was released, resume=False"
        )


def _require_newest(ranks: Ranks, ledger: str | Path | None, released: int) -> None:
    """That no rank sees a ledger with more releases, as after the first rank moved to a machine
    with an older copy, or none.
    """
    seen = 0
    if ledger is not None and ranks.rank != FIRST and holds_records(Path(ledger)):
        try:
            seen = read_ledger(ledger).releases
        except ValueError:
            seen = released + 1
    for rank, count in enumerate(ranks.all_said(seen)):
        if count > released:
            raise RuntimeError(
                f"rank {rank} sees another ledger at ledger={str(ledger)!r} than the first rank, "
                "and it holds more releases, or is damaged: the first rank's is not the newest. "
                "Keep the ledger on a disk that every machine sees"
            )
