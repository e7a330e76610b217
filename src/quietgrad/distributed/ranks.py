"""The processes of a ``torch.distributed`` group as one run.

What is told between ranks goes through a group of its own, so that it never meets the collective
operations of the user's code or of torch's wrappers. Small messages have a fixed size and travel
through gloo; sums travel through the backend of their device.

Every release has five meetings, in the same order on all ranks: an agreement, the ledger's word,
the sums, the released values, and the numbers beside them where there are some. A rank that cannot
go on meets the others at their agreement and says so; one that is gone is noticed by the backend.
After either no rank releases anything any more.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.distributed.alike import records_digest, weights_digest
from quietgrad.distributed.exchange import gathered, owners_of, sums_of_owner
from quietgrad.distributed.matrices import changed_whole
from quietgrad.distributed.team import Denoise, Facts
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.randomness import RandomKey
from quietgrad.tensors import is_spread

MOST_FACTS = 8
WORD_BYTES = 2048
FIRST = 0  # the rank that keeps ledger and secrets, and draws the numbers beside the gradients
PATIENCE = timedelta(seconds=60)  # of a rank that stops, until it has told the others

REMEDIES = {
    "weights": "start every rank from the same weights (the same checkpoint, or the same "
    "torch.manual_seed before the model is made), and let all step alike",
    "parameters": "give every rank the same model, with the same trainable parameters, cut by one "
    "plan where it is cut, in one dtype and on one kind of device",
    "shares": "make the same loader on every rank, with the same physical_batch_size",
    "claim": "build the same plan on every rank",
    "drawing": "use one kind of device and the same versions of numpy and torch everywhere",
    "session": "start the run on all ranks together, once",
    "records": "give every rank the whole data set, in the same order, with no sampler and no "
    "shuffling of its own; shares are the run's",
    "passes": "use one kind of device and the same versions of numpy and torch everywhere: ranks "
    "whose parameters are sharded make the same passes",
    "micro-batch": "ranks that hold parts of one model run the same records: make batches alike on "
    "all of them (the run's loader, and a collate_fn that draws no random numbers of its own, or "
    "from generators that are seeded alike)",
    "reading": "let a record be the same whenever it is read, and augment in collate_fn: records "
    "that change from reading to reading cannot be compared between ranks",
}


class Ranks:
    """This process as one rank of a run; see ``Team``.

    Raises:
        RuntimeError: where the group has one rank only, or gloo is missing.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if not dist.is_gloo_available():
            raise RuntimeError(
                "torch.distributed has no gloo here, through which ranks tell each other what they "
                "do; install a build of torch with gloo"
            )
        self._control: Any = dist.new_group(backend="gloo")
        self._groups: dict[str, Any] = {"cpu": self._control}
        self._stopped: str | None = None
        self._owner: dict[str, int] = {}
        self._entries: dict[str, int] = {}
        self._weights = ""
        self._looked = -1  # the release whose weights were looked at last

    @property
    def share(self) -> tuple[int, int]:
        """Every rank has records of its own."""
        return self.rank, self.size

    def require(self) -> None:
        """Raises RuntimeError where the group is another one, or a rank has stopped."""
        if self._stopped is not None:
            raise RuntimeError(
                f"{self._stopped}; this run makes no further release. Start all ranks again: the "
                "ledger counts what was released"
            )
        # A group that was destroyed goes with its subgroups, also where another of the same size
        # came in its place, whose ranks may be others.
        if (
            not dist.is_initialized()
            or (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size)
            or self._control not in dist.distributed_c10d._world.pg_map
        ):
            raise RuntimeError(
                f"this run was started on {self.size} ranks, and the process group is another one "
                "now; keep the group until the run is closed, or start again from the ledger"
            )

    @contextlib.contextmanager
    def stopping_all(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # The others are in another meeting by now; they notice that this process ends.
            self._stopped = self._stopped or "this rank stopped in the middle of a release"
            raise

    def stop(self) -> None:
        if self._stopped is not None:
            return
        self._stopped = "this rank stopped after an error of its own"
        mine = _message(False, "", {}, 0)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        with contextlib.suppress(Exception):  # they may be gone
            dist.all_gather(told, mine, group=self._control, async_op=True).wait(PATIENCE)

    def look_at(self, model: nn.Module, release: int) -> None:
        if self._looked != release:
            self._looked, self._weights = release, weights_digest(model)

    def same_records(self, dataset: Any, key: RandomKey, block: int) -> None:
        """Compares digests of some records.

        Raises:
            RuntimeError: on all ranks where they differ, or where a record is another one each time
                it is read.
        """
        found, steady = records_digest(dataset, key)
        reading = "" if steady else f"rank {self.rank}"
        self.agree("loader", {"records": found, "reading": reading, "shares": str(block)})

    def agree(self, place: str, facts: Facts, examples: int = 0) -> int:
        """Compares ``facts``, and the digest of ``look_at`` where there is one.

        Raises:
            RuntimeError: on all ranks, naming what differs and the remedy, or that one has stopped.
        """
        return sum(self.agreed(place, facts, examples))

    def agreed(self, place: str, facts: Facts, examples: int) -> list[int]:
        """``agree``, with the number of each rank in their order."""
        self.require()
        told = {**facts, "weights": self._weights}
        self._weights = ""
        mine = _message(True, place, told, examples)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.lost():
            dist.all_gather(found, mine, group=self._control)
        table = torch.stack(found)
        stopped = (table[:, 0] == 0).nonzero().flatten().tolist()
        if stopped:
            raise self._stop(
                f"rank {stopped[0]} stopped after an error of its own, which it has shown"
            )
        if not _alike(table[:, 1]):
            raise self._stop(
                "the ranks are at different places: one clips or releases where another does not; "
                "let all ranks make the same calls of the run, also with an empty share"
            )
        for i, name in enumerate(told):
            if not _alike(table[:, 3 + i]):
                raise self._stop(f"the ranks differ in {name}: {REMEDIES[name]}")
        numbers: list[int] = table[:, 2].tolist()
        return numbers

    def write_down(self, write: Callable[[], None]) -> None:
        """Raises RuntimeError on all ranks where the first one could not write."""
        self.require()
        word, error = "", None
        if self.rank == FIRST:
            try:
                write()
            except BaseException as raised:
                error, word = raised, f"{raised}" or type(raised).__name__
        word = self._said(word)
        if not word:
            return
        stopped = self._stop(f"rank {FIRST} made no release: {word}")
        raise stopped if error is None else error

    def from_first(self, value: Any) -> Any:
        """What the first rank gives, on all. May be secret: it goes over the group's network."""
        return self.given_by(FIRST, value)

    def given_by(self, rank: int, value: Any) -> Any:
        """What one rank gives, on all."""
        box = [value]
        with self.lost():
            dist.broadcast_object_list(box, src=rank, group=self._control)
        return box[0]

    def all_said(self, value: Any) -> list[Any]:
        """What each rank gives, on all."""
        found = [None] * self.size
        with self.lost():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        entries = {name: t.numel() for name, t in tensors.items() if not is_spread(t)}
        if entries != self._entries:
            self._entries, self._owner = entries, owners_of(entries, self.size)
        # Of what is spread, every rank draws for its own shard.
        return {
            name: t
            for name, t in tensors.items()
            if name not in self._owner or self._owner[name] == self.rank
        }

    def summed(self, clipped: ClippedSum, beside: tuple[str, ...]) -> ClippedSum:
        mine = self.owned(clipped.gradients)
        held = {name: g for name, g in clipped.gradients.items() if name in self._owner}
        with self.lost():
            whole = dict(mine)
            if held:
                group = self._group(held)
                whole |= sums_of_owner(held, self._owner, self.rank, self.size, group)
            numbers = self._side_sums(clipped.private.beside, beside)
        sums = {name: whole[name] for name in mine}
        return ClippedSum(sums, clipped.claim, PrivateCounts(beside=numbers))

    def _side_sums(self, own: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
        """To the first rank alone, in the order of the ranks."""
        if not names:
            return {}
        none = torch.zeros((), dtype=torch.float64)
        mine = torch.stack(
            [own.get(name, none).detach().to("cpu", torch.float64).reshape(()) for name in names]
        )
        received = [torch.empty_like(mine) for _ in range(self.size)]
        dist.gather(mine, received if self.rank == FIRST else None, FIRST, group=self._control)
        if self.rank != FIRST:
            return {}
        total = received[0].clone()
        for other in received[1:]:
            total += other
        return dict(zip(names, total.unbind(), strict=True))

    def gathered(
        self, noisy: NoisySum, like: Mapping[str, Tensor], beside: tuple[str, ...]
    ) -> NoisySum:
        whole = self._gathered(noisy.gradients, like)
        with self.lost():
            numbers = self.from_first(dict(noisy.beside)) if beside else {}
        return replace(noisy, gradients=whole, beside=numbers)

    def denoised(self, denoise: Denoise, noisy: NoisySum, model: nn.Module) -> NoisySum:
        owned = self.owned(noisy.gradients)
        held = {name: g for name, g in owned.items() if name in self._owner}
        done = denoise(replace(noisy, gradients=held), model)
        # What has one dimension is no matrix, whatever the rule.
        spread = {n: g for n, g in noisy.gradients.items() if is_spread(g) and g.dim() > 1}

        def change(name: str, g: Tensor) -> Tensor:
            return denoise(replace(noisy, gradients={name: g}), model).gradients[name]

        made = owned | done.gradients
        if spread:
            with self.lost():
                made |= changed_whole(spread, change, self.rank, self.size, self._group(spread))
        return replace(done, gradients=self._gathered(made, noisy.gradients))

    def _gathered(
        self, made: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What owners made of their parameters, and what is spread as it is here."""
        held = {name: g for name, g in like.items() if name in self._owner}
        if not held:
            return {name: made[name] for name in like}
        with self.lost():
            group = self._group(held)
            whole = gathered(made, held, self._owner, self.rank, self.size, group)
        return {name: whole[name] if name in whole else made[name] for name in like}

    def _group(self, tensors: Mapping[str, Tensor]) -> Any:
        """A group whose backend moves tensors of this kind of device; all ranks come here alike."""
        kind = next(iter(tensors.values())).device.type
        if kind not in self._groups:
            self._groups[kind] = dist.new_group()
        return self._groups[kind]

    def _said(self, word: str) -> str:
        buffer = torch.zeros(WORD_BYTES, dtype=torch.uint8)
        told = word.encode("utf-8", "replace")[:WORD_BYTES]
        buffer[: len(told)] = torch.tensor(list(told), dtype=torch.uint8)
        with self.lost():
            dist.broadcast(buffer, FIRST, group=self._control)
        return bytes(buffer.tolist()).rstrip(b"\0").decode("utf-8", "ignore")

    def _stop(self, why: str) -> RuntimeError:
        self._stopped = why
        return RuntimeError(
            f"{why}. No rank makes a further release; start all ranks again, and the run goes on "
            "from its ledger"
        )

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        """A rank that is gone shows as an error of the backend."""
        try:
            yield
        except RuntimeError as error:
            if self._stopped is not None:
                raise
            raise self._stop(
                f"rank {self.rank} lost another rank, which ended or cannot be reached "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
            ) from error


def _message(well: bool, place: str, facts: Facts, examples: int) -> Tensor:
    assert len(facts) <= MOST_FACTS
    told = [_number(value) for value in facts.values()]
    head = [int(well), _number(place), examples]
    return torch.tensor([*head, *told, *[0] * (MOST_FACTS - len(told))], dtype=torch.int64)


def _number(text: str) -> int:
    """A digest of text as a signed number of 64 bits."""
    hashed = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True)


def _alike(values: Tensor) -> bool:
    return bool((values == values[0]).all())
