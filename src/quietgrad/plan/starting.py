"""How a plan becomes a run: the ledger is locked, and the session gets a root of its own.

On several ranks the first one does that, and tells the others: it alone has the ledger and the
secret file, and its roots are theirs. What has to be the same everywhere is compared before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from quietgrad.checks import require_int, require_no_home
from quietgrad.clipping.soundness.processes import refuse_launcher
from quietgrad.distributed.cut.ranks import CutRanks
from quietgrad.distributed.groups.failing import require_to_end_at_failures, setting_that_goes_on
from quietgrad.distributed.groups.restarts import begun_before, counted
from quietgrad.distributed.groups.telling import refuse_together, tried, word_of
from quietgrad.distributed.ranks import FIRST, Ranks
from quietgrad.distributed.team import Alone, Team
from quietgrad.keyring import KeyRing, Session, rows_path
from quietgrad.ledger import LedgerWriter, holds_records, read_ledger
from quietgrad.plan.by_step.course import require_run_to_extend
from quietgrad.plan.planned import Startable
from quietgrad.plan.run import PrivateRun
from quietgrad.plan.seeds import SeedUse, claim_seed, root_key
from quietgrad.plan.session.facts import facts_of, require_alike
from quietgrad.plan.session.noise_session import NoiseSession
from quietgrad.plan.session.places import Places
from quietgrad.plan.session.starts import Begun, begin_session, new_session, require_apart
from quietgrad.randomness import RandomKey


@dataclass
class Started:
    """What a run begins with, on the process that keeps the ledger.

    Attributes:
        begun: roots, and the block that goes on.
        writer: of the ledger; None without one.
        released, given_up, max_grad_norm: what the ledger says of earlier sessions.
        use: of a secret seed.
        name: of the run, that of its first session.
        places: whether records lie where they lay; None where it does not matter, and on ranks
            whose records are compared with the first one's.
    """

    begun: Begun
    writer: LedgerWriter | None = None
    released: int = 0
    given_up: bool = False
    max_grad_norm: float | None = None
    use: SeedUse | None = None
    name: str = ""
    places: Places | None = None


def start_run(
    plan: Startable,
    ledger: str | Path | None,
    keys: str | Path | None,
    resume: bool | None,
    tensor_parallel: int = 1,
) -> PrivateRun:
    """See ``PrivacyPlan.start``."""
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if size > 1:
        return _started_together(plan, ledger, keys, resume, tensor_parallel, size)
    secret = _usable(plan, ledger, keys, tensor_parallel, size)
    _require_known_past(ledger, resume, counted())
    found = _started(plan, ledger, secret, resume)
    kept = None if ledger is None else secret
    with _closed_if_refused(found):
        return _run(plan, found, kept, Alone())


def _usable(
    plan: Startable,
    ledger: str | Path | None,
    keys: str | Path | None,
    tensor_parallel: int,
    size: int,
) -> Path | None:
    """The secret file, where what a start was given can be used here."""
    require_run_to_extend(plan.extensions, ledger)
    _require_divisor(tensor_parallel, size)
    refuse_launcher(group_size=size)
    for name, place in (("ledger", ledger), ("keys", keys)):
        if place is not None:
            require_no_home(name, place)
            if not Path(place).name:
                raise ValueError(f"{name}={str(place)!r} names no file; give the place of one")
    if keys is not None and ledger is not None:
        require_apart(Path(keys), Path(ledger))
    # A script may change its folder while the run lasts.
    return None if keys is None else Path(keys).absolute()


def _require_divisor(tensor_parallel: int, size: int) -> None:
    require_int("tensor_parallel", tensor_parallel)
    if tensor_parallel < 1 or size % tensor_parallel:
        raise ValueError(
            f"tensor_parallel={tensor_parallel} with {size} ranks: so many ranks share a record, "
            "and all ranks are in groups of so many; give a divisor of the number of ranks, 1 for "
            "records that lie on one rank each (docs/tensor_parallel.md)"
        )


@contextlib.contextmanager
def _closed_if_refused(found: Started) -> Iterator[None]:
    """A ledger that stays open would block the next start."""
    try:
        yield
    except BaseException:
        if found.writer is not None:
            found.writer.close()
        raise


def _run(plan: Startable, found: Started, secret: Path | None, team: Team) -> PrivateRun:
    rows = None if secret is None or team.size > 1 else rows_path(secret)
    noise = NoiseSession(plan.noise, found.begun, found.writer, rows, found.places)
    return PrivateRun(
        plan,
        noise,
        found.writer,
        found.released,
        found.given_up,
        found.use,
        found.max_grad_norm,
        team,
        found.name,
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
        use = _claim(plan, key, None, 0)
        places = _places(plan, session.name, 0, None)
        return Started(Begun(KeyRing((session,))), use=use, name=session.name, places=places)
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
        name = next((start.name for start in contents.sessions), session.name)
        places = _places(plan, name, contents.releases, secret)
        if contents.releases < plan.steps:  # else nothing is left to draw, or to write down
            begun = begin_session(session, writer, contents, plan.seed, secret, plan.noise.digest)
    except BaseException:
        writer.close()
        raise
    given_up, norm = contents.not_private is not None, contents.max_grad_norm
    return Started(begun, writer, contents.releases, given_up, norm, use, name, places)


def _places(plan: Startable, name: str, released: int, secret: Path | None) -> Places | None:
    matters = plan.sampler.bands > 1 or plan.sampler.users is not None
    if not matters:
        return None
    # Of data that need no protection another order harms nobody; those in memory are compared.
    earlier = 0 if plan.data_are_public and secret is None else released
    return Places(name, earlier, secret, plan.assignment)


def _claim(
    plan: Startable, key: RandomKey, ledger: str | Path | None, releases: int
) -> SeedUse | None:
    secret = plan.seed is not None and not plan.data_are_public
    return claim_seed(key, ledger, releases) if secret else None


def _started_together(
    plan: Startable,
    ledger: str | Path | None,
    keys: str | Path | None,
    resume: bool | None,
    tensor_parallel: int,
    size: int,
) -> PrivateRun:
    """The first rank starts; the others get its roots, and nothing to write with."""

    def own() -> tuple[Path | None, Any]:
        secret = _usable(plan, ledger, keys, tensor_parallel, size)
        facts = facts_of(plan, ledger, secret, resume, tensor_parallel, size)
        return secret, (facts, counted(), setting_that_goes_on())

    mine, refused = tried(own)
    # Also where nothing can be started: the others hear of it.
    whole = mine is None or tensor_parallel == 1
    ranks = Ranks() if whole else CutRanks(tensor_parallel)
    answers = ranks.all_said((word_of(refused), mine and mine[1]))
    refuse_together([word for word, _ in answers], refused, "start the run")
    assert mine is not None
    secret, told_by_rank = mine[0], [told for _, told in answers]
    require_alike([facts for facts, _, _ in told_by_rank])
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
            begun,
            None,
            told["released"],
            told["given_up"],
            told["max_grad_norm"],
            None,
            told["name"],
        )
    with _closed_if_refused(found):
        kept = secret if found.writer is not None else None
        run, refused = tried(lambda: _run(plan, found, kept, ranks))
        _require_newest(ranks, ledger, found.released, refused)
    assert run is not None
    return run


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
        "name": found.name,
    }


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


def _require_newest(
    ranks: Ranks, ledger: str | Path | None, released: int, refused: Exception | None
) -> None:
    """That all ranks have a run, and none sees a ledger with more releases, as after the first rank
    moved to a machine with an older copy, or none.
    """
    seen = 0
    if ledger is not None and ranks.rank != FIRST and holds_records(Path(ledger)):
        try:
            seen = read_ledger(ledger).releases
        except Exception:  # damaged, or another's
            seen = released + 1
    answers = ranks.all_said((word_of(refused), seen))
    refuse_together([word for word, _ in answers], refused, "start the run")
    for rank, (_, count) in enumerate(answers):
        if count > released:
            raise RuntimeError(
                f"rank {rank} sees another ledger at ledger={str(ledger)!r} than the first rank, "
                "and it holds more releases, or is damaged: the first rank's is not the newest. "
                "Keep the ledger on a disk that every machine sees"
            )
