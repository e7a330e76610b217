"""The command line: thin commands over the library."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: runs a command; a user's mistake becomes one line on standard error and exit
    code 2.
    """
    from quietgrad.cli.app import app
    from quietgrad.cli.output import fail

    try:
        app()
    except (ValueError, TypeError) as error:
        fail(str(error), code=2)
    except RuntimeError as error:
        fail(str(error), code=1)
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    sys.exit(0)


__all__ = ["main"]
