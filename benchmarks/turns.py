"""Processes that take a step when told to, and what they say of it: what every comparison in turns
is made of. Without torch, so that a process of another library loads none of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Step = Callable[[], Any]

STEP_LIMIT_SECONDS = 900.0


class Worker:
    """A process that holds one method's model and takes a step when told to."""

    def __init__(
        self,
        regime: str,
        method: str,
        script: Path,
        environment: dict[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        command = [sys.executable, str(script), "--worker", regime, method, *options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.error = ""
        self.answer: dict[str, Any] = {}  # of the last step, whole

    def step(self) -> float | None:
        """Seconds, or None with ``error`` set."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        if not select.select([self.process.stdout], [], [], STEP_LIMIT_SECONDS)[0]:
            self.error = f"no step within {STEP_LIMIT_SECONDS:.0f} s"
            self.process.kill()
            return None
        line = self.process.stdout.readline()
        answer = (
            json.loads(line)
            if line
            else {"error": f"the process ended with status {self.process.wait()}"}
        )
        self.error, self.answer = answer.get("error", ""), answer
        return answer.get("seconds")

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def answer_steps(ready: Callable[[], Step]) -> None:
    """The other side of ``Worker``: one JSON line per step. The first word makes the step ready."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    step: Step | None = None
    for _ in sys.stdin:
        try:
            if step is None:
                step = ready()
            started, worked = time.perf_counter(), time.process_time()
            step()
            answer: dict[str, Any] = {
                "seconds": time.perf_counter() - started,
                "processor_seconds": time.process_time() - worked,
            }
        except Exception as error:
            answer = {"error": one_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    words = " ".join((lines[0] if lines else "").split())
    if "allocate memory" in str(error) or isinstance(error, MemoryError):
        wanted = words.partition("you tried to allocate ")[2].partition(" bytes")[0]
        return "out of memory" + (
            f" (asked for {int(wanted) / 2**30:.1f} GiB at once)" if wanted.isdigit() else ""
        )
    return f"{type(error).__name__}: {words[:160]}"


def limit_memory(gib: float) -> None:
    limit = int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def added_mib(step: Step) -> float:
    """By how much two steps raise the resident memory (the peak is reset first)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    step()
    step()
    return max(_status("VmHWM") - before, 0.0)


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(float(line.split()[1]) / 1024 for line in file if line.startswith(key))
