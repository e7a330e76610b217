"""What is amplified is what stood out before and is seen again: its size, its sign, the noise that
releases share, and what that is for.
"""

from __future__ import annotations

import io
import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.denoising import (
    ConstantAmplification,
    MomentNoise,
    MomentumRule,
    PersistentAmplification,
    SpectralAdamW,
    SpectralSGD,
    bulk_edge,
    shrink,
)
from quietgrad.noise import NoisySum

SHAPE = (120, 200)
B = 10.0
RULE = PersistentAmplification()
LARGEST = RULE.largest_gain


def unit(size: int, seed: int) -> Tensor:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm()


def spike(edges: float, seed: int = 0) -> Tensor:
    """Rank one, of so many edges of noise with unit entries."""
    return (
        edges * bulk_edge(SHAPE, 1.0) * torch.outer(unit(SHAPE[0], seed), unit(SHAPE[1], seed + 1))
    )


def noise_of(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def released(gradients: dict[str, Tensor], std: float) -> NoisySum:
    return NoisySum(gradients, std, expected_batch_size=B)


def part_of(
    moment: Tensor,
    release: Tensor,
    level: MomentNoise,
    mixing_row: Any = None,
    gain: float = LARGEST,
) -> tuple[Tensor, float]:
    """What is added and the new gain, for a moment whose noise has unit entries; the release is not
    divided by B yet.
    """
    noisy = NoisySum({"w": B * release}, B, mixing_row)
    added, gains = RULE.added({"w": moment}, level, noisy, B, {"w": [gain]})
    return added.get("w", torch.zeros(SHAPE)), gains.get("w", [gain])[0]


def share_of(part: Tensor, moment: Tensor) -> float:
    """Of the shrunk spike of the moment."""
    left, values, right = torch.linalg.svd(moment)
    return float(left[:, 0] @ part @ right[0]) / float(shrink(values[:1], SHAPE, 1.0)[0])


@pytest.mark.parametrize("mass", [1.0, 0.3])
@pytest.mark.parametrize("again", [1.6, 0.8, 0.5, 0.0, -0.5])
def test_as_much_of_a_spike_as_is_seen_again(again: float, mass: float) -> None:
    """A release with this multiple of the moment's signal adds that share of the shrunk spike,
    times gain - 1, and moves the gain by that power. Mean of 40 draws: u^T N v of fresh noise is
    normal, at mass 0.3 with 0.5 % of the spike as the standard deviation of the mean, which makes a
    share of 0 one of 0.01 to 0.02 and one of 1 that much less."""
    signal, shares, gains = spike(3.0), [], []
    level = MomentNoise(variance=1.0, releases=1, mass=mass)
    for seed in range(40):
        moment = signal + noise_of(2 * seed + 1)
        part, gain = part_of(
            moment, again / mass * signal + noise_of(2 * seed + 2), level, gain=4.0
        )
        shares.append(share_of(part, moment) / (gain - 1))
        gains.append(gain)
    power = (math.log(2) if again > 0 else math.log(4)) * min(again, 1.0)
    expected = 4 * math.exp(power) if again else 4.0
    assert np.mean(shares) == pytest.approx(min(max(again, 0.0), 1.0), abs=0.03)
    assert np.mean(gains) == pytest.approx(expected, rel=0.04 if again else 0.1)


def test_the_gain_stays_between_one_and_the_largest() -> None:
    signal, level = spike(3.0), MomentNoise(variance=1.0, releases=1, mass=1.0)
    moment = signal + noise_of(1)
    for release, gain, expected in (
        (signal, 0.9 * LARGEST, LARGEST),
        (-signal, 2.0, 1.0),
        (-5 * signal, 8.0, 2.0),
    ):
        assert part_of(moment, release, level, gain=gain)[1] == pytest.approx(expected, rel=1e-3)
    at_most = PersistentAmplification(largest_gain=3.0)
    release = NoisySum({"w": B * signal}, B)
    assert at_most.added({"w": moment}, level, release, B, {"w": [2.0]})[1]["w"] == [3.0]
    part, gain = part_of(
        noise_of(1), 5 * signal, level, gain=3.0
    )  # nothing stands out of the moment: nothing is known
    assert gain == 3.0 and not part.any()
    # Another spike than the moment's is not its confirmation.
    part, gain = part_of(moment, spike(5.0, seed=7), level, gain=3.0)
    assert gain == pytest.approx(3.0, rel=0.3) and share_of(part, moment) < 0.3


@pytest.mark.parametrize("correlation", [-0.9, 0.9])
def test_noise_that_releases_share_is_taken_off(correlation: float) -> None:
    """Half of the signal is seen again: half of the spike, although the release holds a share of
    the moment's noise. Without the correction it would be off by a tenth of the spike or more.
    """
    signal, shares, uncorrected = spike(1.5), [], []
    mixing_row = np.array([correlation, math.sqrt(1 - correlation**2)])
    level = MomentNoise().after(0.0, 1.0, 1.0, np.array([1.0]))
    for seed in range(40):
        first, second = noise_of(2 * seed + 1), noise_of(2 * seed + 2)
        moment, release = (
            signal + first,
            0.5 * signal + mixing_row[0] * first + mixing_row[1] * second,
        )
        for row, found in ((mixing_row, shares), (None, uncorrected)):
            part, gain = part_of(moment, release, level, row, gain=4.0)
            found.append(share_of(part, moment) / (gain - 1) if gain > 1 else 0.0)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert abs(np.mean(uncorrected) - 0.5) > 0.1


def test_matrices_have_gains_of_their_own() -> None:
    """Stacked layers, and experts in one tensor: what one sees is no reason for another."""
    signal = spike(3.0)
    level = MomentNoise(variance=1.0, releases=1, mass=1.0)
    moments = {"a": signal + noise_of(1), "b": signal + noise_of(2), "quiet": noise_of(3)}
    seen = {"a": B * signal, "b": -B * signal, "quiet": B * signal}
    gains = {"a": [2.0], "b": [4.0]}
    added, new = RULE.added(moments, level, NoisySum(seen, B), B, gains)
    assert new["a"] == pytest.approx([4.0], rel=0.05) and new["b"] == pytest.approx([1.0], rel=0.05)
    assert set(added) == {"a"} and new["quiet"] == [1.0]
    for name in ("a", "b"):
        alone = RULE.added({name: moments[name]}, level, NoisySum({name: seen[name]}, B), B, gains)
        assert alone[1][name] == pytest.approx(new[name], rel=1e-4)
    experts = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, *SHAPE))})
    together = {"w": torch.stack(list(moments.values()))}
    release = NoisySum({"w": torch.stack([seen[name] for name in moments])}, B)
    of_three, gain = RULE.added(together, level, release, B, {"w": [2.0, 4.0, 1.0]}, experts)
    assert gain["w"] == pytest.approx([new[name][0] for name in moments], rel=1e-4)
    torch.testing.assert_close(of_three["w"][0], added["a"], rtol=1e-3, atol=1e-4)
    assert not of_three["w"][1:].any()


def test_the_share_is_the_regression_on_the_average() -> None:
    rng = np.random.default_rng(0)
    mixing = np.linalg.inv(np.eye(5) + 0.6 * np.eye(5, k=-1))
    level = MomentNoise()
    for t in range(4):
        level = level.after(0.8, 0.2, float(np.linalg.norm(mixing[t])), mixing[t, : t + 1])
    draws = rng.standard_normal((5, 200_000))
    weights = 0.2 * 0.8 ** np.arange(3, -1, -1)
    average, release = weights @ (mixing[:4] @ draws), mixing[4] @ draws
    share = level.share_in(float(np.linalg.norm(mixing[4])), mixing[4])
    slope = float(average @ release) / float(average @ average)
    assert share == pytest.approx(
        slope, abs=5 * float(release.std() / average.std()) / np.sqrt(200_000)
    )
    assert abs(slope) > 0.1
    # A row says how draws are mixed, and the level how large they are: rows may have any length.
    louder = level.share_in(3 * float(np.linalg.norm(mixing[4])), 7 * mixing[4])
    assert louder == pytest.approx(3 * share)
    assert MomentNoise(variance=1.0).share_in(1.0, None) == 0.0


@pytest.mark.parametrize("swings", [False, True])
def test_layers_of_a_stack_get_their_own_part(swings: bool) -> None:
    """Other spikes in each of three layers; all seen again, or one of them turned round."""
    level = MomentNoise(variance=1.0, releases=1, mass=1.0)
    signals = {name: spike(3.0, seed=10 * i) for i, name in enumerate("abc")}
    moments = {name: signal + noise_of(i) for i, (name, signal) in enumerate(signals.items())}
    seen = {
        name: (-B if swings and name == "b" else B) * signal for name, signal in signals.items()
    }
    added, _ = RULE.added(moments, level, NoisySum(seen, B), B, {})
    assert set(added) == ({"a", "c"} if swings else {"a", "b", "c"})
    for name, part in added.items():
        alone, _ = RULE.added({name: moments[name]}, level, NoisySum({name: seen[name]}, B), B, {})
        torch.testing.assert_close(part, alone[name], rtol=1e-3, atol=1e-4)
        assert float((part * signals[name]).sum() / part.norm() / signals[name].norm()) > 0.9


@pytest.mark.parametrize(("decay", "gain"), [(0.9, 0.1), (0.8, 1.0)])
def test_mass_is_what_a_constant_gradient_leaves(decay: float, gain: float) -> None:
    level, average = MomentNoise(), 0.0
    for _ in range(6):
        level, average = level.after(decay, gain, 1.0), decay * average + gain
        assert level.mass == pytest.approx(average)


def network_and(kind: str, rule: MomentumRule, **settings: Any) -> tuple[nn.Linear, Any]:
    network = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    nn.init.zeros_(network.weight)
    if kind == "sgd":
        return network, SpectralSGD(network, rule, **({"lr": 0.1, "momentum": 0.8} | settings))
    return network, SpectralAdamW(network, rule, **({"lr": 0.1, "betas": (0.8, 0.95)} | settings))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_the_direction_is_the_moment_and_what_persists_of_the_one_before(kind: str) -> None:
    rule = PersistentAmplification(largest_gain=3.0)
    network, optimizer = network_and(kind, rule)
    gain = 1.0 if kind == "sgd" else 0.2
    moment, second, level = torch.zeros(SHAPE), torch.zeros(SHAPE), MomentNoise()
    gains: dict[str, list[float]] = {}
    for step in range(6):
        sign = -1 if step == 4 else 1
        noisy = released({"weight": B * (sign * spike(2.0) + noise_of(step))}, B)
        added, new = rule.added({"weight": moment}, level, noisy, B, gains)
        gains |= new
        gradient = noisy.gradients["weight"] / B
        moment = 0.8 * moment + gain * gradient
        second = 0.95 * second + 0.05 * gradient**2
        level = level.after(0.8, gain, 1.0)
        direction = moment + added.get("weight", 0)
        if kind == "adam":
            direction = (
                direction
                / (1 - 0.8 ** (step + 1))
                / ((second / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
            )
        before = network.weight.detach().clone()
        optimizer.step(noisy)
        torch.testing.assert_close(
            before - network.weight.detach(), 0.1 * direction, rtol=1e-4, atol=1e-5
        )
        assert ("weight" in added) == (step not in (0, 4))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_keep_their_digits_in_a_state(kind: str, dtype: torch.dtype) -> None:
    """Loading casts what is saved as tensors to the parameters' dtype: two layers in one stack,
    resumed, as without the stop.
    """

    def new() -> tuple[nn.Sequential, Any]:
        torch.manual_seed(0)
        network = nn.Sequential(
            *(nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype) for _ in range(2))
        )
        if kind == "sgd":
            return network, SpectralSGD(network, RULE, 0.1, 0.8)
        return network, SpectralAdamW(network, RULE, 0.1, (0.8, 0.95))

    (network, optimizer), (other, again) = new(), new()
    stream = [
        released(
            {
                f"{i}.weight": (B * ((0.5 + t % 2) * spike(2.0) + noise_of(2 * t + i))).to(dtype)
                for i in (0, 1)
            },
            B,
        )
        for t in range(6)
    ]
    for noisy in stream[:4]:
        optimizer.step(noisy)
    gain = optimizer.state[network[0].weight]["gain"]
    assert gain[0] > 1 and gain[0] != float(torch.tensor(gain[0]).bfloat16())
    file = io.BytesIO()
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert again.state[other[0].weight]["gain"] == gain
    for noisy in stream[4:]:
        optimizer.step(noisy)
        again.step(noisy)
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_weight_decay_of_sgd_is_a_part_of_what_is_seen() -> None:
    """A release of -X beside a decay term of +2X puts +X into the moment at every step: it stays,
    although the release alone seems turned round.
    """
    network, optimizer = network_and("sgd", RULE, lr=0.0, weight_decay=0.5)
    with torch.no_grad():
        network.weight.copy_(4 * spike(3.0))
    for step in range(5):
        optimizer.step(released({"weight": B * (-spike(3.0) + noise_of(step))}, B))
    assert optimizer.state[network.weight]["gain"] == [LARGEST]


def distance_after(steps: int, rule: MomentumRule | None, rate: float, edges: float = 3.0) -> float:
    """Of a quadratic in one direction, h/2 (u^T W v - 1)^2, whose slope is so many edges of the
    noise at the start; SGD with momentum 0.9, so that swinging begins at h rate 0.01 and divergence
    at h rate 3.8."""
    never = PersistentAmplification(kappa=1e6)
    network, optimizer = network_and("sgd", rule or never, lr=rate, momentum=0.9)
    u, v = unit(SHAPE[0], 0), unit(SHAPE[1], 1)
    scale = edges * bulk_edge(SHAPE, 1.0)
    for step in range(steps):
        slope = float(u @ network.weight.detach() @ v) - 1
        optimizer.step(
            released({"weight": B * (scale * slope * torch.outer(u, v) + noise_of(step))}, B)
        )
    return abs(float(u @ network.weight.detach() @ v) - 1)


def test_slow_directions_get_faster_and_swinging_ones_no_wilder() -> None:
    """What the rule is for, on one direction: at a small rate it gets there sooner; at a large one
    the rule that amplifies all that stands out diverges, and this one goes the plain way.
    """
    everything = ConstantAmplification(delay=0, gain=4.0)
    curvature = 3.0 * bulk_edge(SHAPE, 1.0)
    slow, fast = 1e-3 / curvature, 2.5 / curvature
    plain, ours = (distance_after(30, rule, slow) for rule in (None, RULE))
    assert plain > 0.7 and ours < 0.3
    plain, all_of_it, ours = (distance_after(40, rule, fast) for rule in (None, everything, RULE))
    assert plain < 1 and all_of_it > 100 and ours < 1


def test_only_releases_get_in() -> None:
    moments, level, noisy = (
        {"w": spike(3.0)},
        MomentNoise(1.0, None, 1, 1.0),
        NoisySum({"w": noise_of(0)}, 1.0),
    )
    loose = types.SimpleNamespace(
        gradients={"w": noise_of(0)}, noise_std=1.0, mixing_row=None, denoised=False
    )
    with pytest.raises(TypeError, match="noisy must be a NoisySum, not SimpleNamespace"):
        RULE.added(moments, level, loose, B, {})  # type: ignore[arg-type]
    for release, divisor, message in (
        (NoisySum({"w": noise_of(0)}, 1.0, denoised=True), B, "was denoised before"),
        (noisy, math.nan, "expected_batch_size=nan"),
        (NoisySum({"v": noise_of(0)}, 1.0), B, "has nothing for 'w'"),
        (NoisySum({"w": noise_of(0).T}, 1.0), B, r"has \(200, 120\) for 'w'"),
    ):
        with pytest.raises(ValueError, match=message):
            RULE.added(moments, level, release, divisor, {})
    row = MomentNoise().after(0.9, 0.1, 1.0, [0.5, 1.0])
    with pytest.raises(ValueError, match="mixing_row has 1 entries after one of 2"):
        row.share_in(1.0, [1.0])


def test_a_release_that_overflowed_changes_no_gain() -> None:
    level = MomentNoise(variance=1.0, releases=1, mass=1.0)
    part, gain = part_of(spike(3.0) + noise_of(1), 1e38 * noise_of(2), level, gain=3.0)
    assert gain == 3.0 and bool(torch.isfinite(part).all())
