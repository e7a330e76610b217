"""Plans and runs that protect users: what is drawn and clipped, what the ledger says, and what is
refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import changed
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from quietgrad import PrivacyConfig, PrivacyPlan, Users
from quietgrad.beside.values import Observed
from quietgrad.clipping import UserBatch
from quietgrad.denoising import SpikesWithBulk
from quietgrad.ledger import read_ledger

pytestmark = pytest.mark.usefixtures("examined_once")
RECORDS = 120
CONFIG = PrivacyConfig(
    noise_multiplier=1.0,
    sample_rate=0.3,
    steps=5,
    target_delta=1e-3,
    max_grad_norm=0.5,
    seed=7,
    data_are_public=True,
)


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def owners() -> list[str]:
    """Users of 1 to 20 records, in no order."""
    drawn = np.random.default_rng(1).permutation(np.repeat(np.arange(15), np.arange(1, 16)))
    return [f"user {i}" for i in drawn]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def weights_after(plan: PrivacyPlan, **loader: Any) -> Tensor:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    with plan.start() as run:
        for batch in run.loader(records(), steps=plan.steps, **loader):
            run.backward(trained, loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in trained.parameters()])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"estimator": "hutch"},
        {"engine": "one-example"},
        {"denoising": SpikesWithBulk()},
        {"augmentation_multiplicity": 2},
    ],
    ids=str,
)
def test_one_record_each_is_record_level_training_to_the_bit(settings: dict[str, Any]) -> None:
    config = changed(CONFIG, **settings)
    of_users = config.build(RECORDS, record_owner=range(RECORDS))
    of_records = config.build(RECORDS)
    assert of_users.epsilon == of_records.epsilon and of_users.delta == of_records.delta
    assert torch.equal(weights_after(of_users), weights_after(of_records))


def test_so_it_is_with_bands_where_records_are_known_by_their_owners() -> None:
    config = changed(CONFIG, bands=2)
    of_users = config.build(RECORDS, record_owner=range(RECORDS))
    identities = of_users.sampler.users.identities  # type: ignore[union-attr]
    of_records = config.build(RECORDS, identities)
    assert torch.equal(weights_after(of_users), weights_after(of_records))


@pytest.mark.parametrize(
    "settings",
    [{}, {"estimator": "hutch"}, {"bands": 2}, {"denoising": SpikesWithBulk()}],
    ids=str,
)
def test_users_of_many_records_train(settings: dict[str, Any]) -> None:
    config = changed(CONFIG, **settings, users=Users(4, "sum", "fresh"))
    plan = config.build(RECORDS, record_owner=owners())
    assert plan.dataset_size == 15 and plan.neighbouring == "add-remove-user"
    assert weights_after(plan).isfinite().all()


def test_micro_batches_change_rounding_alone_and_cut_no_user() -> None:
    plan = changed(CONFIG, users=Users(6)).build(RECORDS, record_owner=owners())
    whole = weights_after(plan, physical_batch_size=500)
    for size in (1, 4, 7):
        again = changed(CONFIG, users=Users(6)).build(RECORDS, record_owner=owners())
        torch.testing.assert_close(
            weights_after(again, physical_batch_size=size), whole, rtol=1e-4, atol=1e-6
        )
    with plan.start() as run:
        for batch in run.loader(records(), physical_batch_size=4, steps=1):
            parts = list(batch)
            for part in parts:
                assert len(part.records[0]) == sum(part.sizes)
                assert len(part.sizes) == 1 or len(part.sizes) * max(part.sizes) <= 4
            assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
            break


def test_workers_read_the_same_users() -> None:
    def once(workers: int) -> Tensor:
        plan = changed(CONFIG, users=Users(3, choice="fresh")).build(RECORDS, record_owner=owners())
        return weights_after(plan, num_workers=workers)

    assert torch.equal(once(0), once(1))


def test_an_empty_batch_is_a_step_like_others() -> None:
    plan = changed(CONFIG, sample_rate=1e-9).build(RECORDS, record_owner=owners())
    assert weights_after(plan).isfinite().all()


def test_releases_are_the_clipped_sums_of_users_that_were_drawn() -> None:
    """The noise is the seed's, so it can be taken away again: with hardly any, what is released is
    the sum over the users drawn, each shortened to C.
    """
    config = changed(CONFIG, noise_multiplier=1e-6, users=Users(3, "sum"))
    plan = config.build(RECORDS, record_owner=owners())
    trained, data = model(), records()
    parameters = dict(trained.named_parameters())
    with plan.start() as run:
        for indices in run.batches(2):
            users = UserBatch(data[indices.records], indices.sizes)
            released = run.release(run.clip(trained, loss, users)).gradients
            expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
            whose = np.array(owners())
            start = 0
            for size in indices.sizes:
                own = indices.records[start : start + size]
                start += size
                assert len(set(whose[own])) == 1
                assert size == min(3, int((whose == whose[own[0]]).sum()))
                total = loss(trained, data[own]).sum()
                found = torch.autograd.grad(total, list(parameters.values()))
                norm = torch.stack([g.square().sum() for g in found]).sum().sqrt()
                for name, g in zip(parameters, found, strict=True):
                    expected[name] += g * min(1.0, 0.5 / float(norm))
            for name, g in expected.items():
                torch.testing.assert_close(released[name], g, rtol=5e-3, atol=1e-4)


def test_the_ledger_names_the_unit_and_what_stands_for_a_user(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"

    def build(**users: Any) -> PrivacyPlan:
        return changed(CONFIG, users=Users(**users)).build(RECORDS, record_owner=owners())

    with build(records_per_user=4).start(path) as run:
        for batch in run.loader(records(), steps=1):
            run.backward(model(), loss, batch)
    header = read_ledger(path).header
    assert header["neighbouring"] == "add-remove-user" and header["dataset_size"] == 15
    assert (header["records_per_user"], header["combined"], header["choice"]) == (
        4,
        "mean",
        "fixed",
    )
    whole = path.read_text()
    assert "user 3" not in whole and str(RECORDS) not in json.dumps(header)
    for changed_setting in ({"records_per_user": 5}, {"records_per_user": 4, "combined": "sum"}):
        with pytest.raises(ValueError, match="changed privacy setting"):
            build(**changed_setting).start(path)
    with pytest.raises(ValueError, match="changed privacy setting"):
        CONFIG.build(15).start(path)


def test_plain_records_are_not_clipped_in_a_run_for_users() -> None:
    plan = CONFIG.build(RECORDS, record_owner=owners())
    with plan.start() as run:
        for indices in run.batches(1):
            with pytest.raises(ValueError, match="nothing says which records"):
                run.clip(model(), loss, records()[indices.records])
            one_by_one = UserBatch(records()[indices.records], (1,) * len(indices.records))
            with pytest.raises(RuntimeError, match="as many records as the open batch"):
                run.release(run.clip(model(), loss, one_by_one))
            break


def test_a_public_batch_is_examined_record_by_record() -> None:
    plan = CONFIG.build(RECORDS, record_owner=owners())
    with plan.start() as run:
        run.check(model(), loss, records()[:8])

        def mixing(trained: nn.Module, batch: list[Tensor]) -> Tensor:
            found = loss(trained, batch)
            return found - found.mean()

        with pytest.raises(ValueError):
            run.check(model(), mixing, records()[:8])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"give record_owner= to PrivacyConfig.build"):
        changed(CONFIG, users=Users()).build(RECORDS)
    with pytest.raises(ValueError, match="another number of entries"):
        CONFIG.build(RECORDS, record_owner=["a", "b"])
    with pytest.raises(ValueError, match="another number of entries"):
        CONFIG.build(RECORDS, record_owner=[*owners(), *owners()])
    with pytest.raises(ValueError, match="leave record_ids out"):
        CONFIG.build(2, [b"a", b"b"], record_owner=["a", "b"])
    with pytest.raises(TypeError, match="users='all' is no record"):
        changed(CONFIG, users="all").build(2, record_owner=["a", "b"])
    with pytest.raises(ValueError, match="exceeds the number of users, 15"):
        changed(CONFIG, sample_rate=None, expected_batch_size=16).build(
            RECORDS, record_owner=owners()
        )
    for wrong in ({"records_per_user": 0}, {"combined": "median"}, {"choice": "first"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            Users(**wrong)  # type: ignore[arg-type]
    plan = CONFIG.build(RECORDS, record_owner=owners())
    with plan.start() as run, pytest.raises(ValueError, match="one owner each") as refused:
        run.loader(TensorDataset(torch.zeros(7, 5)))
    assert "120" not in str(refused.value)


def test_users_are_not_drawn_where_records_are_clipped() -> None:
    """Mutant: each record of a user who was drawn added the clipping norm."""
    plan = CONFIG.build(RECORDS, record_owner=owners())
    with pytest.raises(ValueError, match="users are drawn and records are clipped"):
        replace(plan, clipper=replace(plan.clipper, combined=None))


def test_delta_is_judged_by_the_number_of_users() -> None:
    with pytest.raises(ValueError, match="1/15"):
        changed(CONFIG, target_delta=0.07).build(RECORDS, record_owner=owners())


def test_what_holds_private_numbers_says_none_of_them() -> None:
    """Reprs end in logs and in tracebacks with locals: sizes, losses and norms are in none."""
    plan, seen = CONFIG.build(RECORDS, record_owner=owners()), []
    with plan.start() as run:
        indices = next(run.batches(1))
        batch = UserBatch(records()[indices.records], indices.sizes)
        examples = plan.clipper.bind(model(), loss).examples_of(batch)
        seen += [indices, batch, examples, examples.groups, run._open]
    seen.append(Observed(torch.tensor([0.125]), torch.tensor([0.75])))
    for held in seen:
        words = ("sizes", "examples=", "tensor(", "array(", "0.125")
        assert not any(word in repr(held) for word in words), type(held)
