"""Optimisers on a denoised first moment: torch's own where nothing is denoised, the right noise
level, resumes, refusals.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.denoising import (
    ConstantAmplification,
    MomentNoise,
    MomentStep,
    MomentumRule,
    OnMomentum,
    PersistentAmplification,
    PublishedShrinkage,
    SpectralAdamW,
    SpectralSGD,
    SpikesWithBulk,
    bulk_edge,
)
from quietgrad.noise import NoisySum

MOMENTUM = PersistentAmplification()
EVERYTHING = ConstantAmplification(delay=0)
MIXED = OnMomentum(SpikesWithBulk())
B = 10.0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(90, 60), nn.Linear(60, 4))


def released(gradients: dict[str, Tensor], std: float, row: np.ndarray | None = None) -> NoisySum:
    return NoisySum(gradients, std, row, expected_batch_size=B)


def releases(network: nn.Module, steps: int, seed: int = 1, scale: float = 1.0) -> list[NoisySum]:
    generator = torch.Generator().manual_seed(seed)
    return [
        released(
            {
                n: scale * torch.randn(p.shape, generator=generator)
                for n, p in network.named_parameters()
            },
            scale,
        )
        for _ in range(steps)
    ]


def ours(network: nn.Module, kind: str, rule: MomentumRule = MOMENTUM) -> Any:
    if kind == "sgd":
        return SpectralSGD(network, rule, lr=0.1, momentum=0.8)
    decay = 0.05 if kind == "adamw" else 0.0
    return SpectralAdamW(network, rule, lr=0.01, betas=(0.8, 0.95), weight_decay=decay)


def torchs(network: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.8)
    if kind == "adamw":
        return torch.optim.AdamW(
            network.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.05
        )
    return torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.8, 0.95))


def parameters_after(network: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_torchs_update_where_nothing_stands_out(kind: str) -> None:
    never = PersistentAmplification(kappa=1e6)
    one, other = model(), model()
    mine, reference = ours(one, kind, never), torchs(other, kind)
    for noisy in releases(one, 12):
        mine.step(noisy)
        noisy.write_gradients(other)
        reference.step()
    torch.testing.assert_close(parameters_after(one), parameters_after(other), rtol=1e-5, atol=1e-7)


@pytest.mark.grid(4, "rules that share the delay")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (ConstantAmplification(delay=3), 3),
        (EVERYTHING, 0),
        (ConstantAmplification(), 8),
        (MOMENTUM, 1),
        (PersistentAmplification(delay=3), 3),
        (MIXED, 0),
        (OnMomentum(PublishedShrinkage(), delay=3), 3),
    ],
)
def test_the_rule_begins_after_the_delay(kind: str, rule: MomentumRule, expected: int) -> None:
    """Also across a resume, and for a layer that begins later: its own moment has to settle. What
    persists takes two releases to be seen.
    """
    never = PersistentAmplification(kappa=1e6)
    one, other = model(), model()
    mine, plain = ours(one, kind, rule), ours(other, kind, never)
    begun, thawed = {}, 2  # the second layer is frozen for two steps
    for step, noisy in enumerate(releases(one, 14)):
        for network in (one, other):
            network[1].requires_grad_(step >= thawed)
            network.load_state_dict(model().state_dict())  # what differs is this step's
        noisy.gradients["0.weight"] += 3.0
        noisy.gradients["1.weight"] += 3.0
        if step == 2:
            again = ours(one, kind, rule)
            again.load_state_dict(mine.state_dict())
            mine = again
        mine.step(noisy)
        plain.step(noisy)
        for i in range(2):
            if not torch.equal(one[i].weight, other[i].weight):
                begun.setdefault(i, step)
    assert begun == {0: expected, 1: expected + thawed}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("rule", [EVERYTHING, MIXED])
def test_the_direction_is_the_denoised_moment_and_the_moment_is_not(kind: str, rule: Any) -> None:
    one, other = model(), model()
    mine, reference = ours(one, kind, rule), torchs(other, kind)
    spike = torch.outer(torch.ones(60), torch.ones(90)) * 0.6
    for noisy in releases(one, 6):
        noisy.gradients["0.weight"] += spike
        before = one[0].weight.detach().clone()
        mine.step(noisy)
        noisy.write_gradients(other)
        reference.step()
    # The undenoised moment is torch's.
    name = "momentum_buffer" if kind == "sgd" else "exp_avg"
    moment = mine.state[one[0].weight]["exp_avg"]
    torch.testing.assert_close(moment, reference.state[other[0].weight][name], rtol=1e-5, atol=1e-7)
    # The last step went along what the rule makes of it, at the moment's own noise level.
    if rule is EVERYTHING:
        direction = rule.amplified({"w": moment}, _std_of(mine))["w"]
    else:
        direction = rule.rule.denoise(NoisySum({"w": moment}, _std_of(mine))).gradients["w"]
    assert not torch.equal(direction, moment)
    moved = before - one[0].weight.detach()
    expected = 0.1 * direction
    if kind == "adam":
        second = mine.state[one[0].weight]["exp_avg_sq"] / (1 - 0.95**6)
        expected = 0.01 / (1 - 0.8**6) * direction / (second.sqrt() + 1e-8)
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


def _std_of(optimizer: torch.optim.Optimizer) -> float:
    (saved,) = optimizer.param_groups[0]["moment_noise"]
    return MomentNoise(
        saved["variance"], None if saved["row"] is None else np.array(saved["row"])
    ).std


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_noise_level_of_the_moment_is_the_empirical_one(kind: str) -> None:
    """Releases of pure noise: 54 000 entries, so the empirical level is within 1 % (3.3 standard
    errors) of the one used.
    """
    network = nn.Linear(300, 180, bias=False)
    optimizer = ours(network, kind)
    for noisy in releases(network, 7, scale=3.0):
        optimizer.step(noisy)
    found = float(optimizer.state[network.weight]["exp_avg"].std())
    assert found == pytest.approx(_std_of(optimizer), rel=0.01)
    # The wrong answer is far away: one release's own level.
    gain = 1.0 if kind == "sgd" else 0.2
    assert abs(found / (gain * 3.0 / B) - 1) > 0.1


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_correlated_noise_has_its_own_level(kind: str) -> None:
    """Noise of a banded mechanism, C^-1 z with C of two bands: used and empirical level within 1 %,
    that of independent noise is refused by it.
    """
    steps = 7
    mixing = np.linalg.inv(np.eye(steps) + 0.7 * np.eye(steps, k=-1))
    network = nn.Linear(300, 180, bias=False)
    optimizer = ours(network, kind)
    draws = np.random.default_rng(0).standard_normal((steps, 180 * 300))
    sigma = 2.0
    for t in range(steps):
        noise = torch.from_numpy(sigma * mixing[t] @ draws).float().reshape(180, 300)
        row = mixing[t, : t + 1]
        noisy = released({"weight": noise}, sigma * float(np.linalg.norm(row)), row)
        assert float(noise.std()) == pytest.approx(noisy.noise_std, rel=0.01)
        optimizer.step(noisy)
    found = float(optimizer.state[network.weight]["exp_avg"].std())
    assert found == pytest.approx(_std_of(optimizer), rel=0.01)
    gain, decay = (1.0, 0.8) if kind == "sgd" else (0.2, 0.8)
    independent = gain * sigma / B * math.sqrt(sum(decay ** (2 * i) for i in range(steps)))
    assert abs(found / independent - 1) > 0.1


def test_more_stands_out_of_the_moment_than_of_a_release() -> None:
    """A spike below one release's threshold of detection comes out of the average."""
    noise = MomentNoise()
    for _ in range(50):
        noise = noise.after(0.9, 0.1, 1.0)
    assert noise.std == pytest.approx(math.sqrt(0.1 / 1.9), rel=1e-3)
    assert bulk_edge((60, 90), noise.std) < 0.25 * bulk_edge((60, 90), 1.0)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("rule", [MOMENTUM, EVERYTHING, MIXED])
def test_resumed_from_state_dict(kind: str, correlated: bool, rule: MomentumRule) -> None:
    network = model()
    stream = releases(network, 8, scale=0.5)
    for noisy in stream:
        noisy.gradients["0.weight"] += 1.0
    if correlated:
        stream = [released(n.gradients, n.noise_std, np.ones(t + 1)) for t, n in enumerate(stream)]
    optimizer = ours(network, kind, rule)
    for noisy in stream[:4]:
        optimizer.step(noisy)
    saved = {"model": {k: v.clone() for k, v in network.state_dict().items()}}
    state = torch.load(_through_a_file(optimizer.state_dict()), weights_only=True)
    for noisy in stream[4:]:
        optimizer.step(noisy)
    again = model()
    again.load_state_dict(saved["model"])
    resumed = ours(again, kind, rule)
    resumed.load_state_dict(state)
    for noisy in stream[4:]:
        resumed.step(noisy)
    assert torch.equal(parameters_after(network), parameters_after(again))
    assert (
        rule is not MOMENTUM or optimizer.state[network[0].weight]["gain"][0] > 1
    )  # there was something to keep


def _through_a_file(state: object) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_schedules_and_groups() -> None:
    network = model()
    groups = [
        {"params": list(network[0].parameters())},
        {"params": list(network[1].parameters()), "lr": 0.0},
    ]
    optimizer = SpectralAdamW(network, MOMENTUM, lr=0.1, groups=groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    before = [p.detach().clone() for p in network.parameters()]
    (noisy,) = releases(network, 1)
    optimizer.step(noisy)
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [pytest.approx(0.01), 0.0]
    moved = [not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
    assert moved == [True, True, False, False]


def test_frozen_parameters_need_no_gradient() -> None:
    network = model()
    network[0].requires_grad_(False)
    optimizer = ours(network, "adam")
    optimizer.step(
        released(
            {n: torch.ones_like(p) for n, p in network.named_parameters() if p.requires_grad}, 1.0
        )
    )
    network[1].bias.requires_grad_(False)
    optimizer.step(released({"1.weight": torch.ones(4, 60)}, 1.0))


def test_refusals() -> None:
    network = model()
    optimizer = ours(network, "adam")
    with pytest.raises(TypeError, match=r"step\(noisy\)"):
        optimizer.step()
    noisy = releases(network, 1)[0]
    with pytest.raises(ValueError, match="denoised before"):
        optimizer.step(PublishedShrinkage().denoise(noisy))
    with pytest.raises(ValueError, match=r"no gradient of '0\.weight'"):
        optimizer.step(released({"1.weight": torch.ones(4, 60)}, 1.0))
    turned = released({n: g.mT if g.dim() == 2 else g for n, g in noisy.gradients.items()}, 1.0)
    with pytest.raises(
        ValueError, match=r"has \(90, 60\) for '0\.weight', and the parameter is \(60, 90\)"
    ):
        optimizer.step(turned)
    with pytest.raises(TypeError, match=r"acts on a release: .* or pass OnMomentum"):
        SpectralAdamW(network, PublishedShrinkage())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is no rule; pass one, such as PersistentAmplification"):
        SpectralAdamW(network, PersistentAmplification)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"momentum=1\.0"):
        SpectralSGD(network, MOMENTUM, lr=0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"lr=-0\.1"):
        SpectralSGD(network, MOMENTUM, lr=-0.1)
    for groups, message in (
        ([{"params": list(network.parameters()), "lr": -1.0}], r"lr=-1\.0"),
        ([{"params": list(network.parameters()), "betas": (1.5, 0.9)}], r"betas\[0\]=1\.5"),
        ([{"params": list(network.parameters()), "weight_decay": math.nan}], "weight_decay=nan"),
        ([{"params": list(model().parameters())}], "not model's"),
    ):
        with pytest.raises(ValueError, match=message):
            SpectralAdamW(network, MOMENTUM, groups=groups)
    with pytest.raises(TypeError, match="model must be the module"):
        SpectralAdamW(network.parameters(), MOMENTUM)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rule=None is no rule"):
        SpectralAdamW(network, None)  # type: ignore[arg-type]


def test_a_refused_step_changes_nothing() -> None:
    network = model()
    optimizer = ours(network, "adam")
    first, second = releases(network, 2)
    optimizer.step(first)
    before, saved = parameters_after(network), repr(optimizer.state_dict())
    with pytest.raises(ValueError, match="stepped on before"):
        optimizer.step(first)
    with pytest.raises(ValueError, match="after releases with independent noise"):
        optimizer.step(released(second.gradients, 1.0, np.ones(2)))
    assert torch.equal(before, parameters_after(network)) and saved == repr(optimizer.state_dict())
    optimizer.step(second)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weight_decay_of_sgd_is_torchs(decay: float) -> None:
    one, other = model(), model()
    mine = SpectralSGD(one, PersistentAmplification(kappa=1e6), 0.1, 0.8, weight_decay=decay)
    reference = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.8, weight_decay=decay)
    for noisy in releases(one, 6):
        mine.step(noisy)
        noisy.write_gradients(other)
        reference.step()
    torch.testing.assert_close(parameters_after(one), parameters_after(other), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("frozen", ["early", "late"])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_frozen_layer_keeps_a_noise_level_of_its_own(
    kind: str, frozen: str, correlated: bool
) -> None:
    """Used and empirical level of both layers within 1 % (54 000 entries each) after one sat out
    some steps, saved and loaded in between.
    """
    steps, shape = 9, (180, 300)
    network = nn.Sequential(nn.Linear(300, 180, bias=False), nn.Linear(300, 180, bias=False))
    never, group = PersistentAmplification(kappa=1e6), {"params": list(network.parameters())}
    new = (
        (lambda: SpectralSGD(network, never, 0.1, 0.8, groups=[group]))
        if kind == "sgd"
        else (lambda: SpectralAdamW(network, never, 0.01, (0.8, 0.95), groups=[group]))
    )
    optimizer = new()
    mixing = (
        np.linalg.inv(np.eye(steps) + 0.9 * np.eye(steps, k=-1)) if correlated else np.eye(steps)
    )
    draws = np.random.default_rng(0).standard_normal((2, steps, shape[0] * shape[1]))
    out = range(0, 5) if frozen == "early" else range(4, 8)
    for t in range(steps):
        network[0].requires_grad_(t not in out)
        noise = {
            f"{i}.weight": torch.from_numpy(mixing[t] @ draws[i]).float().reshape(shape)
            for i in (0, 1)
        }
        noise = {
            name: value for name, value in noise.items() if not (name == "0.weight" and t in out)
        }
        row = mixing[t, : t + 1]
        optimizer.step(released(noise, float(np.linalg.norm(row)), row if correlated else None))
        if t in (2, 5):
            state = torch.load(_through_a_file(optimizer.state_dict()), weights_only=True)
            optimizer = new()
            optimizer.load_state_dict(state)
    levels = optimizer.param_groups[0]["moment_noise"]
    used = []
    for layer in network:
        saved = levels[optimizer.state[layer.weight]["history"]]
        used.append(
            MomentNoise(
                saved["variance"], None if saved["row"] is None else np.array(saved["row"])
            ).std
        )
        assert float(optimizer.state[layer.weight]["exp_avg"].std()) == pytest.approx(
            used[-1], rel=0.01
        )
    assert abs(used[0] / used[1] - 1) > 0.02 and len(levels) == 2


def test_a_deep_copy_goes_on_alike() -> None:
    network = model()
    optimizer = ours(network, "adam")
    first, second = releases(network, 2)
    optimizer.step(first)
    copied = copy.deepcopy(optimizer)
    for one in (optimizer, copied):
        one.step(second)
    own = [p for group in copied.param_groups for p in group["params"]]
    assert all(
        torch.equal(p, q) and p is not q for p, q in zip(own, network.parameters(), strict=True)
    )


def test_a_rate_in_a_tensor_and_one_of_zero() -> None:
    one, other = model(), model()
    for network, rate in ((one, torch.tensor(0.25)), (other, 0.25)):
        optimizer = SpectralAdamW(network, MOMENTUM, lr=rate)  # type: ignore[arg-type]
        optimizer.step(releases(network, 1)[0])
    assert torch.equal(parameters_after(one), parameters_after(other))
    SpectralSGD(one, MOMENTUM, lr=0.0).step(releases(one, 1)[0])
    assert torch.equal(parameters_after(one), parameters_after(other))


def test_the_state_of_another_optimiser_is_refused() -> None:
    network = model()
    theirs = torchs(network, "adam")
    first, second = releases(network, 2)
    first.write_gradients(network)
    theirs.step()
    optimizer = ours(network, "adam")
    optimizer.load_state_dict(theirs.state_dict())
    for frozen in (False, True):  # what is frozen keeps its level, so it needs one
        network[0].requires_grad_(not frozen)
        before = parameters_after(network)
        with pytest.raises(ValueError, match="without its noise level"):
            optimizer.step(second)
        assert torch.equal(before, parameters_after(network))


def test_a_rule_of_ones_own_steps_like_any_other() -> None:
    """One method is all there is to a rule; what it returns is the direction, and what it remembers
    comes back.
    """

    class Halved:
        def __init__(self) -> None:
            self.told: list[dict[str, list[float]]] = []

        def directions(self, step: MomentStep, model: nn.Module | None = None) -> Any:
            self.told.append({name: list(gain) for name, gain in step.gains.items()})
            return {"0.weight": 0.5 * step.after["0.weight"]}, {"0.weight": [float(len(self.told))]}

    one, other, rule = model(), model(), Halved()
    mine, plain = ours(one, "sgd", rule), torchs(other, "sgd")
    start = model()
    for noisy in releases(one, 2):
        mine.step(noisy)
        noisy.write_gradients(other)
        plain.step()
    moved = [network[0].weight.detach() - start[0].weight.detach() for network in (one, other)]
    torch.testing.assert_close(moved[0], 0.5 * moved[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one[1].weight, other[1].weight)
    assert rule.told == [{}, {"0.weight": [1.0]}]


def test_one_mechanism_a_run() -> None:
    independent = MomentNoise().after(0.9, 0.1, 1.0)
    with pytest.raises(ValueError, match="independent noise"):
        independent.after(0.9, 0.1, 1.0, [1.0])
    correlated = MomentNoise().after(0.9, 0.1, 1.0, [1.0])
    with pytest.raises(ValueError, match="correlated noise"):
        correlated.after(0.9, 0.1, 1.0)
    with pytest.raises(ValueError, match="rows grow"):
        correlated.after(0.9, 0.1, 1.0, [])
