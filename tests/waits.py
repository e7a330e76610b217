"""How often a processor would wait for a GPU, counted where there is none.

Waiting is what every number that Python reads of a GPU's tensor costs, and every copy to a GPU from
memory that is not pinned. Counted are the operations that do either: on a processor they are made
just the same, and take no time. Of tensors that lie on the processor beside a GPU, too (messages
between ranks, what a loader read), they are counted though nobody would wait: what matters is
whether their number grows. Inside, every tensor says that it is on a GPU, so that the ways are
taken that GPUs take.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from quietgrad.clipping import Clipping
from quietgrad.clipping.capture.capture import Call
from quietgrad.noise.sources import keyed
from quietgrad.plan import PrivacyConfig

WIDTH, WORDS, LENGTH, RECORDS = 16, 30, 64, 48
USUAL = 2  # a release at which the guard does not look

READ = {
    "_linalg_check_errors", "_local_scalar_dense", "_unique2", "equal", "is_nonzero",
    "masked_select", "nonzero", "unique_consecutive", "unique_dim",
}  # fmt: skip
BY_PLACE = {"index", "index_put", "index_put_", "_index_put_impl_"}
Waits = Counter[tuple[str, str]]  # (what, where) -> how often


def _where() -> str:
    """The line of the library that an operation is made for."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/quietgrad/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.rpartition('/quietgrad/')[2]}:{frame.f_lineno}"


class _Operations(TorchDispatchMode):
    def __init__(self, found: Waits) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in BY_PLACE and any(
            isinstance(place, Tensor) and place.dtype == torch.bool for place in args[1]
        )
        if name in READ or masks or (name == "repeat_interleave" and isinstance(args[0], Tensor)):
            self.found[name, _where()] += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, found: Waits) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        given = [*args[1:], *kwargs.values()]
        moved = func is Tensor.to and any(
            isinstance(one, str | torch.device | Tensor) for one in given
        )
        there = kwargs.get("device") not in (None, "cpu")  # a device, not the word
        made = func in (torch.tensor, torch.as_tensor) and there
        if moved or made or func in (Tensor.tolist, Tensor.cpu, Tensor.new_tensor):
            self.found[func.__name__, _where()] += 1
        return func(*args, **kwargs)


def counted(work: Callable[[], Any]) -> Waits:
    """What would wait while ``work`` runs. Noise is left out, which a GPU draws by itself."""
    found: Waits = Counter()
    own = Call.deliver

    def deliver(call: Call, *given: Any) -> None:
        with _Calls(found):  # which autograd switches off in its functions
            own(call, *given)

    def drawn(like: Tensor, *given: Any) -> Tensor:
        return torch.zeros_like(like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Call, "deliver", deliver)
        patch.setattr(keyed, "stretch", drawn)
        with _Operations(found), _Calls(found):
            work()
    return found


def difference(few: Waits, many: Waits) -> dict[tuple[str, str], int]:
    """What grew, and by how much."""
    return {what: many[what] - few[what] for what in many if many[what] > few[what]}


class Block(nn.Module):
    """A layer of every kind that a decoder has, a bare parameter, and a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.before(x)).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed) * self.scale


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def next_words(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids = batch["ids"]
    return F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none").mean(dim=1)


def waits_of(
    layers: int, clipping: dict[str, Any], made: Callable[[nn.Module], nn.Module] = lambda m: m
) -> Waits:
    """Of a usual release, in micro-batches of eight; ``made``: of the model, before the run."""
    torch.manual_seed(0)
    model = made(Decoder(layers))
    records = [{"ids": torch.randint(0, WORDS, (LENGTH + 1,))} for _ in range(RECORDS)]
    plan = PrivacyConfig(
        noise_multiplier=1.0,
        expected_batch_size=16,
        steps=USUAL + 1,
        clipping=Clipping(**clipping),
        seed=3,
        data_are_public=True,
    ).build(RECORDS)
    with plan.start() as run:
        for batch in run.loader(records, steps=USUAL + 1, physical_batch_size=8):
            step = functools.partial(run.backward, model, next_words, batch)
            if run.released == USUAL:
                return counted(step)
            step()
            model.zero_grad()
    raise AssertionError
