"""What accountant="rdp" of an Opacus script says: Opacus' number for what ran, and never less than
the epsilon of privacy-loss distributions.
"""

from __future__ import annotations

import math
from typing import Any

import opacus.accountants.utils
import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis import rdp as analysis
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.accounting import epsilon
from quietgrad.accounting.renyi.epsilon import RENYI_ORDERS
from quietgrad.checks import SettingsWarning
from quietgrad.events import PoissonGaussian
from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.accountants import create_accountant
from quietgrad.integrations.opacus.accountants.analysis import rdp
from quietgrad.integrations.opacus.accountants.utils import get_noise_multiplier
from quietgrad.integrations.opacus.schedulers import ExponentialNoise

# Opacus warns where the best order is the first or the last one.
pytestmark = pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")

DELTA = 1e-4
RECORDS, RATE = 120, 1 / 8


def made(engine: Any, to_budget: bool = False, **options: Any) -> Any:
    torch.manual_seed(1)
    x = torch.randn(RECORDS, 5)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    make = engine.make_private_with_epsilon if to_budget else engine.make_private
    return make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=15),
        max_grad_norm=1.0,
        **options,
    )


def train(model: Any, optimizer: Any, loader: Any, releases: int = 1) -> None:
    for x, y in loader:
        for _ in range(releases):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.5])
def test_with_a_schedule_of_noise_it_is_the_number_of_opacus(sigma: float) -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine, noise_multiplier=sigma)
    scheduler = ExponentialNoise(optimizer, gamma=0.9)
    theirs = RDPAccountant()
    for epoch in range(3):
        train(model, optimizer, loader)
        scheduler.step()
        theirs.history.append((sigma * 0.9**epoch, RATE, 8))
        # After every epoch, as scripts print it.
        found, order = engine.accountant.get_privacy_spent(delta=DELTA)
        wanted, best = theirs.get_privacy_spent(delta=DELTA)
        assert found == engine.get_epsilon(DELTA) == pytest.approx(wanted, rel=1e-4)
        assert order == pytest.approx(best)
    assert found > 1.02 * engine_with(engine.accountant.history, "prv").get_epsilon(DELTA)


def engine_with(history: Any, mechanism: str) -> Any:
    counted = create_accountant(mechanism)
    counted.load_state_dict({"history": history})
    return counted


def test_two_steps_on_a_batch_have_the_moments_of_one_of_less_noise() -> None:
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = made(engine, noise_multiplier=1.0)
    train(model, optimizer, loader, releases=2)
    apart, together = RDPAccountant(), RDPAccountant()
    apart.history = [(1.0, RATE, 16)]  # what Opacus would say: coins of their own
    together.history = [(math.sqrt(0.5), RATE, 8)]
    found = engine.get_epsilon(DELTA)
    assert found == pytest.approx(together.get_epsilon(DELTA), rel=1e-6)
    assert found > 1.05 * apart.get_epsilon(DELTA)


def test_orders_may_be_given() -> None:
    engine = PrivacyEngine(accountant="rdp")
    train(*made(engine, noise_multiplier=1.0))
    theirs = RDPAccountant()
    theirs.history = [(1.0, RATE, 8)]
    few = [3, 4.5]
    found = engine.accountant.get_privacy_spent(delta=DELTA, alphas=few)
    assert found == pytest.approx(theirs.get_privacy_spent(delta=DELTA, alphas=few), rel=1e-6)
    with pytest.raises(ValueError, match="orders"):
        engine.accountant.get_epsilon(DELTA, alphas=[0.5])


@pytest.mark.parametrize("mechanism", ["rdp", "prv"])
@pytest.mark.parametrize(
    ("epsilon", "q", "epochs"), [(1.0, 1 / 8, 2), (4.0, 0.02, 5), (8.0, 0.5, 3)]
)
def test_noise_for_a_target_is_that_of_opacus(
    mechanism: str, epsilon: float, q: float, epochs: int
) -> None:
    settings = {
        "target_epsilon": epsilon,
        "target_delta": DELTA,
        "sample_rate": q,
        "epochs": epochs,
        "accountant": mechanism,
    }
    # Opacus stops as soon as it is within epsilon_tolerance below the target.
    theirs = opacus.accountants.utils.get_noise_multiplier(**settings, epsilon_tolerance=1e-3)
    ours = get_noise_multiplier(**settings)
    assert ours == pytest.approx(theirs, rel=0.01)
    steps = round(epochs / q)
    spent = engine_with([(ours, q, steps)], mechanism).get_epsilon(DELTA)
    assert 0.999 * epsilon <= spent <= epsilon


def test_the_default_of_get_noise_multiplier_is_that_of_opacus() -> None:
    settings = {"target_epsilon": 2.0, "target_delta": DELTA, "sample_rate": 0.05, "steps": 50}
    theirs = opacus.accountants.utils.get_noise_multiplier(**settings)
    assert get_noise_multiplier(**settings) == pytest.approx(theirs, rel=0.01)


def test_a_budget_is_met_by_the_number_that_is_told() -> None:
    engine = PrivacyEngine(accountant="rdp")
    budget = {"target_epsilon": 3.0, "target_delta": DELTA, "epochs": 2}
    model, optimizer, loader = made(engine, to_budget=True, **budget)
    for _ in range(2):
        train(model, optimizer, loader)
    assert 2.97 <= engine.get_epsilon(DELTA) <= 3.0
    tighter = made(PrivacyEngine(), to_budget=True, **budget)[1]
    assert optimizer.noise_multiplier > 1.05 * tighter.noise_multiplier


def test_the_name_goes_into_checkpoints_and_each_accountant_reads_the_other() -> None:
    counted = create_accountant("rdp")
    assert counted.get_privacy_spent(delta=DELTA)[0] == 0.0
    for _ in range(40):
        counted.step(noise_multiplier=1.1, sample_rate=0.1)
    assert counted.mechanism() == counted.state_dict()["mechanism"] == "rdp"
    other = engine_with(counted.state_dict()["history"], "prv")
    theirs = PRVAccountant()
    theirs.history = [(1.1, 0.1, 40)]
    assert other.get_epsilon(DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)
    assert math.isnan(other.get_privacy_spent(delta=DELTA)[1])


def test_what_was_released_after_a_checkpoint_is_counted_too() -> None:
    """In the process that made it: a run that was left behind was released all the same."""
    first, second, third = (create_accountant("prv") for _ in range(3))
    for _ in range(4):
        first.step(noise_multiplier=1.0, sample_rate=0.1)
    saved = first.state_dict()
    first.step(noise_multiplier=1.0, sample_rate=0.1)
    first.load_state_dict(saved)  # its own: nothing new, and nothing forgotten
    assert first.history == [(1.0, 0.1, 5)]
    with pytest.warns(SettingsWarning, match="after the checkpoint"):
        second.load_state_dict(saved)
    second.step(noise_multiplier=1.0, sample_rate=0.1)
    first.step(noise_multiplier=2.0, sample_rate=0.1)
    both = [(1.0, 0.1, 6), (2.0, 0.1, 1)]
    assert sorted(second.history) == both
    third.load_state_dict(second.state_dict())  # first's are among them, and count once
    with pytest.warns(SettingsWarning, match="after the checkpoint"):
        third.load_state_dict(saved)
    first.load_state_dict(second.state_dict())  # each has the other's
    assert sorted(first.history) == sorted(second.history) == sorted(third.history) == both


def test_a_checkpoint_of_another_process_is_added_as_it_says() -> None:
    counted = create_accountant("prv")
    counted.load_state_dict({"history": [(1.0, 0.1, 3)], "counted_by": "elsewhere"})
    with pytest.warns(SettingsWarning, match="added to its own"):
        counted.load_state_dict({"history": [(1.0, 0.1, 3)]})
    assert counted.history == [(1.0, 0.1, 6)]
    # A file that says more than its maker knows is believed.
    own = counted.state_dict() | {"history": [(1.0, 0.1, 9)]}
    counted.load_state_dict(own)
    assert counted.history == [(1.0, 0.1, 9)]


@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.01, 100), (0.7, 0.2, 30), (2.0, 1.0, 5)])
def test_divergences_by_hand_are_opacus_own(sigma: float, q: float, steps: int) -> None:
    asked = {"q": q, "noise_multiplier": sigma, "steps": steps}
    orders = list(RENYI_ORDERS)
    ours = rdp.compute_rdp(**asked, orders=orders)
    theirs = analysis.compute_rdp(**asked, orders=orders)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert rdp.compute_rdp(**asked, orders=8.0) == pytest.approx(
        analysis.compute_rdp(**asked, orders=8.0), rel=1e-6
    )
    found = rdp.get_privacy_spent(orders=orders, rdp=ours, delta=DELTA)
    told = analysis.get_privacy_spent(orders=orders, rdp=theirs, delta=DELTA)
    assert found == pytest.approx(told, rel=1e-6)
    assert found[0] >= epsilon(PoissonGaussian(sigma, q, steps), DELTA)


def test_divergences_by_hand_want_an_order_each() -> None:
    with pytest.raises(ValueError, match=r"orders has 2 numbers and rdp 1"):
        rdp.get_privacy_spent(orders=[2.0, 3.0], rdp=[0.1], delta=DELTA)
    with pytest.raises(ValueError, match="noise_multiplier"):
        rdp.compute_rdp(q=0.1, noise_multiplier=0.0, steps=1, orders=[2.0])


@pytest.mark.parametrize("orders", [[0.5], [1.0, 2.0], []])
def test_orders_without_a_divergence_are_refused_in_analysis(orders: list[float]) -> None:
    with pytest.raises(ValueError, match="orders"):
        rdp.compute_rdp(q=0.1, noise_multiplier=1.0, steps=3, orders=orders)
    with pytest.raises(ValueError, match="orders"):
        rdp.get_privacy_spent(orders=orders, rdp=[0.1] * len(orders), delta=DELTA)


def test_no_divergence_is_negative_and_no_epsilon() -> None:
    with pytest.raises(ValueError, match="rdp"):
        rdp.get_privacy_spent(orders=[2.0], rdp=[-0.1], delta=DELTA)
    assert rdp.get_privacy_spent(orders=[2.0], rdp=[0.0], delta=0.9)[0] == 0.0
