"""Two checkpoints, the newest and the one before: a stop at any moment leaves one that can be read.

They hold released quantities alone: weights, and the optimiser's moments, which are functions of
noisy gradients (post-processing). No generator's state is among them: it would give away draws that
have to stay secret, and from which the moments' noise could be taken off.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quietgrad.averaging import ExponentialAverage
from quietgrad.checks import how_many
from quietgrad.durable import is_intact_archive, replacing
from quietgrad.ledger import read_ledger
from quietgrad.tensors import map_tensors, trainable_parameters, whole_of
from quietgrad.training.files.run_dir import RunDir
from quietgrad.training.sharding.state import spread_as, spread_optimizer_state

# What torch.load raises for files that are empty, cut off, overwritten or of something else.
_DAMAGED = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    pickle.UnpicklingError,
)


class Restored(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
        step: how many steps it has seen; 0 where there was none.
        starts: names, by the ledger, of the starts that made its releases; None: it does not say.
    """

    step: int = 0
    starts: tuple[str, ...] | None = None

    def say_what_is_lost(self, released: int, say: Callable[[str], None]) -> None:
        """Releases that the ledger counts beyond the checkpoint are not made again."""
        if released > self.step:
            lost = how_many(released - self.step, "release")
            since = f"the checkpoint is of step {self.step}: the updates of {lost} after it"
            all_of = f"there is no checkpoint: the updates of {lost}"
            say(f"{since if self.step else all_of} are lost, and stay spent")


def save_checkpoint(
    run_dir: RunDir,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    done: int,
    average: ExponentialAverage | None = None,
    writes: bool = True,
    starts: tuple[str, ...] = (),
    learnt: str = "",
) -> None:
    """Saves the state after ``done`` steps, on disk before the call returns; the newest so far
    becomes the previous one.

    Args:
        run_dir, model, optimizer, done, average: of the run.
        writes: whether this process does. Where parameters are sharded all call, because all gather
            them, one tensor at a time; who does not write keeps none.
        starts: names, by the ledger, of the starts that made the releases so far.
        learnt: what the model's inputs and outputs mean (``Task.learnt``).

    Raises:
        RuntimeError: if it cannot be written; the newest so far is there, or is the previous one.
    """

    def whole(t: Tensor) -> Tensor:
        found = whole_of(t).detach()
        return found.cpu() if writes else found.new_empty(0)

    state = {
        "step": done,
        "starts": list(starts),
        "learnt": learnt,
        "trainable": {name: whole(p) for name, p in trainable_parameters(model).items()},
        "fixed_head": {name: whole(p) for name, p in _fixed_head(model).items()},
        "optimizer": map_tensors(optimizer.state_dict(), whole),
        **({} if average is None else {"average": map_tensors(average.state_dict(), whole)}),
    }
    if not writes:
        return
    try:
        with replacing(run_dir.checkpoint, previous=run_dir.previous_checkpoint) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        raise RuntimeError(
            f"the checkpoint in {str(run_dir.path)!r} could not be written ({_first_line(error)}); "
            "make room on the disk, then resume: what was released is in the ledger"
        ) from error


def restore_checkpoint(
    run_dir: RunDir,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Callable[[str], None],
    average: ExponentialAverage | None = None,
    learnt: str = "",
) -> Restored:
    """Puts model and optimiser, and the average of the weights, back to the newest checkpoint that
    can be read; where none was saved, the ledger still counts what was released.

    Args:
        run_dir, model, optimizer, average: of the run.
        say: called with one line where the newest checkpoint cannot be read and the one before
            takes its place.
        learnt: what the model's inputs and outputs mean (``Task.learnt``).

    Raises:
        ValueError: if there are checkpoints and none can be read, or they are of another model or
            optimiser, or of data with other labels.
    """
    newest, previous = run_dir.checkpoint, run_dir.previous_checkpoint
    if not newest.exists() and not previous.exists():
        return Restored()
    state = _read(newest)
    if state is None:
        state = _read(previous)
        if state is None:
            raise ValueError(
                f"no checkpoint in {str(run_dir.path)!r} can be read ({newest.name} and "
                f"{previous.name} are damaged or gone); restore one, or remove both: training then "
                "begins anew with "
                "the releases that the ledger leaves"
            )
        say(
            f"{newest.name} is damaged or gone; going on from {previous.name}, step {state['step']}"
        )
    if state.get("learnt", learnt) != learnt:
        raise ValueError(
            f"cannot resume {str(run_dir.path)!r}: data.source has other labels by now, or other "
            "columns or scales of its public records, than the run has trained for, and the model "
            "would be saved with them; put the data back as they were, or begin a new run "
            "directory (the epsilons add)"
        )
    _put_back(state, model, optimizer)
    if average is not None:
        kept, places = state["average"], trainable_parameters(model)
        shards = {name: spread_as(value, places[name]) for name, value in kept["averages"].items()}
        average.load_state_dict({**kept, "averages": shards})
    starts = state.get("starts")
    return Restored(int(state["step"]), None if starts is None else tuple(starts))


def require_counted(run_dir: RunDir, restored: Restored) -> None:
    """Refuses a checkpoint that has seen other releases than the ledger counts. (That the ledger is
    gone its start says.)

    Raises:
        ValueError: if there are fewer in the ledger, or other starts made them.
    """
    done = restored.step
    if not done or not run_dir.ledger.is_file():
        return
    ledger = read_ledger(run_dir.ledger)
    if ledger.releases < done:
        raise ValueError(
            f"cannot resume: the checkpoint in {str(run_dir.path)!r} is at step {done}, "
            f"but the ledger counts {ledger.releases} releases: the ledger is "
            "not the one of this run, or lost lines, and nothing can be claimed; restore "
            "it, or begin a new run directory"
        )
    if restored.starts not in (None, ledger.makers(done)):
        raise ValueError(
            f"cannot resume: the checkpoint in {str(run_dir.path)!r} was made from other releases "
            "than the ledger counts: it is of another run, or of a copy of this one that went on "
            "by itself, and its releases would go uncounted; put back the checkpoint that was "
            "saved beside this ledger, or remove it: training then begins anew with the releases "
            "that the ledger leaves"
        )


def _read(path: Path) -> dict[str, Any] | None:
    if not is_intact_archive(path):
        return None
    try:
        state = torch.load(path, weights_only=True)
    except _DAMAGED:
        return None
    whole = isinstance(state, dict) and {"step", "trainable", "optimizer"} <= state.keys()
    return state if whole else None


def _put_back(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = trainable_parameters(model)
    shapes = {name: p.shape for name, p in parameters.items()}
    if shapes != {name: value.shape for name, value in state["trainable"].items()}:
        raise ValueError(
            "resume with a changed model: its trainable parameters are not those of the "
            "checkpoint; use the settings of the first start"
        )
    with torch.no_grad():
        for name, value in state["trainable"].items():
            parameters[name].copy_(spread_as(value, parameters[name]))
        for name, value in state.get("fixed_head", {}).items():
            place = _fixed_head(model)[name]
            place.copy_(spread_as(value, place))
    try:
        optimizer.load_state_dict(spread_optimizer_state(state["optimizer"], optimizer))
    except (KeyError, ValueError) as error:
        raise ValueError(
            "resume with a changed optimiser: its state is not that of the checkpoint; use the "
            "settings of the first start"
        ) from error


def _fixed_head(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a frozen head: drawn at random or fitted before training began, so that a
    resumed run could not make them again.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module):
        return {}
    return {name: p for name, p in head.named_parameters() if not p.requires_grad}


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
