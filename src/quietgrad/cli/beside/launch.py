"""``quietgrad train --nproc N``: the same command, started N times by torch's own launcher."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from quietgrad.checks import require_at_least


def start_processes(count: int, arguments: list[str]) -> NoReturn:
    """Puts torchrun in this process's place, with the command line less ``--nproc``.

    Args:
        count: processes, on this machine.
        arguments: of the command line, without the program.

    Raises:
        ValueError: for fewer than one, or where torchrun has started this one already.
    """
    require_at_least("--nproc", count, 1, "it is a number of processes")
    if "RANK" in os.environ:
        raise ValueError(
            f"--nproc={count} in a process that a launcher started; give the number to torchrun "
            "alone (--nproc-per-node)"
        )
    left = _without_nproc(arguments)
    if not any("training.run_dir" in argument for argument in left):
        from quietgrad.training.files.run_dir import unused_folder

        # One name for all processes.
        left += ["--set", f"training.run_dir={unused_folder()}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "quietgrad", *left])


def _without_nproc(arguments: list[str]) -> list[str]:
    left, skip = [], False
    for argument in arguments:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            left.append(argument)
        skip = argument == "--nproc"
    return left
