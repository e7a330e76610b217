"""A run while it trains: a bar on a terminal, lines elsewhere. Public facts only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from quietgrad.accounting.rounding import round_up
from quietgrad.checks import how_many
from quietgrad.cli.progress.lines import Lines
from quietgrad.cli.progress.pace import Pace
from quietgrad.cli.progress.stages import still_line
from quietgrad.cli.progress.still import Still
from quietgrad.events import per_unit

if TYPE_CHECKING:
    from quietgrad.training import runner
    from quietgrad.training.prepare import Prepared

LOOKING = "looking at the model before the first step"
SAVING = "scoring and saving the model"


class Left(TimeRemainingColumn):
    """The time left as a task says it in its field ``left``; of others by the last half minute."""

    def render(self, task: Task) -> Text:
        left: float | None = task.fields.get("left")
        if left is None or task.finished:
            return super().render(task)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours}:{minutes:02d}:{seconds:02d}", style="progress.remaining")


def bar_on(target: Console, *more: TextColumn) -> Progress:
    """A bar with what is done, the time it took, and the time left; on a terminal alone: elsewhere
    there are lines.
    """
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        Left(elapsed_when_finished=False),
        *more,
        console=target,
        refresh_per_second=2,
        disable=not target.is_terminal,
    )


def ending(prepared: Prepared) -> str:
    """What comes after the last step, in words: writing answers token by token takes minutes."""
    task = prepared.config.task
    if task.kind != "generate" or task.decoded == "none":
        return SAVING
    answers = how_many(min(task.decoded_records, len(prepared.test)), "answer")
    return f"scoring by up to {answers} that the model writes, and saving it"


class TrainingProgress:
    """What ``runner.train`` reports, shown."""

    def __init__(self, target: Console, prepared: Prepared) -> None:
        self._target, self._metric, self._steps = target, prepared.metric.name, prepared.steps
        self._private, self._ending = prepared.plan is not None, ending(prepared)
        self._declared = " (data declared public)" if prepared.config.data.public else ""
        if prepared.plan is not None:
            self._declared = per_unit(prepared.plan.neighbouring) + self._declared
        self._score = ""
        self._bar = bar_on(target, TextColumn("{task.fields[spent]}"))
        self._before = self._bar.add_task("frozen layers", total=None, spent="", visible=False)
        self._task = self._bar.add_task(LOOKING, total=prepared.steps, spent="")
        self._pace = Pace(_looks() if self._private else None)
        self._lines = Lines(target, "step", self._pace)
        self._records = Lines(target, "frozen layers, record")
        # A bar's own clock goes on.
        self._still = Still((lambda *_: None) if target.is_terminal else still_line(target))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> TrainingProgress:
        self._stack.enter_context(self._bar)
        self._stack.enter_context(self._still)
        self._still.now(LOOKING)
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.update(self._task, description="training")  # the bar's last state stays
        self._stack.close()

    def told(self, done: int, total: int) -> None:
        """Records that frozen layers ran over."""
        self._bar.update(self._before, completed=done, total=total, visible=done < total)
        self._records.show(done, total, "")
        self._still.now("running frozen layers" if done < total else LOOKING)

    def report(self, progress: runner.Progress) -> None:
        """After a step."""
        loss = "" if progress.training_loss is None else f" | {progress.training_loss}"
        epsilon = f"{round_up(progress.epsilon, 4)}{self._declared}" if self._private else ""
        if progress.score is not None:
            self._score = f" | validation {self._metric} {progress.score:.3f}"
            if not self._target.is_terminal:
                so_far = f"epsilon spent {epsilon}" if self._private else "not private"
                self._target.print(
                    f"step {progress.step}/{progress.steps}: {so_far}{self._score}{loss}"
                )
        spent = f"epsilon {epsilon}" if self._private else "not private"
        ended = progress.step >= self._steps
        self._pace.made(progress.step)
        left = self._pace.left(self._steps)
        self._bar.update(
            self._task,
            completed=progress.step,
            left=None if left is None else left[0],
            description=self._ending if ended else "training",
            spent=spent + self._score + loss,
        )
        said = progress.score is not None
        more = f": {spent}{' spent' if self._private else ''}{loss}"
        self._lines.show(progress.step, self._steps, more, said)
        self._still.now(self._ending if ended else f"in step {progress.step + 1} of {self._steps}")


def _looks() -> Callable[[int], bool]:
    """Of a private run: whether the guard looks at step number n, from 1. A public rule."""
    from quietgrad.clipping.soundness.guard import is_guarded

    return lambda step: is_guarded(step - 1)
