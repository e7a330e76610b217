"""Ranks of a sharded run are killed by SIGKILL at keyed moments, torchrun's elastic agent starts
all again, and the run goes on from its ledger and the newest whole checkpoint. Prints one JSON
object: where each kill fell, what was lost, and what is wrong (nothing, or the exit status is 1).

Every draw of a release's noise is noted in a file that is on disk before the draw, with what the
ledger counted then. At the end it has to hold that

- the ledger counted each release before any of its noise was drawn, and every start found it so;
- its releases are 0, 1, 2, ..., as many as planned, and their epsilon is at most the target;
- no stretch of a release's noise was drawn twice, and all of it for what was applied;
- weights and moments of all ranks are, to the bit, those of one process that makes all releases and
  applies those that the sharded run applied; where none was lost, those of a run that nothing
  stopped.

A release is lost when it is counted and no checkpoint has it: it is spent and not made up for.

What is trained is a small network, or PEFT's LoRA on a small Llama: in a loop with ``fully_shard``,
or by PrivateTrainer with accelerate's plugin (``killed_adapters.py``). Where a case has several
numbers of ranks, the last kill of each ends torchrun, and the next torchrun has another number.

    OMP_NUM_THREADS=1 python benchmarks/sharded_kills.py
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import killed_adapters
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

from quietgrad import PrivacyConfig
from quietgrad.accounting import epsilon
from quietgrad.distributed.together import leave, meet
from quietgrad.durable import whole_lines
from quietgrad.ledger import holds_records, read_ledger
from quietgrad.noise import BandedNoise, IndependentNoise
from quietgrad.noise.sources.keyed import KeyedSource
from quietgrad.plan import PrivacyPlan
from quietgrad.plan.run import PrivateRun
from quietgrad.plan.session.noise_session import NoiseSession

RECORDS, WIDTH = 60, 7
TARGET = 8.0
NOTE = 256  # bytes, for where a kill fell
SOON = 1.5  # seconds after a start, within which a kill anywhere falls
PLACES = ("release", "backward", "save", "anywhere")


@dataclass(frozen=True)
class Case:
    """Attributes:
    kills: how many.
    bands: of correlated noise; 1 is independent noise.
    save_every: releases between checkpoints.
    places: where kills are aimed at, in turns.
    steps: releases planned.
    ranks: one number after the other; kills are shared out evenly.
    adapters: whether LoRA is trained.
    by_trainer: whether PrivateTrainer trains.
    """

    kills: int
    bands: int = 1
    save_every: int = 2
    places: tuple[str, ...] = PLACES
    steps: int = 64
    ranks: tuple[int, ...] = (2,)
    adapters: bool = False
    by_trainer: bool = False

    def kills_until(self, leg: int) -> int:
        """How many come before torchrun is started with the ranks after these."""
        return self.kills * (leg + 1) // len(self.ranks)

    def plan(self) -> PrivacyPlan:
        return self.config().build(RECORDS)

    def config(self) -> PrivacyConfig:
        return PrivacyConfig(
            target_epsilon=TARGET,
            expected_batch_size=12,
            steps=self.steps,
            noise=BandedNoise(self.bands) if self.bands > 1 else IndependentNoise(),
            seed=5,
            data_are_public=True,
        )


CASES = {
    "independent": Case(10),
    "correlated": Case(10, bands=3),
    "nothing lost": Case(4, save_every=1, places=("backward",), steps=24),
    "adapters": Case(12, bands=3, steps=72, ranks=(2, 3, 1), adapters=True),
    "adapters by Trainer": Case(
        12, bands=2, steps=72, ranks=(2, 3, 2), adapters=True, by_trainer=True
    ),
    "smoke": Case(1, steps=6),
    "smoke, adapters": Case(2, bands=2, steps=16, ranks=(2, 1), adapters=True),
    "smoke, by Trainer": Case(1, bands=2, save_every=1, steps=6, adapters=True, by_trainer=True),
}


@dataclass(frozen=True)
class Aim:
    """A kill: of which rank, in which call of ``place`` since the start, and how far through it."""

    rank: int
    place: str
    call: int
    share: float


def aim_of(case: Case, number: int, ranks: int) -> Aim | None:
    """The kill that comes after so many, a function of the case; None once all are made."""
    if number >= case.kills:
        return None
    draws = np.random.default_rng((11, case.kills, case.bands, case.save_every, number))
    place = case.places[number % len(case.places)]
    rank, call = int(draws.integers(ranks)), int(draws.integers(2, 4))
    return Aim(rank, place, call, float(draws.uniform(0.0, 0.9)))


class Killer:
    """Ends this process by its aim, from another thread, and notes what the first one did then.

    The note is written into memory that the file shares: nothing lies between it and the signal.
    """

    def __init__(self, note: Path, aim: Aim) -> None:
        self.aim, self.place = aim, "start"
        self._calls: Counter[str] = Counter()
        self._took: dict[str, float] = {}
        note.write_bytes(b" " * NOTE)  # no kill, where this start ends otherwise
        with open(note, "r+b") as file:
            self._note = mmap.mmap(file.fileno(), NOTE)
        self._first = threading.get_ident()
        if aim.place == "anywhere":
            self.kill_after(aim.share * SOON)

    def watch(self, owner: Any, name: str, place: str) -> None:
        """Counts and times the calls of ``owner.name``, and kills in the one that is aimed at."""
        own = getattr(owner, name)

        @functools.wraps(own)
        def watched(*arguments: Any, **named: Any) -> Any:
            before, self.place = self.place, place
            self._calls[place] += 1
            if (place, self._calls[place]) == (self.aim.place, self.aim.call):
                self.kill_after(self.aim.share * self._took[place])
            began = time.perf_counter()
            try:
                return own(*arguments, **named)
            finally:
                self._took[place] = time.perf_counter() - began
                self.place = before if before == "start" and place == "load" else "between"

        setattr(owner, name, watched)

    def kill_after(self, seconds: float) -> None:
        threading.Thread(target=self._kill, args=(seconds,), daemon=True).start()

    def _kill(self, seconds: float) -> None:
        time.sleep(seconds)
        frame = sys._current_frames().get(self._first)
        while frame is not None and "quietgrad" not in frame.f_globals.get("__name__", ""):
            frame = frame.f_back
        inner = "" if frame is None else f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
        told = {"rank": self.aim.rank, "aimed_at": self.aim.place, "fell_in": self.place}
        note = json.dumps(told | {"inside": inner.removeprefix("quietgrad.")}).encode()
        self._note[: len(note)] = note
        os.kill(os.getpid(), signal.SIGKILL)


def note_draws(file: Path, ledger: Path, start: int) -> None:
    """From now on every draw of a release's own noise is on disk in ``file`` before it is made.
    (What a start draws again of earlier rows is no release's: nothing is added to it.)
    """
    opened = open(file, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process
    counted: list[int] = []
    cover, stretch = NoiseSession.cover, KeyedSource.stretch

    def covering(self: Any, *arguments: Any) -> Any:
        counted.append(read_ledger(ledger).releases)
        try:
            return cover(self, *arguments)
        finally:
            counted.clear()

    def noted(
        self: Any, like: Tensor, key: Any, step: int, name: str, place: Any, scale: float = 1.0
    ) -> Tensor:
        if counted:
            draw = {"start": start, "step": step, "name": name, "counted": counted[0]}
            draw |= {"from": place.start, "entries": like.numel()}
            opened.write(json.dumps(draw) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        return stretch(self, like, key, step, name, place, scale)

    NoiseSession.cover = covering  # type: ignore[method-assign]
    KeyedSource.stretch = noted  # type: ignore[method-assign]


def model_of(adapters: bool = False) -> nn.Module:
    if adapters:
        return killed_adapters.adapted()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()


def records(adapters: bool = False) -> list[dict[str, Tensor]]:
    if adapters:
        return killed_adapters.texts(RECORDS)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 5, generator=source, dtype=torch.float64)
    return [{"x": row, "y": row[:3].sin()} for row in x]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "x" not in batch:
        return killed_adapters.next_words(model, batch)
    return (model(batch["x"]) - batch["y"]).square().sum(dim=1)


def sharded(model: nn.Module, ranks: int) -> nn.Module:
    """Layer by layer, what is left of it together; on one rank whole."""
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in killed_adapters.layers_of(model) or (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, applied: Tensor) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "applied": applied}


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint: ``.metadata`` is written last."""
    whole = [path.parent for path in folder.glob("checkpoint*/.metadata")]
    return max(whole, default=None)


def train(folder: Path, case: Case) -> None:
    """One start of one rank, as torchrun makes it."""
    together = meet("cpu")
    rank, start = together.rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    made = len(kills_of(folder))
    aim = aim_of(case, made, together.size)
    # While no process of an earlier start draws any more, and none of this one.
    together.by_first(lambda: _note_start(folder, made, together.size))
    note_draws(folder / f"drawn{rank}.jsonl", folder / "ledger.jsonl", start)
    if aim is not None and aim.rank == rank:
        killer = Killer(folder / f"kill{made:02d}.json", aim)
        for owner, name, place in (
            (PrivateRun, "clip", "backward"),
            (PrivateRun, "release", "release"),
            killed_adapters.saving() if case.by_trainer else (dcp, "save", "save"),
            (dcp, "load", "load"),
        ):
            killer.watch(owner, name, place)
    if case.by_trainer:
        ended = killed_adapters.train(folder, case.config(), case.save_every, together)
        model, optimizer, applied = ended
    else:
        model, optimizer, applied = train_in_a_loop(folder, case, together.size)
    values = values_of(model, optimizer)
    torch.save({"weights": values, "applied": applied}, folder / f"end{rank}.pt")
    leave()


def train_in_a_loop(
    folder: Path, case: Case, ranks: int
) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Model and optimiser at the end, and by release whether they have it."""
    model = sharded(model_of(case.adapters), ranks)
    optimizer, applied = optimizer_of(model), torch.zeros(case.steps, dtype=torch.bool)
    checkpoint, alone = newest(folder), ranks == 1
    if checkpoint is not None:
        state = state_of(model, optimizer, applied)
        dcp.load(state, checkpoint_id=str(checkpoint), no_dist=alone)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        applied = state["applied"]
    with case.plan().start(folder / "ledger.jsonl", folder / "keys.json") as run:
        steps, found = case.steps - run.released, records(case.adapters)
        for batch in run.loader(found, steps=steps, physical_batch_size=3) if steps else ():
            optimizer.zero_grad()
            run.backward(model, loss, batch)
            optimizer.step()
            applied[run.released - 1] = True
            if run.released % case.save_every == 0:
                state, place = state_of(model, optimizer, applied), f"checkpoint{run.released:03d}"
                dcp.save(state, checkpoint_id=str(folder / place), no_dist=alone)
    return model, optimizer, applied


def _note_start(folder: Path, kills: int, ranks: int) -> None:
    """What the ledger counts now."""
    ledger = folder / "ledger.jsonl"
    counted = read_ledger(ledger).releases if holds_records(ledger) else 0
    found = newest(folder)
    with open(folder / "starts.jsonl", "a", encoding="utf-8") as file:
        told = {"kills": kills, "ranks_after": ranks}
        told |= {"counted": counted, "drawn": drawn_in(draws_of(folder))}
        checkpoint = None if found is None else found.name
        file.write(json.dumps(told | {"checkpoint": checkpoint}) + "\n")


def kills_of(folder: Path) -> list[dict[str, Any]]:
    """Where those fell that were made."""
    return [kill for path in sorted(folder.glob("kill*.json")) for kill in whole_lines(path)]


def draws_of(folder: Path) -> list[dict[str, Any]]:
    return [draw for path in sorted(folder.glob("drawn*.jsonl")) for draw in whole_lines(path)]


def drawn_in(draws: list[dict[str, Any]]) -> int:
    """How many releases had noise drawn."""
    return len({draw["step"] for draw in draws})


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """All weights and moments, gathered from all ranks."""
    found = []
    for p in model.parameters():
        names = ("exp_avg", "exp_avg_sq", "step") if p.requires_grad else ()
        found += [p.detach(), *(optimizer.state[p][name] for name in names)]
    parts = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
    return torch.cat([t.reshape(-1).double() for t in parts])


def replayed(case: Case, applied: Tensor) -> Tensor:
    """One process makes all releases, without ledger or stop, and applies some."""
    if case.by_trainer:
        return values_of(*killed_adapters.replayed(case.config(), applied))
    model = model_of(case.adapters)
    optimizer, found = optimizer_of(model), records(case.adapters)
    with case.plan().start() as run:
        for batch in run.loader(found, steps=case.steps, physical_batch_size=3):
            optimizer.zero_grad()
            run.backward(model, loss, batch)
            if applied[run.released - 1]:
                optimizer.step()
    return values_of(model, optimizer)


@dataclass(frozen=True)
class Facts:
    """What a run left.

    Attributes:
        releases: numbers of the ledger's release lines.
        epsilon: of what the ledger counts.
        draws, starts: as they were noted.
        kills: where those fell that were made.
        ends: rank -> weights and moments at the end.
        applied: by release, whether the end has it.
    """

    releases: list[int]
    epsilon: float
    draws: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    kills: list[dict[str, Any]]
    ends: list[Tensor]
    applied: Tensor

    @property
    def lost(self) -> list[int]:
        return [int(i) for i in (~self.applied).nonzero().flatten()]


def facts_of(folder: Path, case: Case) -> Facts:
    ledger = folder / "ledger.jsonl"
    lines = [line for line in whole_lines(ledger) if line["type"] == "release"]
    event = read_ledger(ledger).event
    assert event is not None
    ends = [torch.load(folder / f"end{r}.pt", weights_only=True) for r in range(case.ranks[-1])]
    return Facts(
        [line["step"] for line in lines],
        epsilon(event, case.plan().delta),
        draws_of(folder),
        whole_lines(folder / "starts.jsonl"),
        kills_of(folder),
        [end["weights"] for end in ends],
        ends[0]["applied"],
    )


def problems(facts: Facts, case: Case, replay: Callable[[Case, Tensor], Tensor]) -> list[str]:
    """What does not hold of a run that was killed; see the file's head."""
    wrong = []
    if facts.releases != list(range(case.steps)):
        wrong.append(f"the ledger's releases are {facts.releases}")
    if not facts.epsilon <= TARGET:
        wrong.append(f"epsilon is {facts.epsilon}, above the target of {TARGET}")
    early = {d["step"] for d in facts.draws if not d["counted"] > d["step"]}
    if early:
        wrong.append(f"noise was drawn before the ledger counted releases {sorted(early)}")
    less = [s for s in facts.starts if s["counted"] < s["drawn"]]
    wrong += [f"a start found {s['drawn']} releases drawn, {s['counted']} counted" for s in less]
    often = Counter((d["step"], d["name"], d["from"]) for d in facts.draws if d["entries"])
    wrong += [f"noise {place} was drawn {n} times" for place, n in often.items() if n > 1]
    trained = (p for p in model_of(case.adapters).parameters() if p.requires_grad)
    entries = sum(p.numel() for p in trained)
    for step in facts.applied.nonzero().flatten().tolist():
        covered = sum(d["entries"] for d in facts.draws if d["step"] == step)
        if covered != entries:
            wrong.append(f"release {step} was applied with noise on {covered} of {entries} entries")
    if len(facts.kills) != case.kills:
        wrong.append(f"{len(facts.kills)} of {case.kills} kills were made")
    expected = replay(case, facts.applied)
    for rank, end in enumerate(facts.ends):
        if not torch.equal(end, expected):
            wrong.append(f"rank {rank} does not end where what was applied leads to")
    if not facts.lost and not torch.equal(facts.ends[0], replay(case, torch.ones(case.steps))):
        wrong.append("nothing was lost, and the end is not that of a run that nothing stopped")
    return wrong


def killed_run(case_name: str, folder: Path) -> None:
    """By the elastic agent that torchrun is a command for. Its processes are forked: they need not
    import all that this one has.

    Raises RuntimeError with what a rank said, where the run did not end as it should.
    """
    case, before = CASES[case_name], 0
    os.environ["OMP_NUM_THREADS"] = "1"
    for leg, ranks in enumerate(case.ranks):
        last = leg == len(case.ranks) - 1
        kills, before = case.kills_until(leg) - before, case.kills_until(leg)
        agent = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                max_restarts=kills if last else kills - 1,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                run_id=f"leg{leg}",
                monitor_interval=0.1,
                start_method="fork",
                logs_specs=DefaultLogsSpecs(log_dir=str(folder / "said"), redirects=Std.ALL),
            ),
            one_start,
        )
        try:
            agent(case_name, str(folder))
            ended = True
        except ChildFailedError as error:
            ended, said = False, error.format_msg()
        if ended != last:
            told = "it ended" if ended else said[-8000:]
            raise RuntimeError(f"on {ranks} ranks: {told}")


def one_start(case_name: str, folder: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    train(Path(folder), CASES[case_name])


def told_of(case_name: str) -> dict[str, Any]:
    case, began = CASES[case_name], time.time()
    with tempfile.TemporaryDirectory() as name:
        killed_run(case_name, Path(name))
        seconds = round(time.time() - began)
        facts = facts_of(Path(name), case)
    then = {s.pop("kills"): s for s in reversed(facts.starts)}  # the first start after each
    return {
        "bands": case.bands,
        "save_every": case.save_every,
        "releases": len(facts.releases),
        "releases_drawn": drawn_in(facts.draws),
        "lost": facts.lost,
        "target_epsilon": TARGET,
        "epsilon": facts.epsilon,
        "equal_to": "replay of what was applied" if facts.lost else "uninterrupted run",
        "kills": [kill | then[i] for i, kill in enumerate(facts.kills, start=1)],
        "starts": len(facts.starts),
        "seconds": seconds,
        "wrong": problems(facts, case, replayed),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), help="one case instead of all but smoke")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = [given.case] if given.case else [name for name in CASES if "smoke" not in name]
    told = {name: told_of(name) for name in names}
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps({"environment": environment, "cases": told}, indent=1))
    return int(any(case["wrong"] for case in told.values()))


if __name__ == "__main__":
    sys.exit(main())
