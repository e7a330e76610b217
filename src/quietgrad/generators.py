"""The process's own generators of random numbers (torch's, numpy's, Python's), keyed for a while
and then put back as they were.

What a model, a loss or a data set draws for a record may not be known beforehand: who knows the
seed (``torch.manual_seed`` at the top of a script) knows which numbers each place of a batch gets,
and one record more moves all later records on to other numbers. Numbers from a secret key are
independent of who comes: each record's are as likely as any other's, in any company
(docs/privacy/contract.md).
"""

from __future__ import annotations

import atexit
import contextlib
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info


class States(NamedTuple):
    """Where all generators stand. Secret while they are keyed."""

    cpu: Tensor
    devices: list[Tensor]
    mps: Tensor | None
    numbers: Any
    python: Any

    @classmethod
    def now(cls) -> States:
        """Of this process. Devices that nothing has used yet have none."""
        return cls(
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if _has_cuda() else [],
            torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
            np.random.get_state(),
            random.getstate(),
        )

    def moved(self) -> bool:
        """Whether any stands elsewhere by now."""
        now = States.now()
        _, here, where, *rest = self.numbers
        _, here_now, where_now, *rest_now = now.numbers
        pairs = zip((self.cpu, *self.devices), (now.cpu, *now.devices), strict=True)
        same = all(torch.equal(then, later) for then, later in pairs) and (
            self.mps is None or now.mps is None or torch.equal(self.mps, now.mps)
        )
        numpy_same = bool((here == here_now).all()) and (where, rest) == (where_now, rest_now)
        return not (same and numpy_same and self.python == now.python)

    def put_back(self) -> None:
        """They stand there again."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)
        np.random.set_state(self.numbers)
        random.setstate(self.python)


class _Block:
    """A keyed block that is open. One may end after others have begun: a loop that was broken off
    ends when Python collects it, be it in the middle of another engine's draws.
    """

    def __init__(self, with_the_scripts: bool) -> None:
        self.with_the_scripts = with_the_scripts  # code, which may seed them anew
        self._before = States.now()
        _open.append(self)

    def reached(self) -> States:
        """Where the generators stand in it: where the next one began."""
        if not _open:  # Python is ending
            return self._before
        return States.now() if _open[-1] is self else _open[_open.index(self) + 1]._before

    def end(self) -> None:
        """The generators stand as before it, once those that were opened within it are over."""
        if not _open:
            return
        place = _open.index(self)
        del _open[place]
        if place == len(_open):
            self._before.put_back()
        else:
            _open[place]._before = self._before


_open: list[_Block] = []  # the oldest first

# A loop that is left open is collected when modules have been taken apart: nothing to put back.
atexit.register(_open.clear)


def seed_all(seed: int) -> None:
    """Torch's generators of all devices in use, numpy's and Python's, at the start of one stream.

    Args:
        seed: of 0 to 2^63 - 1.
    """
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed unused devices later
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    # The two words alone would be Python's own stream once more.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])


@contextlib.contextmanager
def keyed_generators(seed: int) -> Iterator[None]:
    """All generators at the start of one stream, and afterwards as they were: how far they went
    says how many records a batch held.

    Args:
        seed: secret, of 0 to 2^63 - 1.
    """
    with _put_back_after():
        seed_all(seed)
        yield


@contextlib.contextmanager
def keyed_afresh() -> Iterator[None]:
    """The same with a seed from the operating system; nothing inside another keyed block, but for
    one in which the script's own code runs: it may have seeded the generators since.
    """
    if _open and not _open[-1].with_the_scripts:
        yield
        return
    with keyed_generators(secrets.randbits(63)):
        yield


class KeyedByStep:
    """One stream a step, which goes on from block to block of it: two passes of a step draw
    different numbers.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._left: States | None = None

    @contextlib.contextmanager
    def of(
        self, step: int, seed: Callable[[], int], with_the_scripts: bool = False
    ) -> Iterator[None]:
        """All generators at the step's stream, and afterwards as they were.

        Args:
            step: its number.
            seed: gives that of its stream. Secret.
            with_the_scripts: the block is open while code of the script runs.
        """
        with _put_back_after(with_the_scripts) as block:
            if self._left is None or self._step != step:
                seed_all(seed())
            else:
                self._left.put_back()
            self._step = step
            try:
                yield
            finally:
                self._left = block.reached()


class KeyedWorker:
    """``worker_init_fn`` of torch's DataLoader: whatever the script's own seeds, the worker's
    generators begin where torch let them begin, by the base seed of the loader's generator.

    Args:
        own: the script's, called first; None: it has none.
    """

    def __init__(self, own: Callable[[int], Any] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        if self._own is not None:
            self._own(worker)
        seed_all(get_worker_info().seed & (2**63 - 1))  # type: ignore[union-attr]


@contextlib.contextmanager
def _put_back_after(with_the_scripts: bool = False) -> Iterator[_Block]:
    block = _Block(with_the_scripts)
    try:
        yield block
    finally:
        block.end()


def _has_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
