"""Stages, and then steps that are counted: a bar with the time left on a terminal, lines
elsewhere.
"""

from __future__ import annotations

import contextlib

from rich.console import Console

from quietgrad.cli.progress.lines import Lines
from quietgrad.cli.progress.stages import still_line
from quietgrad.cli.progress.still import Still
from quietgrad.cli.progress.training import bar_on


class Counted:
    """What is told, shown; nothing on standard error, which for programs holds errors alone."""

    def __init__(self, target: Console, what: str) -> None:
        """
        Args:
            target: where it is shown.
            what: what the steps are steps of, such as "training with canaries".
        """
        self._target, self._what = target, what
        self._silent = target.stderr and not target.is_terminal
        self._bar = bar_on(target)
        self._task = self._bar.add_task("beginning", total=None)
        self._lines = Lines(target, f"{what}, step")
        spoken = self._silent or target.is_terminal  # a bar's own clock goes on
        self._still = Still((lambda *_: None) if spoken else still_line(target))
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Counted:
        if not self._silent:
            self._stack.enter_context(self._bar)
        self._stack.enter_context(self._still)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def say(self, stage: str) -> None:
        """What begins now, whose end nobody knows."""
        self._bar.update(self._task, description=stage.replace("[", r"\["))
        if not self._silent and not self._target.is_terminal:
            self._target.print(stage, markup=False, soft_wrap=True)
        self._still.now(stage)

    def count(self, done: int, total: int, more: str = "") -> None:
        """Steps that are made, of those that are known of; ``more`` is said behind them."""
        shown = self._what + more
        self._bar.update(self._task, completed=done, total=total, description=shown)
        if not self._silent:
            self._lines.show(done, total, more)
        ended = done >= total
        self._still.now(f"at the end of {shown}" if ended else f"{shown}, in step {done + 1}")
