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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.clipping.clipped_sum import ClippedSum, PrivateCounts
from quietgrad.distributed.alike import REMEDIES, apart, message, records_digest, weights_digest
from quietgrad.distributed.circles import Circle, Circles
from quietgrad.distributed.compared.code import CODE, code_of
from quietgrad.distributed.groups import news
from quietgrad.distributed.groups.failing import in_short, is_of_a_backend
from quietgrad.distributed.groups.leaving import close_connections
from quietgrad.distributed.groups.loops import Loops
from quietgrad.distributed.groups.patience import patience
from quietgrad.distributed.groups.telling import given_by
from quietgrad.distributed.groups.waiting import meet_before_a_group
from quietgrad.distributed.matrices import changed_whole
from quietgrad.distributed.team import Denoise, Facts
from quietgrad.noise.noisy_sum import NoisySum
from quietgrad.randomness import RandomKey
from quietgrad.tensors import Block, block_at, is_spread

ALL = "all"  # the circle of all ranks
FIRST = 0  # the rank that keeps ledger and secrets, and draws the numbers beside the gradients
PATIENCE = timedelta(seconds=5)  # of a rank that stops, until it has told the others


class Ranks:
    """This process as one rank of a run; see ``Team``.

    Attributes:
        named: digests of weights that are compared.
        in_passes: whether ranks wait for each other in passes of a model, and hear nothing there.

    Raises:
        RuntimeError: where the group has one rank only, or gloo is missing.
    """

    named: tuple[str, ...] = ("weights",)

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if not dist.is_gloo_available():
            raise RuntimeError(
                "torch.distributed has no gloo here, through which ranks tell each other what they "
                "do; install a build of torch with gloo"
            )
        meet_before_a_group()
        self._control: Any = dist.new_group(backend="gloo", timeout=patience())
        self._groups: dict[str, Any] = {"cpu": self._control}
        self._loops = Loops(self._control.group_name, self.rank, self.size)
        self.loops = self._loops.say
        self._stopped: str | None = None
        self.in_passes = False
        self._circles = self._all_circles()
        self._weights: dict[str, str] = {}
        self._looked = -1  # the release whose weights were looked at last

    @property
    def share(self) -> tuple[int, int]:
        """Every rank has records of its own."""
        return self.rank, self.size

    @property
    def _counting(self) -> range:
        """Ranks whose numbers beside the gradients count: of each share one."""
        return range(self.size)

    def form(self) -> None:
        """Groups of some ranks, once it is known that all are of one mind about the run."""

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
        except BaseException as error:
            own = self._stopped is None
            self.stop(error)
            if own and is_of_a_backend(error):  # in the middle of a pass, which another one left
                raise self._lost_another(error) from error
            raise

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._stopped is None:  # the others are in another meeting by now
                self._stopped = "this rank stopped in the middle of a release"
                self._loops.fails(error)
                close_connections(self._own_groups)
            raise

    @property
    def _own_groups(self) -> list[Any]:
        """The groups that nobody else meets in."""
        return list(self._groups.values())

    def stop(self, error: BaseException | None = None) -> None:
        if self._stopped is not None:
            return
        self._stopped = "this rank stopped after an error of its own"
        self._loops.fails(error)
        if not self._tell():  # what it has begun would keep this process from ending
            close_connections(None if self.in_passes else self._own_groups)

    def _tell(self) -> bool:
        """The others that this rank has stopped, wherever they meet it next; whether they heard."""
        mine = message(False, "", {}, 0)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(told, mine, group=self._control, async_op=True).wait(PATIENCE)
        except Exception:  # they may be gone, or elsewhere
            return False
        return True

    def look_at(self, model: nn.Module, release: int, loss: Any) -> None:
        if self._looked != release:
            self._looked, self._weights = release, self._digests(model) | code_of(model, loss)

    def _digests(self, model: nn.Module) -> dict[str, str]:
        return {"weights": weights_digest(model)}  # by what is compared

    def _compared(self, name: str) -> list[list[int]]:
        return [list(range(self.size))]  # ranks that have to say the same of a fact

    def same_records(self, dataset: Any, key: RandomKey, cut: str) -> str:
        """Compares digests of some records, and how a loader cuts them (``PrivateLoader.cut``).

        Raises:
            RuntimeError: on all ranks where they differ, or one is another each time it is read.
        """
        found, steady = records_digest(dataset, key)
        reading = "" if steady else f"rank {self.rank}"
        self.agree("loader", {"records": found, "reading": reading, "shares": cut})
        return found

    def agree(self, place: str, facts: Facts, examples: int = 0) -> int:
        """Compares ``facts``, and the digest of ``look_at`` where there is one.

        Raises:
            RuntimeError: on all ranks, naming what differs and the remedy, or that one has stopped.
        """
        return sum(self.agreed(place, facts, examples))

    def agreed(self, place: str, facts: Facts, examples: int) -> list[int]:
        """``agree``, with the number of each rank in their order."""
        self.require()
        # Without a digest an empty word: numbers of facts are the same on all ranks.
        looked = dict.fromkeys((*self.named, *CODE), "") | self._weights
        told = {**facts, **{name: said for name, said in looked.items() if name not in facts}}
        self._weights = {}
        return self._said_alike(place, told, examples, list(range(self.size)), self._control)

    def _said_alike(
        self, place: str, told: Facts, examples: int, ranks: list[int], group: Any
    ) -> list[int]:
        """What these ranks, a group, say at one place; the number of each."""
        mine = message(True, place, told, examples)
        found = [torch.empty_like(mine) for _ in ranks]
        with self.lost():
            away = self._loops.met(dist.all_gather(found, mine, group=group, async_op=True))
        if away:
            close_connections()  # what was begun would be waited for at the end, too
            raise self._stop(away)
        table = torch.stack(found)
        stopped = (table[:, 0] == 0).nonzero().flatten().tolist()
        if stopped:
            raise self._stop(self._loops.said_by(ranks[stopped[0]]))
        if (table[:, 1] != table[0, 1]).any():
            raise self._stop(
                "the ranks are at different places: one clips or releases where another does not; "
                "let all ranks make the same calls of the run, also with an empty share"
            )
        for i, name in enumerate(told):
            said = dict(zip(ranks, table[:, 3 + i].tolist(), strict=True))
            who = apart(name, said, self._compared(name))
            if who:
                raise self._stop(f"the ranks differ in {name} ({who}): {REMEDIES[name]}")
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
        with self.lost():
            word = given_by(FIRST, word, self._control)
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

    def _all_circles(self) -> Circles:
        """Every rank holds all that is not spread over them."""
        everybody = Circle(self.rank, self.size, self._group)
        return Circles({ALL: everybody}, lambda t: None if is_spread(t) else ALL)

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._circles.owned(tensors)

    def summed(self, clipped: ClippedSum, beside: tuple[str, ...]) -> ClippedSum:
        with self.lost():
            sums = self._circles.summed(clipped.gradients)
        numbers = self._side_sums(clipped.private.beside, beside)
        return ClippedSum(sums, clipped.claim, PrivateCounts(beside=numbers))

    def _side_sums(self, own: Mapping[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
        """To the first rank alone, in the order of the ranks."""
        if not names:
            return {}
        none = torch.zeros((), dtype=torch.float64, device="cpu")
        mine = torch.stack(
            [own.get(name, none).detach().to("cpu", torch.float64).reshape(()) for name in names]
        )
        received = [torch.empty_like(mine) for _ in range(self.size)]
        with self.lost():
            dist.gather(mine, received if self.rank == FIRST else None, FIRST, group=self._control)
        if self.rank != FIRST:
            return {}
        total, *others = [received[r].clone() for r in self._counting]
        for other in others:
            total += other
        return dict(zip(names, total.unbind(), strict=True))

    def gathered(
        self, noisy: NoisySum, like: Mapping[str, Tensor], beside: tuple[str, ...]
    ) -> NoisySum:
        with self.lost():
            whole = self._circles.gathered(noisy.gradients, like)
            numbers = self.from_first(dict(noisy.beside)) if beside else {}
        return replace(noisy, gradients=whole, beside=numbers)

    def denoised(self, denoise: Denoise, noisy: NoisySum, model: nn.Module) -> NoisySum:
        owned = self.owned(noisy.gradients)
        held = self._circles.held(ALL, owned)
        done = denoise(replace(noisy, gradients=held), model)
        # What has one dimension is no matrix, whatever the rule.
        spread = {n: g for n, g in noisy.gradients.items() if is_spread(g) and g.dim() > 1}

        def change(name: str, g: Tensor) -> Tensor:
            return denoise(replace(noisy, gradients={name: g}), model).gradients[name]

        made = dict(noisy.gradients) | done.gradients
        with self.lost():
            if spread:
                group = self._group(spread)
                made |= changed_whole(spread, change, self.rank, self.size, group, self._block)
            whole = self._circles.gathered(made, noisy.gradients, ALL)
        return replace(done, gradients=whole)

    def _block(self, tensor: Tensor, rank: int) -> Block:
        """What a rank holds of a tensor that is spread."""
        like: Any = tensor
        return block_at(like.shape, like.placements, tuple(like.device_mesh.shape), (rank,))

    def _group(self, tensors: Mapping[str, Tensor]) -> Any:
        """A group whose backend moves tensors of this kind of device; all ranks come here alike."""
        return self._group_of(next(iter(tensors.values())).device.type)

    def _group_of(self, kind: str) -> Any:
        if kind not in self._groups:
            self._groups[kind] = dist.new_group(timeout=patience())
        return self._groups[kind]

    def _stop(self, why: str) -> RuntimeError:
        self._stopped = why
        return RuntimeError(
            f"{why}. No rank makes a further release; load the weights that were saved last, start "
            "all ranks again, and the run goes on from its ledger"
        )

    @contextlib.contextmanager
    def lost(self) -> Iterator[None]:
        """A rank that is gone shows as an error of the backend."""
        try:
            yield
        except RuntimeError as error:
            if self._stopped is not None:
                raise
            raise self._lost_another(error) from error

    def _lost_another(self, error: BaseException) -> RuntimeError:
        close_connections(self._own_groups)  # others may wait for this one, and not for that
        said = self._loops.a_failure() or news.told(range(self.size), 0.0)
        return self._stop(
            f"rank {self.rank} lost another rank, which failed, ended or cannot be reached "
            f"({in_short(error)}){said and f': {said}'}"
        )
