"""Four processes, two and two with the same records: a model that is cut over neighbours, and
copied or sharded over the groups, is released as by one process, in float64 up to a unit of the
sums.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cutting import PLANS, cut, llama, model_named
from distributed.runs import four_steps, part_of_a_run
from distributed.sharding import next_words, texts, whole
from distributed.test_equality import VARIANTS
from distributed.world import RECORDS, loss, on_ranks, plan_of, records_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from quietgrad.clipping.engines.summing import unit_of
from quietgrad.ledger import read_ledger
from quietgrad.tensors import block_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.usefixtures("first_looks_alone"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    # A cut layer that is given to fully_shard by itself, as blocks are, returns a view.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

TOGETHER = 2
MODELS = {
    "adapters": "adapted",
    "words": "words",
    "words, tied": "tied",
    "words, checkpointed": "checkpointed",
    "words, hutch++": "words",
}
CHANGES: dict[str, dict[str, Any]] = {
    **{name: v for name, v in VARIANTS.items() if name not in ("low rank", "wrapped")},
    "hardly any": {"expected_batch_size": 1},
    "by layer": {"groups": "layer"},
    "adapters": {},
    "words": {},
    "words, tied": {"bands": 2},
    "words, checkpointed": {},
    "words, hutch++": {"estimator": "hutch++", "sketch_dim": 8},
}


# On four processes looks take as long as twenty steps.
LOOKED_AT = {True: {"exact", "adapters"}, False: {"exact", "words, tied"}}


def trained(name: str, ranks: int, sharded: bool) -> dict[str, Any]:
    """Four steps: what was released, and what became of the weights."""
    kind = MODELS.get(name, "bottleneck")
    model = model_named(kind)
    if ranks > 1:
        cut(model, PLANS[kind], TOGETHER, sharded)
    words = name.startswith("words")
    records = texts(RECORDS) if words else records_of()
    together = TOGETHER if ranks > 1 else 1
    what = next_words if words else loss
    looked_at = LOOKED_AT[sharded] if ranks > 1 else ()
    return four_steps(model, records, what, CHANGES[name], name, together, looked_at=looked_at)


def all_of(rank: int, ranks: int, sharded: bool, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: trained(name, ranks, sharded) for name in names}


@functools.cache
def on_one(name: str) -> dict[str, Any]:
    """What one process makes, for which nothing is shared out: one training for all tests."""
    return trained(name, 1, False)


TRAINED: dict[tuple[bool, str], list[dict[str, Any]]] = {}


def on_four(sharded: bool, names: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """What each of four ranks makes. Those that a test before has trained are not trained again."""
    missing = tuple(name for name in names if (sharded, name) not in TRAINED)
    found = on_ranks(4, folder, all_of, 4, sharded, missing) if missing else []
    assert all(isinstance(of_rank, dict) for of_rank in found), found
    TRAINED.update({(sharded, name): [of_rank[name] for of_rank in found] for name in missing})
    return [{name: TRAINED[sharded, name][rank] for name in names} for rank in range(4)]


SHARDED = ("exact", "hutch++", "denoised", "hardly any")
COPIED = ("hutch", "banded", "denoised", "beside", "hardly any")
WORDS = ("adapters", "words, tied")
# Where a sum is copied it is not cut any further: what is done to one does not differ by layout.
MORE_COPIED = (*COPIED, "exact", "hutch++", "users", "by layer", *WORDS, "words, checkpointed")


@pytest.mark.parametrize(
    ("sharded", "names"),
    [
        pytest.param(True, SHARDED, id="sharded"),
        pytest.param(False, COPIED, id="copied"),
        pytest.param(True, WORDS, id="sharded, words"),
        pytest.param(
            True, tuple(CHANGES), id="all, sharded", marks=pytest.mark.slow("nineteen trainings")
        ),
        pytest.param(
            False, MORE_COPIED, id="more, copied", marks=pytest.mark.slow("eight more trainings")
        ),
    ],
)
def test_releases_of_groups_are_those_of_one_process_up_to_a_unit(
    sharded: bool, names: tuple[str, ...], tmp_path: Path
) -> None:
    alone = {name: on_one(name) for name in names}
    found = on_four(sharded, names, tmp_path)
    empty = False
    for name, one in alone.items():
        expected = 5 if name == "users" else CHANGES[name].get("expected_batch_size", 10)
        first = found[0][name]
        error = (first["released"] - one["released"]).abs()
        assert float(error.max()) <= 4 * unit_of(1.0, expected), (name, float(error.max()))
        assert float((error == 0).double().mean()) > 0.9, name
        for what in ("weights", "average"):
            room = 1e-7 if name == "denoised" else 1e-9
            torch.testing.assert_close(first[what], one[what], rtol=0, atol=room)
        assert first["epsilon"] == one["epsilon"]
        for mine, theirs in zip(first["beside"], one["beside"], strict=True):
            assert [n for n, _ in mine] == [n for n, _ in theirs]
            assert [v for _, v in mine] == pytest.approx([v for _, v in theirs], rel=1e-9)
        held = torch.tensor([of_rank[name]["held"] for of_rank in found])
        # Neighbours hold the same records, and the groups all of them, each once.
        assert torch.equal(held[::2], held[1::2])
        assert held[::2].sum(0).tolist() == one["held"]
        empty = empty or bool(((held == 0).any(0) & (held.sum(0) > 0)).any())
        for other in found[1:]:
            for what in first.keys() - {"held"}:
                value, same = first[what], other[name][what]
                equal = torch.equal(same, value) if isinstance(value, Tensor) else same == value
                assert equal, (name, what)
    # Among these were steps in which a group had no record and another had some.
    assert empty or names == WORDS


def of_transformers(rank: int, ranks: int, folder: str) -> Tensor:
    """Releases of a Llama that transformers itself shards and cuts."""
    both = ranks > 1
    model = llama(Path(folder), TOGETHER if both else 1, groups=2 if both else 1)
    releases = []
    with plan_of(bands=2).start(tensor_parallel=TOGETHER if both else 1) as run:
        for batch in run.loader(texts(RECORDS), steps=2, physical_batch_size=3):
            releases.append(whole(run.backward(model, next_words, batch).gradients))
            model.zero_grad()
    return torch.stack(releases)


def test_a_llama_that_transformers_shards_and_cuts(tmp_path: Path) -> None:
    alone = of_transformers(0, 1, str(tmp_path))
    for found in on_ranks(4, tmp_path / "ranks", of_transformers, 4, str(tmp_path)):
        assert isinstance(found, Tensor), found
        assert float((found - alone).abs().max()) <= 4 * unit_of(1.0, 10)


def part(
    rank: int, ranks: int, together: int, sharded: bool, folder: str, until: int
) -> dict[str, Any]:
    model = model_named("bottleneck")
    if ranks > 1:
        cut(model, PLANS["bottleneck"], together, sharded)
    plan, place = plan_of(steps=4, bands=3), Path(folder)
    return part_of_a_run(model, records_of(), loss, plan, place, until, ranks, together)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "copied"])
def test_a_checkpoint_of_groups_goes_on_elsewhere(sharded: bool, tmp_path: Path) -> None:
    """Two and two ranks, one process, two ranks, and two and two again."""
    (tmp_path / "alone").mkdir()
    alone = part(0, 1, 1, False, str(tmp_path / "alone"), 4)
    folder = tmp_path / "moving"
    folder.mkdir()
    ways = ((4, 2, sharded, 1), (1, 1, False, 2), (2, 2, False, 3), (4, 2, sharded, 4))
    for ranks, together, shards, until in ways:
        told = (ranks, together, shards, str(folder), until)
        if ranks == 1:
            found = [part(0, *told)]
        else:
            found = on_ranks(ranks, tmp_path / f"ranks{until}", part, *told)
        assert all(isinstance(of_rank, dict) for of_rank in found), found
    for of_rank in found:
        for what, value in alone.items():
            torch.testing.assert_close(of_rank[what], value, rtol=0, atol=1e-9)
    contents = read_ledger(folder / "ledger.jsonl")
    assert contents.releases == 4
    # One block of correlated noise throughout: each change drew the earlier rows of its parts.
    assert contents.noise_block is not None and contents.noise_block[0] == 0


def blocks(rank: int) -> list[tuple[tuple[int, ...], str]]:
    """What is wrong with the places of parts, for shapes that do not divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong, seen = [], 0
    for rows in range(2, 12):
        for dim, columns in ((0, 3), (1, 4), (1, 5)):
            full = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns)
            module = nn.Linear(columns, rows, bias=False).double()
            module.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(dim)]))
            fully_shard(module, mesh=mesh["dp"])
            weight: Any = module.weight
            assert isinstance(weight, DTensor) and weight.device_mesh.ndim == 2
            try:
                place = block_of(weight)
            except ValueError:
                continue
            seen += 1
            here = weight.to_local()
            slices = [slice(s, s + n) for s, n in zip(place.start, place.shape, strict=True)]
            if not torch.equal(here, full[slices[0], slices[1]]):
                wrong.append((tuple(full.shape), f"part {place}"))
            both = [torch.zeros(1) for _ in range(4)]
            dist.all_gather(both, torch.ones(1) * here.numel())
            if int(sum(both)) != full.numel() or not torch.equal(weight.full_tensor(), full):
                wrong.append((tuple(full.shape), "not everything once"))
    assert seen > 20
    return wrong


def test_parts_lie_where_the_whole_tensor_has_them(tmp_path: Path) -> None:
    assert on_ranks(4, tmp_path, blocks) == [[]] * 4
