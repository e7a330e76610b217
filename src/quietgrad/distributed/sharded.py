"""The ranks of a run whose model is spread over them, as clipping meets them: sharded by
``fully_shard``, cut by tensor parallel plans (``cut``), or both.

The operations that meet other ranks while records are clipped are known: fully_shard's gathers and
the library's own. They are counted, so that any other (of a loss that hears from other ranks) is
seen (``wrapping.silent``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.clipping.capture.spread import put_away, sharding_modules
from quietgrad.clipping.cut.company import CutCompany
from quietgrad.clipping.cut.refusals import REMEDY, is_cut, is_cut_and_sharded
from quietgrad.clipping.sharded.company import Arriving, Company
from quietgrad.clipping.sharded.refusals import is_fully_sharded
from quietgrad.clipping.soundness.refusals import require_model
from quietgrad.distributed.compared.code import code_of
from quietgrad.distributed.cut.company import Cutters
from quietgrad.distributed.cut.ranks import CutRanks
from quietgrad.distributed.groups.failing import require_to_end_here
from quietgrad.distributed.ranks import Ranks
from quietgrad.distributed.team import Team
from quietgrad.distributed.wrapping import Expected, refuse_wrapped_shards, silent, unused
from quietgrad.tensors import Batch, axis_of, is_spread, map_tensors

# torch 2.13 gave it another name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class ShardedCompany:
    """``Company`` over the ranks of a run.

    Attributes:
        ranks: of the run.
        group: of those that parameters are sharded over.
        expected: operations that are the library's own.
        sharing: the ranks that share records, where layers are cut over them.
    """

    ranks: Ranks
    group: Any
    expected: Expected
    sharing: Cutters | None = None

    @property
    def size(self) -> int:
        return self.ranks.share[1]

    def told(self, place: str, number: int, facts: str = "", of: str = "passes") -> list[int]:
        with self.expected.operations():
            return self.ranks.agreed(place, {of: facts}, number)

    def given_by(self, rank: int, value: Any) -> Any:
        with self.expected.operations():
            return self.ranks.given_by(rank, value)

    def scattered(self, sums_wn: Tensor) -> Arriving:
        # Zeros: what does not arrive is then no other tensor's memory.
        own = sums_wn.new_zeros(sums_wn.shape[1])
        with self.expected.operations(), self.ranks.lost():
            on_its_way = _reduce_scatter(own, sums_wn.view(-1), group=self.group, async_op=True)

        def arrived() -> Tensor:
            with self.ranks.lost():
                on_its_way.wait()
            return own

        return arrived


@contextlib.contextmanager
def clipping_on(team: Team, model: nn.Module) -> Iterator[Company | CutCompany | None]:
    """Inside, records are clipped, and nothing else meets other ranks. Gives the company in which a
    model is clipped that is sharded or cut; None for a model that is whole on every rank.

    Args:
        team: the processes of the run.
        model: as it was given to the run.

    Raises:
        ValueError: where a model is sharded in a run on one process, or cut in a run that was not
            told so, or the other way round; and at the end, where the loss met other ranks.
        RuntimeError: where NCCL is told to go on after a failure.
    """
    require_model(model)
    refuse_wrapped_shards(model)
    put_away(model)  # an evaluation leaves the outermost module's parameters gathered
    spread: Any = next((p for p in model.parameters() if is_spread(p)), None)
    meets_in_passes(team, model)
    if isinstance(team, CutRanks) or _is_cut_at_all(model):
        ranks = _require_cut(team, model)
        group = _group_over(model, ranks.neighbours)
        expected = Expected(known=ranks.neighbours)
        cutters = Cutters(ranks, group, spread.device_mesh.device_type, expected)
        if is_cut(model):
            with silent(expected):
                yield cutters
            return
        shards = _group_over(model, ranks.across)
        with silent(expected), gathers_expected(model, expected):
            yield ShardedCompany(ranks, shards, expected, cutters)
        return
    if not is_fully_sharded(model):
        with unused(model), silent():
            yield None
        return
    if not isinstance(team, Ranks):
        raise ValueError(
            "the model is sharded by fully_shard, and this run has one process; start the run on "
            "all ranks of the mesh (init_process_group, then plan.start on each), or leave "
            "fully_shard out on one process"
        )
    # Of another mesh than one over all ranks the clipper says by name that it is refused.
    expected, group = Expected(), spread.device_mesh.get_group(0)
    with silent(expected), gathers_expected(model, expected):
        yield ShardedCompany(team, group, expected)


def meets_in_passes(team: Team, model: nn.Module) -> None:
    """Ranks are about to wait for each other in passes of a model that is spread over them.

    Raises:
        RuntimeError: where NCCL is told to go on after a failure.
    """
    if isinstance(team, Ranks) and any(is_spread(p) for p in model.parameters()):
        require_to_end_here()
        team.in_passes = True


def _is_cut_at_all(model: nn.Module) -> bool:
    return is_cut(model) or is_cut_and_sharded(model)


def _group_over(model: nn.Module, ranks: tuple[int, ...]) -> Any:
    """The group that parameters are spread over along their meshes' dimension of these ranks.

    Raises:
        ValueError: where there is none.
    """
    for p in model.parameters():
        spread: Any = p
        axis = axis_of(p, ranks) if is_spread(p) else None
        if axis is not None:
            return spread.device_mesh.get_group(axis)
    raise ValueError(
        f"no parameter is spread over ranks {list(ranks)}; the run has {dist.get_world_size()} "
        f"ranks, and those that share records are neighbours: {REMEDY}"
    )


def _require_cut(team: Team, model: nn.Module) -> CutRanks:
    both = is_cut_and_sharded(model)
    if not isinstance(team, CutRanks):
        size = max(_cut_over(p) for p in model.parameters() if is_spread(p))
        if size == 1:
            raise ValueError(
                "the model is cut on a mesh of one rank (tensor parallel), where it is whole: "
                "leave parallelize_module out on one process (docs/tensor_parallel.md)"
            )
        raise ValueError(
            f"the model is cut over {size} ranks (tensor parallel), and the run was started for "
            "records that lie on one rank each; start it with plan.start(..., "
            f"tensor_parallel={size}), on all ranks of the mesh (docs/tensor_parallel.md)"
        )
    if not both and not is_cut(model):
        raise ValueError(
            f"the run was started with tensor_parallel={team.together}, and the model is "
            f"{'sharded by fully_shard' if is_fully_sharded(model) else 'whole on every rank'}, "
            "its layers not cut; cut it by parallelize_module, then give all of it to fully_shard "
            "or none, or start the run without tensor_parallel (docs/tensor_parallel.md)"
        )
    return team


def _cut_over(parameter: Any) -> int:
    """How many ranks a layer is cut over: the last dimension of a mesh of two."""
    return int(parameter.device_mesh.size(parameter.device_mesh.ndim - 1))


def public_records_of(team: Team, model: nn.Module, records: Batch, loss: Any) -> Batch:
    """What the guard looks at in place of private records. For a sharded or cut model those of the
    first rank on all of them: how many passes a look makes follows from its records.

    Raises:
        RuntimeError: on all ranks, where not all of them come here.
        ValueError: where a model is cut in a run that was not told so, or the other way round: it
            would be bound as what it is no longer when it is cut later.
    """
    require_model(model)
    refuse_wrapped_shards(model)
    put_away(model)
    if isinstance(team, CutRanks) or _is_cut_at_all(model):
        _require_cut(team, model)
    if not is_fully_sharded(model) or not isinstance(team, Ranks):
        return records
    meets_in_passes(team, model)
    team.agree("check", code_of(model, loss))
    device = next(model.parameters()).device
    given = team.from_first(map_tensors(records, lambda t: t.detach().cpu()))
    # A copy everywhere: what a loss holds of them is then found on no rank, and not on one alone.
    return map_tensors(given, lambda t: t.clone().to(device))


@contextlib.contextmanager
def gathers_expected(model: nn.Module, expected: Expected) -> Iterator[None]:
    """Inside, the gathers of fully_shard count as expected."""
    changed: list[tuple[Any, Any]] = []
    try:
        for module in sharding_modules(model):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if not isinstance(group._all_gather_comm, _Counted):
                    changed.append((group, group._all_gather_comm))
                    group._all_gather_comm = _Counted(group._all_gather_comm, expected)
        yield
    finally:
        for group, gather in changed:
            group._all_gather_comm = gather


class _Counted:
    """A gather of fully_shard's, as it is, counted.

    Args:
        gather: what it uses, or what the user gave it.
        expected: where it counts.
    """

    def __init__(self, gather: Any, expected: Expected) -> None:
        self._gather = gather
        self._expected = expected

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return self._gather.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._expected.operations():
            return self._gather(*args, **kwargs)
