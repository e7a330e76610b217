"""The model inside torch's DistributedDataParallel; and losses that would meet other ranks.

Its wrapper reduces ordinary gradients, and broadcasts buffers, from hooks of its own forward and
backward pass. Here neither happens: records are clipped on the model inside, whose parameters are
the wrapper's, and the mean of the release is written to them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from quietgrad.distributed.groups.saving import is_for_saving
from quietgrad.tensors import is_spread

MESSAGES = ("send", "recv", "recv_anysource")  # of torch's ProcessGroup
_messages: Counter[tuple[int, ...]] = Counter()  # ranks of a group -> messages that were counted


def model_inside(model: nn.Module) -> nn.Module:
    """What a DistributedDataParallel wraps; any other model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def refuse_wrapped_shards(model: nn.Module) -> None:
    """Refuses shards in a DistributedDataParallel, which has sent the first rank's to all others as
    if they were copies.

    Raises:
        ValueError: with the remedy.
    """
    if isinstance(model, DistributedDataParallel) and any(is_spread(p) for p in model.parameters()):
        raise ValueError(
            "DistributedDataParallel is wrapped around a model whose parameters are spread over "
            "the ranks, and it takes them for copies; make the model anew, give it to fully_shard "
            "or parallelize_module alone, and leave DistributedDataParallel out "
            "(docs/many_processes.md)"
        )


@contextlib.contextmanager
def unused(model: nn.Module) -> Iterator[None]:
    """Inside, the wrapper itself is not to be called: a loss that holds on to it would start
    collective operations, which ranks with fewer records never reach.

    Raises:
        ValueError: at such a call, with the remedy.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return

    def refuse(module: nn.Module, arguments: Any) -> NoReturn:
        raise ValueError(
            "the loss calls the DistributedDataParallel wrapper, whose forward pass waits for "
            "other ranks; call the model that the loss is given: per_example_loss(model, batch)"
        )

    hook = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


@dataclass
class Expected:
    """Operations that meet other ranks and are known.

    Attributes:
        count: how many there were.
        known: ranks whose groups' operations are not counted: where just these run the same
            records, what a model hears there is of these, and the guard sees it. (Two meshes of the
            same ranks count as one, and a tensor may name either.)
    """

    count: int = 0
    known: tuple[int, ...] = ()

    @contextlib.contextmanager
    def operations(self) -> Iterator[None]:
        """Inside, they count as expected."""
        before = _operations(self.known)
        try:
            yield
        finally:
            self.count += _operations(self.known) - before


@contextlib.contextmanager
def silent(expected: Expected | None = None) -> Iterator[None]:
    """Inside, this process starts no operation that meets other ranks, but those that are expected:
    what a loss hears from them follows from their records, and the guard, which looks at records of
    this rank, does not see it.

    Args:
        expected: those that are expected.

    Raises:
        ValueError: at the end, where there was one, with the remedy.
    """
    known = Expected() if expected is None else expected
    before = _operations(known.known) - known.count
    try:
        with _messages_counted():
            yield
    except ValueError:  # what the guard makes of such a loss says less
        if _operations(known.known) - known.count == before:
            raise
    if _operations(known.known) - known.count != before:
        raise ValueError(
            "the loss or the model exchanges tensors with other ranks (a collective operation of "
            "torch.distributed while records were clipped), so a record's gradient would depend on "
            "the records of other ranks; let the loss of an example depend on that example alone"
        )


def _operations(known: tuple[int, ...]) -> int:
    """How many operations this process has started, on all groups of several ranks but those of
    just the known ones, and those on which checkpoints are saved meanwhile.
    """
    messages = sum(count for ranks, count in _messages.items() if ranks != known)
    return _numbered(known) + messages


@contextlib.contextmanager
def _messages_counted() -> Iterator[None]:
    """Inside, messages from one rank to another are counted: NCCL numbers them apart from what all
    ranks of a group do, and tells that number to nobody.
    """
    if not dist.is_available():
        yield
        return
    kind: Any = dist.ProcessGroup
    own = {name: getattr(kind, name) for name in MESSAGES if hasattr(kind, name)}

    def counting(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begun(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_for_saving(group):
                _messages[tuple(sorted(dist.get_process_group_ranks(group)))] += 1
            return begin(group, *args, **kwargs)

        return begun

    try:
        for name, begin in own.items():
            setattr(kind, name, counting(begin))
        yield
    finally:
        for name, begin in own.items():
            setattr(kind, name, begin)


def _numbered(known: tuple[int, ...]) -> int:
    """By the numbers that groups keep."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    started = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        if is_for_saving(group):
            continue
        if group.size() > 1 and tuple(sorted(dist.get_process_group_ranks(group))) != known:
            for device in group._device_types:
                with contextlib.suppress(RuntimeError):  # a backend that does not count
                    backend: Any = group._get_backend(device)
                    started += backend._get_sequence_number_for_group()
    return started
