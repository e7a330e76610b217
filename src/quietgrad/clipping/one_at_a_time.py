"""Clipping in one thread at a time. Hooks hang on the model, precision and random generators are
the process's, and memory for what passes is kept between calls: two threads would take one's norms
for the other's gradients.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_lock = threading.RLock()


def one_at_a_time(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same, once no other thread is in it or in another of its kind."""

    @wraps(call)
    def alone(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _lock:
            return call(*args, **kwargs)

    return alone


def _begin_anew() -> None:
    # The thread that held it is not in a forked process.
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
