"""What somebody who waits sees: stages, steps, and that something long still lasts."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quietgrad.cli.progress import pace, stages, still
from quietgrad.cli.progress.lines import Lines
from quietgrad.cli.progress.still import Still, duration
from quietgrad.clipping.soundness.guard import is_guarded

Run = Callable[..., tuple[int, str, str]]


def until_said_again(function: Any, said: list[str]) -> Any:
    """``function``, which begins once what it belongs to was said to last."""

    def slow(*given: Any, **options: Any) -> Any:
        known, until = len(said), time.monotonic() + 60
        while len(said) == known and time.monotonic() < until:
            time.sleep(0.01)
        return function(*given, **options)

    return slow


def test_what_lasts_is_said_again_and_what_ends_soon_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looks every quarter of the time after which something is said, with a clock of the test's."""
    clock = [100.0]
    monkeypatch.setattr(still.time, "monotonic", lambda: clock[0])
    said: list[tuple[str, float]] = []
    lasting = Still(lambda what, seconds: said.append((what, seconds)), every=1.0)

    def pass_by(seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            clock[0] += 0.25
            lasting.look()

    pass_by(3.0)  # nothing has begun
    lasting.now("one")
    pass_by(2.75)
    for _ in range(6):
        lasting.now("short")
        pass_by(0.75)
    lasting.now("short")
    pass_by(1.0)
    lasting.now("")
    pass_by(3.0)
    assert said == [("one", 1.0), ("one", 2.0), ("short", 1.0)]


def test_the_watching_thread_lives_as_long_as_the_block() -> None:
    said = threading.Event()
    with Still(lambda what, seconds: said.set(), every=0.05) as lasting:
        lasting.now("one")
        assert said.wait(60)
        assert lasting._thread.is_alive()
    assert not lasting._thread.is_alive()


def test_seconds_become_minutes() -> None:
    seconds = (30.2, 119, 120, 152, 600)
    assert [*map(duration, seconds)] == ["30 s", "119 s", "2 min", "2.5 min", "10 min"]


def test_a_terminal_shows_how_long_a_stage_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "SECOND", 0.05)
    written = io.StringIO()
    target = Console(file=written, force_terminal=True, width=80)
    with stages.stages(target) as say:
        say("reading people[1].csv")
        time.sleep(0.6)
    assert "reading people[1].csv (" in written.getvalue()


def test_programs_are_told_of_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(still, "EVERY", 0.05)
    written = io.StringIO()
    with stages.stages(Console(stderr=True, file=written)) as say:
        say("reading")
        time.sleep(0.2)
    assert written.getvalue() == ""


def test_each_long_part_of_a_run_is_said_again(
    quietgrad: Run, settings: Any, write_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quietgrad.training import forecast, prepare, runner

    said: list[str] = []
    duration_of = still.duration

    def counted(seconds: float) -> str:
        said.append("")
        return duration_of(seconds)

    monkeypatch.setattr(still, "EVERY", 0.15)
    monkeypatch.setattr(stages, "duration", counted)
    for place, name in (
        (prepare, "load_task"),
        (forecast, "kept_forecast"),
        (runner, "guard_on_public_records"),
        (runner._Loop, "step"),
        (runner._Loop, "finish"),
    ):
        monkeypatch.setattr(place, name, until_said_again(getattr(place, name), said))
    made = settings | {"training.eval_every": 0, "training.steps": 2}
    code, out, err = quietgrad("train", write_config(made))
    assert (code, err) == (0, "")
    again = [line.rpartition(",")[0] for line in out.splitlines() if line.startswith("still ")]
    wanted = [
        f"still reading {settings['data.source']}",
        "still timing a step on validation records",
        "still looking at the model before the first step",
        "still in step 2 of 2",
        "still scoring and saving the model",
    ]
    assert [line for line in dict.fromkeys(again) if line in wanted] == wanted
    bar = ("training ", "scoring and saving the model ")  # whose last state is none of the lines
    assert not [line for line in out.splitlines() if line.startswith(bar)]


def test_progress_without_a_terminal(
    quietgrad: Run,
    settings: Any,
    write_config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lines, "EVERY", 0.0)
    config = write_config(settings | {"training.eval_every": 0})
    code, out, _ = quietgrad("train", config)
    lines = [line for line in out.splitlines() if line.endswith("min left")]
    assert code == 0 and len(lines) == 5 and lines[0].startswith("step 2/6: epsilon ")
    again = ("privacy.enabled=false", f"training.run_dir={tmp_path / 'other'}")
    code, out, _ = quietgrad("train", config, *(word for one in again for word in ("--set", one)))
    lines = [line for line in out.splitlines() if line.endswith("min left")]
    assert code == 0 and lines[0].startswith("step 2/6: not private, about ")


def test_the_time_left_is_not_that_of_steps_with_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1, 2, 4 and 8 of 8 hold one: 100 s each, and 20 s the others."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    written = io.StringIO()
    console = Console(file=written, width=100)
    seen = pace.Pace(lambda step: is_guarded(step - 1))
    lines = Lines(console, "step", seen)
    took = [1000, 100, 20, 100, 20, 20, 20, 100]
    for step, seconds in enumerate(took, start=1):
        now[0] += seconds
        seen.made(step)
        left = seen.left(8)
        rest = sum(took[step:])
        if step == 1:
            assert left is None
        elif step == 2:
            assert left == (600.0, False) and rest < 600  # no other step was seen: the most
        else:
            assert left == (rest, True)
        lines.show(step, 8, "")
    first, *others = written.getvalue().splitlines()
    assert first == "step 2/8, at most 10 min left"
    assert others[:2] == ["step 4/8, about 3 min left", "step 6/8, about 2 min left"]
