"""The command line: thin commands over the library."""

from __future__ import annotations

import os
import sys
import traceback


def main() -> None:
    """Entry point: runs a command; a user's mistake becomes one line on standard error and exit
    code 2.
    """
    try:
        _answer()
    except BaseException as error:
        _leave_others(error)
        raise


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
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


__all__ = ["main"]
