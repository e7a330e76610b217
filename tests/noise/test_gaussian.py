"""The noise of a plan's run: its size in every parameter, once, whatever the micro-batches;
independent, normal, keyed.

Noise is measured as released sum minus clipped sum. n entries of one parameter, pooled over
releases, have a sum of squares over (sigma C)^2 that is chi-square with n degrees of freedom. Every
test rejects at FALSE_ALARM in total, shared out evenly over what it compares, so a right
implementation fails one of the statistical tests below with probability under 2e-7 altogether;
seeds are fixed, so in fact it fails always or never.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import ClippedSum, Performance
from quietgrad.noise import GaussianNoise, NoiseHistory, NoisySum, shards
from quietgrad.noise.sources import keyed
from quietgrad.noise.sources.of_stretches import OfStretches
from quietgrad.noise.sources.stretch import Columns, Stretch
from quietgrad.plan import PrivateRun
from quietgrad.randomness import RandomKey
from quietgrad.sampling import PoissonSampler
from quietgrad.tensors import Block

FALSE_ALARM = 1e-8
SIGMA, CLIP = 1.7, 0.3
RELEASES = 12  # the smallest parameter has 30 entries: 360 squares a parameter at least
MICRO_BATCHES = [1, 3, None]


def build_full() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 30),
        nn.Tanh(),
        nn.LayerNorm(30),
        nn.Linear(30, 30),
        nn.Tanh(),
        nn.Linear(30, 30),
    )


def build_partly_frozen() -> nn.Module:
    model = build_full()
    model[0].requires_grad_(False)
    model[3].weight.requires_grad_(False)
    return model


def build_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(build_full(), peft.LoraConfig(r=4, target_modules=["0", "3"]))


MODELS = [build_full, build_partly_frozen, build_lora]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def start(
    physical_batch_size: int | None = None, seed: int | None = 5, steps: int = RELEASES
) -> PrivateRun:
    config = PrivacyConfig(
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=10,
        steps=steps,
        performance=Performance(physical_batch_size),
        seed=seed,
        data_are_public=True,
    )
    return config.build(100).start()


def batch_of(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 20, generator=generator)
    return {"x": x, "y": torch.randint(0, 30, (size,), generator=generator)}


def noise_of(build: Callable[[], nn.Module], run: PrivateRun) -> dict[str, np.ndarray]:
    """Trainable parameter -> [releases, entries] of released minus clipped sums."""
    torch.manual_seed(0)
    model = build()
    parts: dict[str, list[np.ndarray]] = {
        name: [] for name, p in model.named_parameters() if p.requires_grad
    }
    for indices in run.batches():
        clipped = run.clip(model, loss, batch_of(len(indices)))
        noisy = run.release(clipped)
        assert noisy.gradients.keys() == parts.keys()  # frozen parameters get none
        for name, g in noisy.gradients.items():
            parts[name].append((g.double() - clipped.gradients[name].double()).flatten().numpy())
    return {name: np.stack(rows) for name, rows in parts.items()}


def wrong_sizes(noise: dict[str, np.ndarray], std: float = SIGMA * CLIP) -> set[str]:
    """Parameters whose noise does not have standard deviation ``std`` (chi-square, two-sided)."""
    tail = FALSE_ALARM / (2 * len(noise))
    found = set()
    for name, values in noise.items():
        statistic = float(np.sum((values / std) ** 2))
        if not stats.chi2.ppf(tail, values.size) < statistic < stats.chi2.isf(tail, values.size):
            found.add(name)
    return found


def correlated(one: np.ndarray, other: np.ndarray, comparisons: int) -> bool:
    """Whether two noises correlate: for independent normal ones, sum(a b) / (|a| |b|) sqrt(n) is
    nearly standard normal.
    """
    cosine = float(one.ravel() @ other.ravel() / (np.linalg.norm(one) * np.linalg.norm(other)))
    return abs(cosine) * np.sqrt(one.size) > stats.norm.isf(FALSE_ALARM / (2 * comparisons))


@pytest.mark.grid(4, "models of which the noise knows names and shapes alone")
@pytest.mark.statistical
@pytest.mark.parametrize("physical_batch_size", MICRO_BATCHES)
@pytest.mark.parametrize("build", MODELS)
def test_every_trainable_parameter_gets_sigma_c_once(build, physical_batch_size) -> None:
    assert wrong_sizes(noise_of(build, start(physical_batch_size))) == set()


@pytest.mark.statistical
def test_micro_batches_added_by_hand_get_the_noise_once() -> None:
    run, model = start(), build_full()
    pooled: dict[str, list[np.ndarray]] = {name: [] for name, _ in model.named_parameters()}
    for indices in run.batches():
        sizes = map(len, np.array_split(indices, 3))
        total = sum_of([run.clip(model, loss, batch_of(size)) for size in sizes])
        for name, g in run.release(total).gradients.items():
            pooled[name].append((g - total.gradients[name]).flatten().numpy())
    assert wrong_sizes({name: np.stack(rows) for name, rows in pooled.items()}) == set()


def sum_of(parts: list[ClippedSum]) -> ClippedSum:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


Updated = tuple[NoisySum, NoiseHistory]
Keys = Callable[[int], RandomKey]


def noise_scaled_by(factor: float) -> Callable[..., Updated]:
    def update(
        self: GaussianNoise, clipped: ClippedSum, keys: Keys, history: NoiseHistory, *_: Any
    ) -> Updated:
        scaled = replace(self, noise_multiplier=self.noise_multiplier * factor)
        return UPDATE(scaled, clipped, keys, history)

    return update


def noise_added_twice(
    self: GaussianNoise, clipped: ClippedSum, keys: Keys, history: NoiseHistory, *_: Any
) -> Updated:
    once, later = UPDATE(self, clipped, keys, history)
    again = ClippedSum(once.gradients, clipped.claim)
    return UPDATE(self, again, keys, self.init(history.step + 10_000))[0], later


def noise_without_c(
    self: GaussianNoise, clipped: ClippedSum, keys: Keys, history: NoiseHistory, *_: Any
) -> Updated:
    sigma = self.noise_multiplier / clipped.claim.max_grad_norm
    return UPDATE(replace(self, noise_multiplier=sigma), clipped, keys, history)


def noise_missing_on_one(
    self: GaussianNoise, clipped: ClippedSum, keys: Keys, history: NoiseHistory, *_: Any
) -> Updated:
    noisy, later = UPDATE(self, clipped, keys, history)
    bare = {"2.bias": clipped.gradients["2.bias"]}
    return NoisySum(noisy.gradients | bare, SIGMA * CLIP), later


UPDATE = GaussianNoise.update
EVERY_PARAMETER = {name for name, _ in build_full().named_parameters()}


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("wrong", "caught"),
    [
        (noise_scaled_by(2 / 3), EVERY_PARAMETER),
        (noise_scaled_by(1.5), EVERY_PARAMETER),
        (noise_added_twice, EVERY_PARAMETER),
        (noise_without_c, EVERY_PARAMETER),
        (noise_missing_on_one, {"2.bias"}),
    ],
    ids=["two-thirds", "one-and-a-half", "twice", "without-c", "missing-on-one"],
)
def test_wrong_sizes_are_rejected(wrong, caught, monkeypatch) -> None:
    monkeypatch.setattr(GaussianNoise, "update", wrong)
    assert wrong_sizes(noise_of(build_full, start())) == caught


@pytest.mark.statistical
def test_noise_of_different_releases_and_parameters_is_uncorrelated(monkeypatch) -> None:
    def any_correlation() -> bool:
        noise = noise_of(build_full, start())
        pairs = [
            (values[i], values[j])
            for values in noise.values()
            for i in range(RELEASES)
            for j in range(i)
        ]
        names = list(noise)
        for i, name in enumerate(names):
            pairs += [
                (noise[name], noise[n]) for n in names[:i] if noise[n].shape == noise[name].shape
            ]
        return any(correlated(one, other, len(pairs)) for one, other in pairs)

    assert not any_correlation()
    right = keyed.stretch
    monkeypatch.setattr(
        keyed, "stretch", lambda like, key, step, name, at: right(like, key, 0, name, at)
    )
    assert any_correlation()  # the same noise at every release
    monkeypatch.setattr(
        keyed, "stretch", lambda like, key, step, name, at: right(like, key, step, "", at)
    )
    assert any_correlation()  # the same noise in parameters of one shape


@pytest.mark.statistical
def test_noise_is_normal() -> None:
    # Kolmogorov-Smirnov; noise of the right variance but another shape fails it by far.
    values = np.concatenate([v.ravel() for v in noise_of(build_full, start()).values()]) / (
        SIGMA * CLIP
    )
    assert stats.kstest(values, "norm").pvalue > FALSE_ALARM
    generator = np.random.default_rng(0)
    uniform = generator.uniform(-np.sqrt(3), np.sqrt(3), values.size)
    laplace = generator.laplace(0, np.sqrt(0.5), values.size)
    for other in (uniform, laplace):
        assert stats.kstest(other, "norm").pvalue < FALSE_ALARM


def test_float64_noise_is_drawn_in_float64() -> None:
    # Float32 draws in a float64 sum would leave 29 low bits of the private sum without noise.
    key = RandomKey.from_seed(1)
    drawn = keyed.normal(torch.zeros(1000, dtype=torch.float64), key, 0, "w")
    assert drawn.dtype == torch.float64
    assert not torch.equal(drawn, drawn.float().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 5])
def test_as_many_threads_as_there_are_draw_the_same(dtype, start, monkeypatch) -> None:
    """Also of a stretch that begins and ends within a block."""
    monkeypatch.setattr(keyed, "BLOCK", 64)
    key, place = RandomKey.from_seed(3), Stretch(start, 1000)
    like = torch.zeros(900, dtype=dtype)
    drawn, threads = [], set()
    write = keyed._write

    def noted(*given: Any) -> None:
        threads.add(threading.get_ident())
        write(*given)

    monkeypatch.setattr(keyed, "_write", noted)
    for count, inferring in ((1, False), (4, False), (4, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        with torch.inference_mode(inferring):
            drawn.append(keyed.stretch(like, key, 2, "w", place))
    assert all(torch.equal(drawn[0], other) for other in drawn[1:])
    assert drawn[0].dtype == dtype
    assert threading.get_ident() in threads and len(threads) > 1
    whole = keyed.normal(torch.zeros(1000, dtype=dtype), key, 2, "w")
    assert torch.equal(whole[start : start + 900], drawn[1])
    assert len(whole.unique()) > (990 if dtype == torch.float32 else 300)


def test_what_fails_in_a_thread_is_an_error(monkeypatch) -> None:
    """No entry is left as memory was found."""
    monkeypatch.setattr(keyed, "BLOCK", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    write = keyed._write

    def failing(part: torch.Tensor, before: int, *given: Any) -> None:
        if given[-1].endswith("block 2"):
            raise MemoryError("no memory")
        write(part, before, *given)

    monkeypatch.setattr(keyed, "_write", failing)
    with pytest.raises(MemoryError, match="no memory"):
        keyed.normal(torch.zeros(300), RandomKey.from_seed(0), 1, "w")


def test_same_key_and_step_give_the_same_noise_and_nothing_else_does() -> None:
    zero = torch.zeros(50)
    key = RandomKey.from_seed(1)
    first = keyed.normal(zero, key, 3, "w")
    torch.manual_seed(9)
    np.random.seed(9)
    assert torch.equal(first, keyed.normal(zero + 1, RandomKey.from_seed(1), 3, "w"))
    for other in ((RandomKey.from_seed(2), 3, "w"), (key, 4, "w"), (key, 3, "v")):
        assert not torch.equal(first, keyed.normal(zero, *other))


@pytest.mark.entropy
def test_keys_from_entropy_differ() -> None:
    keys = [RandomKey.from_entropy() for _ in range(20)]
    assert len({key.root for key in keys}) == 20
    assert not any(key.reproducible for key in keys)
    assert not torch.equal(*(keyed.normal(torch.zeros(10), key, 0, "w") for key in keys[:2]))
    assert "root" not in repr(keys[0])


@pytest.mark.entropy
def test_keys_are_the_operating_systems() -> None:
    """No generator that two processes can set alike decides a key."""
    seeded = (
        "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0)"
    )
    drawn = "from quietgrad.randomness import RandomKey; print(RandomKey.from_entropy().root.hex())"
    command = [sys.executable, "-c", f"{seeded}; {drawn}"]
    roots = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert roots[0] != roots[1]
    assert all(len(bytes.fromhex(root.decode())) == 32 for root in roots)


def test_drawing_noise_leaves_the_global_generators_alone() -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    keyed.normal(torch.zeros(10), RandomKey.from_seed(1), 0, "w")
    assert torch.equal(torch_state, torch.get_rng_state())
    assert np.array_equal(numpy_state, np.random.get_state()[1])


def test_noise_does_not_depend_on_the_micro_batches() -> None:
    noises = [noise_of(build_full, start(size, steps=2)) for size in MICRO_BATCHES]
    for other in noises[1:]:
        for name, values in noises[0].items():
            # Up to the rounding of (sum + noise) - sum in float32.
            np.testing.assert_allclose(values, other[name], rtol=0, atol=1e-6)


@dataclass(frozen=True, eq=False)
class Realised(PoissonSampler):
    """Batches of a given size, whatever the coins say."""

    realised: int = 0

    def indices(self, key: RandomKey, step: int) -> np.ndarray:
        return np.arange(self.realised)


@pytest.mark.parametrize("realised", [0, 1, 5, 40])
def test_sums_are_divided_by_the_expected_batch_size(realised) -> None:
    run, model = start(), build_partly_frozen()
    drawn = replace(run.plan, sampler=Realised(100, 0.1, realised=realised))
    run = drawn.start()
    noisy = run.step(model, loss, batch_of(len(next(run.batches()))))
    assert noisy.noise_std == pytest.approx(SIGMA * CLIP)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, noisy.gradients[name] / 10)
        else:
            assert parameter.grad is None


def test_the_mean_of_a_half_precision_model_keeps_the_parameters_dtype() -> None:
    model = nn.Linear(20, 30).to(torch.bfloat16)
    run = start()
    batch = batch_of(len(next(run.batches())))
    noisy = run.step(model, loss, batch | {"x": batch["x"].bfloat16()})
    assert noisy.gradients["weight"].dtype == torch.float32  # summed and noised in float32
    assert model.weight.grad.dtype == torch.bfloat16


def test_gradients_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="no parameter named 'weight'"):
        NoisySum({"weight": torch.zeros(2)}, 1.0).write_gradients(build_full())


@pytest.mark.parametrize("divisor", [0, -5.0, float("nan"), float("inf")])
def test_an_expected_batch_size_that_nothing_can_be_divided_by_is_refused(divisor) -> None:
    with pytest.raises(ValueError, match="expected_batch_size="):
        NoisySum({"weight": torch.zeros(2)}, 1.0, expected_batch_size=divisor)


@pytest.mark.parametrize("sigma", [0, -1.0, float("nan"), float("inf")])
def test_noise_multiplier_must_be_positive(sigma) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        GaussianNoise(sigma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parts_of_a_parameter_have_what_the_whole_has_there(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "BLOCK", 16)  # parts begin and end within blocks
    key = RandomKey.from_seed(3)

    def part(rows: int, columns: int, place: Stretch | Columns) -> torch.Tensor:
        source = OfStretches(keyed.KeyedSource(), {"w": place})
        return source.normal(torch.zeros(rows, columns, dtype=dtype), key, 2, "w")

    whole = keyed.normal(torch.zeros(9, 8, dtype=dtype), key, 2, "w")
    if dtype is not torch.bfloat16:
        assert len(whole.unique()) == 72  # no block repeats another
    assert torch.equal(part(4, 8, Stretch(24, 72)), whole[3:7])
    assert torch.equal(part(9, 3, Columns(2, 5, 8, 72)), whole[:, 2:5])
    assert torch.equal(part(4, 3, Columns(2, 5, 8, 72, first=3)), whole[3:7, 2:5])


@pytest.mark.parametrize(
    ("block", "place"),
    [
        (Block((3, 0), (4, 8)), Stretch(24, 72)),
        (Block((0, 2), (9, 3)), Columns(2, 5, 8, 72)),
        (Block((3, 2), (4, 3)), Columns(2, 5, 8, 72, first=3)),
    ],
)
def test_a_shard_draws_at_its_own_place(
    block: Block, place: Stretch | Columns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "block_of", lambda tensor: block)
    monkeypatch.setattr(shards, "is_spread", lambda tensor: True)
    assert shards.places_of({"w": torch.empty(9, 8)}) == {"w": place}
