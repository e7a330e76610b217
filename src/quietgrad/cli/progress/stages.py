"""What begins, stage by stage, before there are steps to count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console

from quietgrad.cli.progress.still import Still, duration

SECOND = 1.0


@contextlib.contextmanager
def stages(target: Console) -> Iterator[Callable[[str], None]]:
    """Says what begins, and that it lasts: on a terminal in one changing line, else in a line each,
    and one more for every half a minute; nothing on standard error, which for programs holds errors
    alone.
    """
    if target.is_terminal:
        with target.status("beginning") as status:

            def show(stage: str, seconds: float | None = None) -> None:
                passed = "" if seconds is None else f" ({duration(seconds)})"
                status.update((stage + passed).replace("[", r"\["))

            with Still(show, SECOND) as still:

                def begin(stage: str) -> None:
                    show(stage)
                    still.now(stage)

                yield begin
    elif target.stderr:
        yield lambda stage: None
    else:
        with Still(still_line(target)) as still:

            def say(stage: str) -> None:
                target.print(stage, markup=False, soft_wrap=True)
                still.now(stage)

            yield say


def still_line(target: Console) -> Callable[[str, float], None]:
    """Prints a line on something that lasts."""

    def say(stage: str, seconds: float) -> None:
        target.print(f"still {stage}, {duration(seconds)}", markup=False, soft_wrap=True)

    return say
