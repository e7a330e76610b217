"""What ranks compare, without ranks: whatever is set otherwise on one of them is another fact, and
the last rank is compared like the first ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plans import changed
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.beside import AdaptiveClipping, TrainingLoss
from quietgrad.clipping.capture.examples import UserBatch
from quietgrad.denoising import SpikesWithBulk
from quietgrad.distributed.alike import (
    NOT_KNOWN,
    apart,
    batch_digest,
    message,
    records_digest,
    shapes_digest,
    weights_digest,
)
from quietgrad.noise import BandedNoise
from quietgrad.plan.session.facts import facts_of, require_alike
from quietgrad.randomness import RandomKey
from quietgrad.schedules import Linear, Schedules

RECORDS = 24
BASE = PrivacyConfig(noise_multiplier=1.0, sample_rate=0.25, steps=6)
WITH_LOSS = changed(BASE, training_loss=TrainingLoss(high=2.0))
WITH_NORM = changed(BASE, adaptive_clipping=AdaptiveClipping())
# Name -> (what one rank plans, what another one does, the fact that tells).
PLANS: dict[str, tuple[Any, Any, str]] = {
    "noise": (BASE, changed(BASE, noise_multiplier=1.1), "mechanism"),
    "steps": (BASE, changed(BASE, steps=7), "mechanism"),
    "norm": (BASE, changed(BASE, max_grad_norm=2.0), "mechanism"),
    "delta": (BASE, changed(BASE, target_delta=1e-3), "mechanism"),
    "sketch": (BASE, changed(BASE, estimator="hutch"), "mechanism"),
    "views": (BASE, changed(BASE, augmentation_multiplicity=2), "mechanism"),
    "engine": (BASE, changed(BASE, engine="bookkeeping"), "mechanism"),
    "bands": (BASE, changed(BASE, noise=BandedNoise(2)), "mechanism"),
    "memory": (
        changed(BASE, noise=BandedNoise(2)),
        changed(BASE, noise=BandedNoise(2, memory="regenerate")),
        "mechanism",
    ),
    "source": (BASE, changed(BASE, source="secure"), "mechanism"),
    "schedule": (BASE, changed(BASE, schedules=Schedules(Linear(1.0, 0.9))), "mechanism"),
    "course of noise": (
        changed(BASE, schedules=Schedules(Linear(1.0, 0.9))),
        changed(BASE, schedules=Schedules(Linear(1.0, 0.8))),
        "mechanism",
    ),
    "course of sizes": (
        BASE,
        changed(BASE, schedules=Schedules(batch_size=Linear(1, 2))),
        "mechanism",
    ),
    "denoiser": (BASE, changed(BASE, denoising=SpikesWithBulk()), "mechanism"),
    "a number beside": (BASE, WITH_LOSS, "mechanism"),
    "its bound": (WITH_LOSS, changed(BASE, training_loss=TrainingLoss(high=3.0)), "mechanism"),
    "quantile": (
        WITH_NORM,
        changed(BASE, adaptive_clipping=AdaptiveClipping(quantile=0.7)),
        "mechanism",
    ),
    "public": (BASE, changed(BASE, seed=3, data_are_public=True), "mechanism"),
    "seed": (
        changed(BASE, seed=3, data_are_public=True),
        changed(BASE, seed=4, data_are_public=True),
        "seed",
    ),
    "rate": (BASE, changed(BASE, sample_rate=0.3), "sampling"),
}


def facts(
    config: PrivacyConfig, size: int = RECORDS, how: tuple[Any, ...] = (), **build: Any
) -> dict[str, str]:
    start = how or (None, None, None, 1, 2)
    return facts_of(config.build(size, **build), *start)


@pytest.mark.parametrize("name", PLANS)
def test_every_setting_of_a_plan_is_compared(name: str) -> None:
    one, other, fact = PLANS[name]
    assert facts(one) == facts(one)
    assert facts(one)[fact] != facts(other)[fact]


def test_records_owners_and_ways_to_start_are_compared() -> None:
    here = facts(BASE)
    assert here["sampling"] != facts(BASE, RECORDS + 1)["sampling"]
    banded = changed(BASE, noise=BandedNoise(2))
    ids = [bytes([i]) for i in range(RECORDS)]
    of_ids = [facts(banded, record_ids=some)["sampling"] for some in (ids, ids[::-1])]
    assert len({facts(banded)["sampling"], *of_ids}) == 3
    owners = [[i // 2 for i in range(RECORDS)], [i // 3 for i in range(RECORDS)]]
    owners.append([-owner for owner in owners[0]])
    owners.append([i % (RECORDS // 2) for i in range(RECORDS)])  # the same owners of others
    assert len({facts(BASE, record_owner=some)["sampling"] for some in owners}) == 4
    ledger, keys = Path("ledger.jsonl"), Path("secrets.json")
    ways = [
        (ledger, None, None), (None, None, None), (ledger, keys, None), (ledger, None, True),
    ]  # fmt: skip
    assert len({facts(BASE, how=(*way, 1, 2))["files"] for way in ways}) == len(ways)
    cut = {facts(BASE, how=(None, None, None, *cut))["ranks"] for cut in ((1, 2), (2, 2), (1, 4))}
    assert len(cut) == 3


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("fact", ["versions", "mechanism", "sampling", "seed", "files", "ranks"])
def test_no_rank_and_no_fact_is_passed_over(fact: str, rank: int) -> None:
    told = [facts(BASE) for _ in range(3)]
    require_alike(told)
    told[rank] = {**told[rank], fact: "another"}
    with pytest.raises(RuntimeError, match=f"ranks 0 and {rank} differ in {fact}"):
        require_alike(told)


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (changed(BASE, noise_multiplier=1.1), RECORDS, r"noise_multiplier (1.0 and 1.1)"),
        (changed(BASE, steps=7), RECORDS, "steps (6 and 7)"),
        (changed(BASE, max_grad_norm=2.0), RECORDS, "max_grad_norm (1.0 and 2.0)"),
        (changed(BASE, sample_rate=0.5), RECORDS, "expected_batch_size (6.0 and 12.0)"),
        (BASE, RECORDS + 1, "dataset_size (24 and 25)"),
    ],
)
def test_what_differs_is_named_with_both_values(
    config: PrivacyConfig, size: int, words: str
) -> None:
    """It was "differ in mechanism", and whoever had started the ranks had to guess what."""
    with pytest.raises(RuntimeError) as refused:
        require_alike([facts(BASE), facts(config, size)])
    of = "for the same records" if size != RECORDS else "from the same settings"
    assert str(refused.value).startswith(
        f"ranks 0 and 1 differ in {words}, so they would not be one run: build the plan {of}"
    )


def test_those_that_have_to_say_the_same_are_compared_to_the_last() -> None:
    assert apart("claim", {0: 5, 1: 5, 2: 5}, [range(3)]) == ""
    assert apart("claim", {0: 5, 1: 5, 2: 6}, [range(3)]) == "ranks 0 and 2"
    assert apart("claim", {0: 5, 1: 6, 2: 5, 3: 7}, [(0, 2), (1, 3)]) == "ranks 1 and 3"
    assert apart("claim", {1: 5, 2: 6}, [range(3)]) == "ranks 1 and 2"  # 0 is not asked
    facts = {"precision": NOT_KNOWN}
    nothing = int(message(True, "", facts, 0)[3])  # of a rank that has not looked yet
    assert apart("precision", {0: nothing, 1: 5, 2: 5}, [range(3)]) == ""
    assert apart("precision", {0: nothing, 1: 5, 2: 6}, [range(3)]) == "ranks 1 and 2"
    assert apart("claim", {0: nothing, 1: 5}, [range(2)]) == "ranks 0 and 1"


def test_what_a_rank_says_has_one_size_and_all_of_it() -> None:
    said = message(True, "release", {"claim": "a"}, 7)
    assert said.shape == message(False, "check", {"a": "b", "c": "d"}, 0).shape
    for other in (
        message(False, "release", {"claim": "a"}, 7),
        message(True, "check", {"claim": "a"}, 7),
        message(True, "release", {"claim": "b"}, 7),
        message(True, "release", {"claim": "a"}, 8),
    ):
        assert not torch.equal(said, other)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_weights_that_differ_in_one_bit_or_in_use_are_other_weights() -> None:
    known = weights_digest(model())
    assert known == weights_digest(model())
    for last in (0, 1):
        moved = model()
        with torch.no_grad():
            weight = moved[last].weight
            weight[-1, -1] = torch.nextafter(weight[-1, -1], torch.tensor(9.0))
        assert weights_digest(moved) != known
        frozen = model()
        frozen[last].weight.requires_grad_(False)
        assert weights_digest(frozen) != known
        frozen[last].weight.data += 1.0  # frozen ones are compared as well
        assert weights_digest(frozen) not in (known, weights_digest(model().requires_grad_(False)))
    assert weights_digest(model().double()) != known


def test_micro_batches_that_differ_in_one_entry_or_user_are_others() -> None:
    x = torch.arange(12.0).view(4, 3)
    known = batch_digest({"x": x})
    other = x.clone()
    other[-1, -1] = torch.nextafter(other[-1, -1], torch.tensor(99.0))
    turned = {batch_digest({"x": t}) for t in (other, x.flip(0), x.double(), x.view(2, 6))}
    assert batch_digest({"x": x.clone()}) == known and len(turned | {known}) == 5
    users = {batch_digest(UserBatch({"x": x}, sizes)) for sizes in ((2, 2), (1, 3), (3, 1))}
    assert len(users | {known}) == 4


def test_gradients_are_told_by_name_shape_and_type() -> None:
    known = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    others = [
        {"b": known["b"], "a": known["a"]},
        {"a": torch.zeros(3, 2), "b": known["b"]},
        {"a": known["a"].double(), "b": known["b"]},
        {"a": known["a"]},
    ]
    digests = {shapes_digest(some) for some in (known, *others)}
    assert len(digests) == 5 and shapes_digest(dict(known)) in digests


def test_records_in_another_order_are_others_and_unsteady_ones_say_so() -> None:
    key = RandomKey.from_entropy()
    records = [np.arange(3) + i for i in range(RECORDS)]
    known = records_digest(records, key)
    assert known == records_digest([r.copy() for r in records], key) and known[1]
    swapped = [*records[:-2], records[-1], records[-2]]
    for others in (swapped, records[:-1], [*records[1:], records[0]]):
        assert records_digest(others, key)[0] != known[0]

    class Counting(list):  # type: ignore[type-arg]
        read = 0

        def __getitem__(self, place: Any) -> Any:
            Counting.read += 1
            return super().__getitem__(place), Counting.read

    assert not records_digest(Counting(records), key)[1]
