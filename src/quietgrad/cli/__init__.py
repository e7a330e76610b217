"""The command line: thin commands over the library."""

from __future__ import annotations

import os
import sys
import traceback

# How threads of one product wait for each other, where nobody has said; read when torch is loaded.
OF_THREADS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPINS = "10000"


def main() -> None:
    """Entry point: runs a command; a user's mistake becomes one line on standard error and exit
    code 2.
    """
    _wait_shortly()
    try:
        _answer()
    except BaseException as error:
        _leave_others(error)
        if isinstance(error, KeyboardInterrupt):  # while the commands were being loaded
            sys.stderr.write("error: interrupted\n")
            sys.exit(130)
        raise


def _wait_shortly() -> None:
    """Threads that wait give their processor to others soon (``benchmarks/busy_machine.py``): by
    themselves they spin until it is taken away from them, and with it from the thread that they
    wait for.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in OF_THREADS):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _answer() -> None:
    from quietgrad.cli.app import app
    from quietgrad.cli.output import fail

    try:
        app()
    except (ValueError, TypeError) as error:
        fail(str(error), code=2)
    except RuntimeError as error:
        fail(_in_words(error), code=1)
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    sys.exit(0)


def _in_words(error: RuntimeError) -> str:
    """An error of a backend in the middle of an evaluation says where in its source it is."""
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available():
        from quietgrad.distributed.groups.failing import is_of_a_backend, lost_in_words

        if is_of_a_backend(error):
            return lost_in_words(error)
    return str(error)


def _leave_others(error: BaseException) -> None:
    """A process that fails in a group of several ends here and now. On its way out the interpreter
    would wait for messages, of processes that wait for this one; once it is gone, they notice, or
    the launcher ends them.
    """
    group = sys.modules.get("torch.distributed")
    code = error.code if isinstance(error, SystemExit) else 1
    if not code or group is None or not (group.is_available() and group.is_initialized()):
        return
    from quietgrad.distributed.groups.news import ENDED, tell

    tell(ENDED, "" if isinstance(error, SystemExit) else type(error).__name__)
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


__all__ = ["main"]
