"""Engines, groups, scaling, layer overrides and the planner: every way to the same clipped sum, and
the claims that go with it.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import CASES, Case
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.layout import layout_of
from quietgrad.clipping.engines import accumulator
from quietgrad.clipping.engines.thresholds import clip_factors, thresholds
from quietgrad.clipping.norms.choice import Policy
from quietgrad.clipping.norms.cost import MODELLED_GPU, MODELLED_PROCESSOR, Cost
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.several import small
from quietgrad.clipping.norms.rounding import SHARE, Measured
from quietgrad.clipping.planner.execution import ExecutionChoice, choose_execution, nonprivate_bytes
from quietgrad.clipping.planner.explain import explain
from quietgrad.clipping.planner.throughput import measured_throughput
from quietgrad.clipping.soundness.oracle import oracle_gradients, oracle_norms
from quietgrad.events import ExactClipping, RandomizedClipping
from quietgrad.randomness import RandomKey
from quietgrad.tensors import map_tensors, trainable_parameters

pytestmark = pytest.mark.usefixtures("examined_once")

ENGINES = ["bookkeeping", "one-example"]


def case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


def assert_same(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    size = max(float(g.norm()) for g in expected.values())
    assert actual.keys() == expected.keys()
    for name, g in expected.items():
        error = float((actual[name] - g).norm()) / max(float(g.norm()), 1e-2 * size)
        assert error < tolerance, (name, error)


def oracle_sum(gradients: list, factors: torch.Tensor, group_of) -> dict:
    """factors: [groups, examples]."""
    return {
        name: sum(
            factors[group_of[name], i].to(g.dtype) * one[name] for i, one in enumerate(gradients)
        )
        for name, g in gradients[0].items()
    }


@pytest.mark.grid(14, "models times engines")
@pytest.mark.parametrize("physical_batch_size", [None, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("one", [c for c in CASES if c.name != "minilm"], ids=str)
def test_engines_agree_with_the_oracle(
    one: Case, engine: str, physical_batch_size: int | None
) -> None:
    model, loss, batch = one.build()
    size = None if engine == "one-example" else physical_batch_size
    gradients = oracle_gradients(model, loss, batch)
    norms = oracle_norms(gradients)
    clip = float(norms.median())
    clipper = Clipper(clip, engine=engine, physical_batch_size=size)
    torch.testing.assert_close(
        clipper.norms(model, loss, batch).double(), norms.double(), rtol=1e-5, atol=0
    )
    factors = (clip / norms / (1 + SHARE)).clamp(max=1).unsqueeze(0)
    actual = clipper.clip(model, loss, batch).gradients
    assert_same(actual, oracle_sum(gradients, factors, dict.fromkeys(actual, 0)))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "in-blocks"])
@pytest.mark.parametrize("name", ["cnn-groupnorm", "llama-tied", "bare-parameters"])
def test_kept_gradients_and_blocks_agree(name: str, kept: bool, monkeypatch) -> None:
    model, loss, batch = case(name).build()
    expected = Clipper(0.1, "ghost", engine="bookkeeping").clip(model, loss, batch).gradients
    right, seen = accumulator.Accumulator._policy_of, []

    def policy(self, name):
        seen.append(name)
        return right(self, name)._replace(may_keep=kept)

    monkeypatch.setattr(accumulator.Accumulator, "_policy_of", policy)
    assert_same(
        Clipper(0.1, "materialized", engine="bookkeeping").clip(model, loss, batch).gradients,
        expected,
    )
    assert seen


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("scaling", ["clip", "automatic"])
@pytest.mark.parametrize("groups", ["layer", {"head*": 1.0, "*": 2.0}], ids=["layer", "grouped"])
def test_groups_against_the_oracle(groups, scaling: str, engine: str) -> None:
    model, loss, batch = case("bare-parameters").build()
    gradients = oracle_gradients(model, loss, batch)
    clipper = Clipper(0.5, engine=engine, groups=groups, scaling=scaling)
    limits = thresholds(list(trainable_parameters(model)), 0.5, clipper.groups)
    assert math.isclose(math.sqrt(sum(v**2 for v in limits.values)), 0.5)
    norms = torch.zeros(len(limits.values), len(gradients), dtype=torch.float64)
    for i, one in enumerate(gradients):
        for name, g in one.items():
            norms[limits.group_of[name], i] += g.double().pow(2).sum()
    norms = norms.sqrt()
    bounds = torch.tensor(limits.values, dtype=torch.float64).unsqueeze(1)
    norms = norms * (1 + SHARE)
    factors = bounds / (norms + 0.01) if scaling == "automatic" else (bounds / norms).clamp(max=1)
    clipped = clipper.clip(model, loss, batch)
    assert_same(clipped.gradients, oracle_sum(gradients, factors, limits.group_of))
    assert clipped.claim.max_grad_norm == 0.5 and clipped.claim.clipping == ExactClipping()
    # The claim itself: one record alone contributes at most C.
    for i in range(4):
        part = {k: v[i : i + 1] for k, v in batch.items()}
        alone = clipper.clip(model, loss, part).gradients
        assert sum(float(g.double().pow(2).sum()) for g in alone.values()) <= 0.25 * (1 + 1e-6)


def test_each_group_has_its_own_clip_factors() -> None:
    """A layer of large gradients does not shorten another one's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 1))
    batch = {"x": 50.0 * torch.randn(5, 4)}
    clipper = Clipper(1.0, engine="bookkeeping", groups="layer")
    bound = clipper.bind(model, lambda model, batch: model(batch["x"]).sum(1))
    parts = [bound.clip({"x": batch["x"][i : i + 1]}, step=4).gradients for i in range(5)]
    whole = bound.clip(batch, step=4).gradients
    for layer in ("0", "2"):  # each is clipped to 1 / sqrt(2)
        names = (f"{layer}.weight", f"{layer}.bias")
        lengths = [math.hypot(*(float(part[name].norm()) for name in names)) for part in parts]
        assert 0.7 < min(lengths) <= max(lengths) <= 0.5**0.5
        for name in names:
            torch.testing.assert_close(whole[name], sum(part[name] for part in parts))


@given(
    norms=st.lists(st.floats(0, 1e6), min_size=1, max_size=6),
    limit=st.floats(1e-3, 1e3),
    scaling=st.sampled_from(["clip", "automatic"]),
)
def test_clip_factors_bound_every_contribution(
    norms: list[float], limit: float, scaling: str
) -> None:
    n = torch.tensor([norms], dtype=torch.float64)
    factors = clip_factors(n, torch.tensor([limit], dtype=torch.float64), scaling)
    shares = torch.nan_to_num(factors) * n
    assert bool((shares <= limit * (1 + 1e-12)).all())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_example_that_is_not_finite_adds_zero(engine: str, bad: float) -> None:
    model, loss, batch = case("mlp").build()
    good = {k: torch.cat([v[:1], v[2:]]) for k, v in batch.items()}
    expected = Clipper(0.1, engine=engine).clip(model, loss, good).gradients
    batch["x"][1, 0] = bad
    clipped = Clipper(0.1, engine=engine).clip(model, loss, batch)
    assert_same(clipped.gradients, expected)
    assert int(clipped.private.nonfinite) == 1 and clipped.private.examples == 4


def test_pins_decide_per_layer() -> None:
    model, loss, batch = case("bert").build()
    clipper = Clipper(
        1.0,
        "exact",
        8,
        layers={"*.intermediate.*": "hutch:16", "*.query.*": "ghost"},
        engine="bookkeeping",
    )
    assert clipper.claim.clipping == RandomizedClipping(8, "convex")
    policies = clipper.policies(layout_of(model))
    by = {name: (p.estimator, p.sketch_dim) for name, p in policies.items()}
    assert by["bert.encoder.layer.0.intermediate.dense.weight"] == ("hutch", 16)
    assert by["bert.encoder.layer.0.attention.self.query.weight"] == ("ghost", 8)
    assert by["classifier.weight"] == ("exact", 8)
    sketched = clipper.norms(model, loss, batch, Projections(RandomKey.from_seed(1)))
    exact = Clipper(1.0).norms(model, loss, batch)
    assert not torch.equal(sketched, exact) and torch.allclose(sketched, exact, rtol=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "fast"}, "engine='fast' is unknown"),
        ({"scaling": "norm"}, "scaling='norm' is unknown"),
        ({"groups": "layers"}, "groups='layers' is unknown"),
        ({"groups": {}}, "at least one pattern"),
        ({"groups": {"*": 0.0}}, "share above 0"),
        ({"groups": "layer", "estimator": "hutch"}, "cannot be accounted for"),
        ({"layers": {"*": "fast"}}, "='fast' is unknown"),
        ({"layers": {"*": "ghost:4"}}, "is not understood"),
        ({"layers": {"*": "hutch:48"}}, "not a multiple of sketch_dim=32"),
        ({"layers": {"*": "hutch:16"}}, "not a multiple of sketch_dim=32"),
        ({"memory_budget": 0}, "memory_budget=0"),
        (
            {"engine": "one-example", "physical_batch_size": 4},
            "does not go with engine='one-example'",
        ),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size=0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_any_work(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        Clipper(1.0, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": {"head*": 1.0}}, "no pattern for parameter"),
        ({"groups": {"nowhere*": 1.0, "*": 1.0}}, "'nowhere\\*', which matches no"),
        ({"layers": {"nowhere*": "ghost"}}, "'nowhere\\*', which matches no"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_model_are_refused(arguments: dict, message: str) -> None:
    model, loss, batch = case("mlp").build()
    with pytest.raises(ValueError, match=message):
        Clipper(1.0, **arguments).clip(model, loss, batch)


def test_one_example_at_a_time_is_exact_whatever_was_asked_for() -> None:
    assert Clipper(1.0, "hutch", engine="one-example").claim.clipping == ExactClipping()
    assert Clipper(1.0, "hutch").claim.clipping == RandomizedClipping(32, "convex")


def test_one_example_engine_takes_what_cannot_be_captured() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.inner.weight, self.inner.bias)

    _, loss, batch = case("mlp").build()
    model = Functional()
    with pytest.raises(ValueError, match="one-example"):
        Clipper(1.0, engine="bookkeeping").clip(model, loss, batch)
    gradients = oracle_gradients(model, loss, batch)
    norms = oracle_norms(gradients)
    factors = (0.1 / norms / (1 + SHARE)).clamp(max=1).unsqueeze(0)
    actual = Clipper(0.1, engine="one-example").clip(model, loss, batch).gradients
    assert_same(actual, oracle_sum(gradients, factors, dict.fromkeys(actual, 0)))


def test_one_gradient_shared_by_two_parameters_is_not_scaled_twice() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :3] + (self.a + self.b)

    _, loss, batch = case("mlp").build()
    model = Sum()
    gradients = oracle_gradients(model, loss, batch)
    factors = (0.1 / oracle_norms(gradients) / (1 + SHARE)).clamp(max=1).unsqueeze(0)
    actual = Clipper(0.1, engine="one-example").clip(model, loss, batch).gradients
    assert_same(actual, oracle_sum(gradients, factors, {"a": 0, "b": 0}))


def test_compiled_models_give_the_same_sum() -> None:
    model, loss, batch = case("mlp").build()
    expected = Clipper(0.1).clip(model, loss, batch).gradients
    compiled = torch.compile(model, backend="eager")
    compiled(batch["x"])
    actual = Clipper(0.1, engine="bookkeeping").clip(compiled, loss, batch).gradients
    assert_same({name.removeprefix("_orig_mod."): g for name, g in actual.items()}, expected)


# ------------------------------------------------------------------------------------------------
# planner


def planned(
    name: str, examples: int, budget: float, speed=MODELLED_PROCESSOR
) -> tuple[ExecutionChoice, float]:
    model, loss, batch = case(name).build()
    layout = layout_of(model)
    policies = Clipper(1.0, speed=speed).policies(layout)
    found = Clipper(1.0).bind(model, loss).planned(layout, batch).model
    engines = ("bookkeeping", "one-example")
    return choose_execution(found, policies, examples, speed, budget, engines), nonprivate_bytes(
        found, examples
    )


def test_planner_takes_the_batch_whole_where_memory_is_no_matter_and_cuts_it_where_it_is() -> None:
    how, _ = planned("minilm", 64, math.inf)
    small, _ = planned("minilm", 64, 300e6)
    assert how.engine == "bookkeeping" and how.bytes <= planned("minilm", 64, math.inf)[1]
    assert small.physical_batch_size <= how.physical_batch_size and small.bytes <= 300e6
    none, _ = planned("minilm", 64, 1.0)
    assert "none fits" in none.why


def test_memory_that_was_asked_for_may_be_more_than_a_plain_step_takes() -> None:
    model, loss, batch = case("minilm").build()
    many = map_tensors(batch, lambda t: torch.cat([t] * 64)[:64])
    chosen = {
        budget: Clipper(1.0, memory_budget=budget).bind(model, loss).execution_choice(many)
        for budget in (None, 1e12)
    }
    assert chosen[None].physical_batch_size < chosen[1e12].physical_batch_size == 64
    assert chosen[None].bytes <= planned("minilm", 64, math.inf)[1] < chosen[1e12].bytes < 1e12


def test_choices_follow_the_shapes() -> None:
    policy = Policy("exact", 32, MODELLED_PROCESSOR)
    short = policy.choose(Cost(examples=64, positions=32, rows=384, columns=384))
    long = policy.choose(Cost(examples=1, positions=4096, rows=512, columns=512))
    assert (short.estimator, short.kept) == ("ghost", False)
    assert (long.estimator, long.kept) == ("materialized", True)
    assert policy.choose(Cost(64, 1, 384, 384)).estimator == "ghost"
    assert not policy._replace(may_keep=False).choose(Cost(1, 4096, 512, 512)).kept
    assert policy._replace(estimator="hutch").choose(Cost(1, 4096, 512, 512)).estimator == "hutch"
    assert Policy("auto", 32, MODELLED_GPU).choose(Cost(2, 4096, 2048, 2048)).estimator in (
        "materialized",
        "ghost",
    )


@pytest.mark.parametrize(("positions", "engine"), [(512, "one-example"), (64, "bookkeeping")])
def test_long_texts_come_one_at_a_time_and_short_ones_together(positions: int, engine: str) -> None:
    """GPT-2's widths: one text of 512 tokens keeps two processors busy, and its gradient is read
    and written faster than norms and weighted sums of several are formed.
    """
    widths = [(768, 2304), (2304, 768), (768, 3072), (3072, 768)]
    model = nn.Sequential(*(nn.Linear(*sizes) for sizes in widths))
    batch = {"x": torch.zeros(4, positions, 768)}
    bound = Clipper(1.0).bind(model, lambda model, batch: model(batch["x"]).mean((1, 2)))
    found = bound.planned(layout_of(model), batch).model
    policies = bound.clipper.policies(layout_of(model))
    choice = choose_execution(
        found, policies, 4, MODELLED_PROCESSOR, math.inf, tuple(ENGINES), math.inf
    )
    assert choice.engine == engine


def test_explanation_holds_choice_alternatives_and_reasons() -> None:
    model, loss, batch = case("bert").build()
    record = explain(Clipper(1.0), model, loss, batch)
    assert {row["engine"] for row in record["alternatives"]} == set(ENGINES)
    assert sum(row["count"] for row in record["layers"]) == len(trainable_parameters(model))
    offered = [(sketch["estimator"], sketch["sketch_dim"]) for sketch in record["sketches"]]
    assert record["why"] and offered == [("hutch", 32), ("hutch++", 8)]
    assert all(row["seconds"] > 0 and row["mib"] > 0 for row in record["alternatives"])


def test_measured_speeds_are_positive() -> None:
    speed = measured_throughput("cpu")
    assert min(speed) > 0
    assert measured_throughput("cpu") is speed


def test_planning_leaves_model_and_random_state_alone() -> None:
    model, loss, batch = case("bert").build()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Clipper(1.0).execution_choice(model, loss, batch)
    assert torch.equal(torch.rand(3), expected)
    assert all(p.grad is None for p in model.parameters())


class ManyScales(nn.Module):
    """Parameters that are small one by one, and together more than are measured at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(3000) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x) for layer in self.layers), torch.zeros(()))


def test_small_gradients_that_are_measured_together_know_no_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How they are joined follows from one example's entries: mutant, those of the micro-batch."""
    model, seen = ManyScales(), []
    one_by_one = small.direct

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum(1)

    def noted(values: torch.Tensor) -> Measured:
        seen.append(values.shape[1])
        return one_by_one(values)

    monkeypatch.setattr(small, "direct", noted)
    bound = Clipper(1.0, engine="bookkeeping").bind(model, loss)
    x = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    norms = bound.norms(x, step=5)
    assert seen[-2:] == [18_000, 6_000]
    assert torch.equal(norms[:1], bound.norms(x[:1], step=6))
    assert seen[-2:] == [18_000, 6_000]
    expected = oracle_norms(oracle_gradients(model, loss, x))
    torch.testing.assert_close(norms, expected.to(norms.dtype))
