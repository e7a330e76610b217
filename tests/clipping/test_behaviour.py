"""What clipping does at the edges: empty batches, non-finite gradients, changing models,
precisions, and what it leaves behind.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Case, Mean, cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.beside.values import Observed
from quietgrad.clipping import ClippedSum, clipped_gradients, per_example_norms
from quietgrad.clipping.norms.choice import ESTIMATORS
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms
from quietgrad.clipping.verify import verify_clipping
from quietgrad.events import RandomizedClipping, SensitivityClaim
from quietgrad.generators import keyed_generators
from quietgrad.randomness import RandomKey

pytestmark = pytest.mark.usefixtures("examined_once")

SMALL = [
    c
    for c in CASES
    if c.name in ("mlp", "mlp-positions", "cnn-groupnorm", "bare-parameters", "recurrent-attention")
]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def projections() -> Projections:
    return Projections(RandomKey.from_seed(0))


def case(name: str) -> tuple:
    return next(c for c in CASES if c.name == name).build()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("chosen", SMALL, ids=str)
def test_empty_batch_gives_zeros(chosen: Case, estimator: str) -> None:
    model, loss, batch = chosen.build()
    empty = {name: t[:0] for name, t in batch.items()}
    clipped = clipped_gradients(model, loss, empty, 1.0, estimator)
    assert clipped.gradients.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert clipped.gradients[name].shape == p.shape
            assert not clipped.gradients[name].any()
    assert clipped.private.examples == 0
    assert per_example_norms(model, loss, empty, estimator).shape == (0,)


class Poisoned(nn.Module):
    """A Linear layer with positions, an embedding, a normalisation and a convolution; the loss of
    some examples is multiplied by a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.positions = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))  # goes through the fallback
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.convolution(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.positions(self.norm(h))).mean(1)) * self.scale


def poisoned_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"], reduction="none") * batch["weight"]


def poisoned_batch(weights: list[float]) -> dict[str, Tensor]:
    g = generator()
    n = len(weights)
    return {
        "ids": torch.randint(10, (n, 5), generator=g),
        "y": torch.randint(3, (n,), generator=g),
        "weight": torch.tensor(weights),
    }


@pytest.mark.grid(15, "models times ways of being infinite")
@pytest.mark.parametrize("physical_batch_size", [None, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nonfinite_example_contributes_zero_and_leaves_the_others_alone(
    estimator, poison, physical_batch_size
) -> None:
    # 1e30: a finite gradient whose squared norm overflows.
    torch.manual_seed(0)
    model = Poisoned()
    weights = [1.0, poison, 2.0, 0.5]
    dirty, clean = (
        poisoned_batch(weights),
        poisoned_batch([1.0, 0.0, 2.0, 0.5]),
    )  # a weight of zero: gradient zero
    arguments = {
        "max_grad_norm": 0.4,
        "estimator": estimator,
        "physical_batch_size": physical_batch_size,
    }
    actual = clipped_gradients(model, poisoned_loss, dirty, **arguments, projections=projections())
    expected = clipped_gradients(
        model, poisoned_loss, clean, **arguments, projections=projections()
    )
    for name, g in expected.gradients.items():
        assert g.any()
        torch.testing.assert_close(actual.gradients[name], g, rtol=1e-5, atol=1e-7)
    assert int(actual.private.nonfinite) == 1
    assert int(expected.private.nonfinite) == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_of_nonfinite_examples_gives_zeros(estimator) -> None:
    clipped = clipped_gradients(
        Poisoned(), poisoned_loss, poisoned_batch([float("nan")] * 3), 1.0, estimator
    )
    assert not any(g.any() for g in clipped.gradients.values())


def test_nonfinite_inputs_contribute_zero() -> None:
    model, loss, batch = case("mlp")
    expected = clipped_gradients(model, loss, {k: t[1:] for k, t in batch.items()}, 0.1).gradients
    batch["x"][0, 2] = float("inf")
    actual = clipped_gradients(model, loss, batch, 0.1).gradients
    for name, g in expected.items():
        torch.testing.assert_close(actual[name], g, rtol=1e-5, atol=1e-7)


def test_a_gradient_of_zero_stays_zero() -> None:
    clipped = clipped_gradients(Poisoned(), poisoned_loss, poisoned_batch([0.0, 0.0]), 1.0)
    assert not any(g.any() for g in clipped.gradients.values())
    assert int(clipped.private.nonfinite) == 0


@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost"])
def test_one_example_moves_the_sum_by_at_most_the_clipping_norm(estimator) -> None:
    for chosen in SMALL:
        model, loss, batch = chosen.build()
        for clip in (1e-3, 0.5, 100.0):
            whole = clipped_gradients(model, loss, batch, clip, estimator).gradients
            rest = clipped_gradients(
                model, loss, {k: t[1:] for k, t in batch.items()}, clip, estimator
            ).gradients
            moved = sum(float((whole[n] - rest[n]).double().pow(2).sum()) for n in whole) ** 0.5
            assert moved <= clip * (1 + 1e-5)


def test_freezing_and_unfreezing_between_calls() -> None:
    model, loss, batch = case("mlp")
    for frozen in ([], [0], [0, 2, 5], [3], []):
        model.requires_grad_(True)
        for i in frozen:
            model[i].requires_grad_(False)
        assert_equal_to_oracle(model, loss, batch)
    assert len(clipped_gradients(model, loss, batch, 1.0).gradients) == len(
        list(model.parameters())
    )


def test_exception_in_the_forward_pass_leaves_no_hooks() -> None:
    model, loss, batch = case("mlp")

    def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        loss(model, batch)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        clipped_gradients(model, failing, batch, 1.0)
    assert not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )
    assert_equal_to_oracle(model, loss, batch)


def test_two_clippers_after_one_another_do_not_disturb_each_other() -> None:
    model, loss, batch = case("mlp")
    alone = clipped_gradients(model, loss, batch, 0.3)
    clipped_gradients(model, loss, batch, 7.0, "hutch")
    clipped_gradients(model, loss, batch, 0.3, "ghost")
    again = clipped_gradients(model, loss, batch, 0.3)
    assert all(torch.equal(g, again.gradients[name]) for name, g in alone.gradients.items())


def test_clipping_inside_no_grad_works_and_restores_the_mode() -> None:
    model, loss, batch = case("mlp")
    with torch.no_grad():
        inside = clipped_gradients(model, loss, batch, 0.3).gradients
        assert not torch.is_grad_enabled()
    outside = clipped_gradients(model, loss, batch, 0.3).gradients
    assert all(torch.equal(g, outside[name]) for name, g in inside.items())
    assert not any(g.requires_grad for g in inside.values())


def test_gradients_that_were_there_stay_there() -> None:
    model, loss, batch = case("mlp")
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    clipped_gradients(model, loss, batch, 0.3)
    assert all(bool((p.grad == 3).all()) for p in model.parameters())


def test_users_own_hooks_stay_and_run() -> None:
    model, loss, batch = case("mlp")
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    clipped_gradients(model, loss, batch, 0.3)
    assert calls.count("forward") >= 1
    assert len(model[0]._forward_hooks) == 1


@pytest.mark.grid(5, "the same models as against the oracle")
@pytest.mark.parametrize("chosen", [c for c in CASES if c.name != "minilm"], ids=str)
def test_verify_finds_good_models_good(chosen: Case) -> None:
    model, loss, batch = chosen.build()
    model.train()
    assert verify_clipping(model, loss, batch) < 1e-4
    assert all(m.training for m in model.modules())


def test_verify_puts_mixed_modes_back_and_checks_without_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3))
    model[0].eval()
    before = [m.training for m in model.modules()]
    batch = {"x": torch.randn(4, 5), "y": torch.randint(0, 3, (4,))}
    assert verify_clipping(model, cross_entropy, batch) < 1e-4
    assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize("chosen", [*SMALL, next(c for c in CASES if c.name == "bert")], ids=str)
def test_bfloat16_model_agrees_with_a_float32_oracle(chosen: Case) -> None:
    model, loss, batch = chosen.build()
    half = copy.deepcopy(model).to(torch.bfloat16)
    same = copy.deepcopy(half).float()  # the oracle has the rounded weights
    cast = {k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in batch.items()}
    rounded = {k: t.float() if t.is_floating_point() else t for k, t in cast.items()}
    gradients = oracle_gradients(same, loss, rounded)
    clip = float(oracle_norms(gradients).median())
    expected = oracle_clipped_sum(gradients, clip)
    actual = clipped_gradients(half, loss, cast, clip).gradients
    assert {g.dtype for g in actual.values()} == {torch.float32}
    assert distance(actual, expected) < 2e-2
    norms = per_example_norms(half, loss, cast).double()
    torch.testing.assert_close(norms, oracle_norms(gradients).double(), rtol=2e-2, atol=0)


@pytest.mark.grid(5, "the same models as against the oracle, in another type")
@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost"])
@pytest.mark.parametrize("chosen", SMALL, ids=str)
def test_float64_model_agrees_to_ten_digits(chosen: Case, estimator: str) -> None:
    model, loss, batch = chosen.build()
    wide = {k: t.double() if t.is_floating_point() else t for k, t in batch.items()}
    assert_equal_to_oracle(model.double(), loss, wide, estimator=estimator, tolerance=1e-10)


def test_mixed_precisions_in_one_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Cast(torch.float64), nn.Linear(7, 3).double())
    batch = {"x": torch.randn(4, 5), "y": torch.randint(0, 3, (4,))}
    clipped = clipped_gradients(model, cross_entropy, batch, 1.0).gradients
    assert clipped["0.weight"].dtype == torch.float32 and clipped["2.weight"].dtype == torch.float64
    assert verify_clipping(model, cross_entropy, batch) < 1e-4


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class ReturnsItsIntermediate(nn.Module):
    """As attention modules do that return their weights beside the context: one output is on the
    way to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(x * self.scale, dim=-1)
        return (weights * x).tanh() * self.scale, weights


class UsesTheCell(nn.Module):
    """A recurrent cell whose two outputs depend on each other, or a module that returns an
    intermediate, ``used`` or ignored.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(5, 5) if kind == "lstm-cell" else ReturnsItsIntermediate()
        self.head = nn.Linear(5, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "lstm-cell":
            state = None
            for t in range(3):
                state = self.inner(x + t, state)
            return self.head(state[0])
        out, weights = self.inner(x)
        return self.head(out + weights if self.kind == "used" else out)


@pytest.mark.parametrize("kind", ["used", "ignored", "lstm-cell"])
def test_outputs_that_depend_on_each_other_are_counted_once(kind: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 5), "y": torch.randint(0, 3, (4,))}
    assert_equal_to_oracle(UsesTheCell(kind), cross_entropy, batch)


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    size = sum(float(g.double().pow(2).sum()) for g in expected.values()) ** 0.5
    return (
        sum(float((actual[n].double() - g.double()).pow(2).sum()) for n, g in expected.items())
        ** 0.5
        / size
    )


def sum_with(
    value: float = 1.0, clip: float = 1.0, names: tuple[str, ...] = ("w", "b"), **claim: object
) -> ClippedSum:
    return ClippedSum({n: torch.full((2,), value) for n in names}, SensitivityClaim(clip, **claim))


def test_clipped_sums_add_up() -> None:
    model, loss, batch = case("cnn-groupnorm")
    whole = clipped_gradients(model, loss, batch, 0.2)
    parts = [
        clipped_gradients(model, loss, {k: t[rows] for k, t in batch.items()}, 0.2)
        for rows in ([0], [1, 2], [3], [])
    ]
    total = parts[0] + parts[1] + parts[2] + parts[3]
    assert total.claim == whole.claim and total.private.examples == 4
    for name, g in whole.gradients.items():
        torch.testing.assert_close(total.gradients[name], g, rtol=1e-5, atol=1e-6)


def test_adding_leaves_the_summands_alone() -> None:
    one, other = sum_with(1.0), sum_with(2.0)
    total = one + other
    assert float(one.gradients["w"][0]) == 1 and float(other.gradients["w"][0]) == 2
    assert float(total.gradients["w"][0]) == 3


@pytest.mark.parametrize(
    "other",
    [
        sum_with(clip=2.0),
        sum_with(clipping=RandomizedClipping(32)),
        sum_with(names=("w",)),
        sum_with(names=("w", "c")),
    ],
    ids=["another-norm", "sketched", "fewer-parameters", "other-parameters"],
)
def test_clipped_sums_that_do_not_belong_together_are_not_added(other: ClippedSum) -> None:
    for one, two in ((sum_with(), other), (other, sum_with())):
        with pytest.raises(ValueError, match="cannot add clipped sums"):
            one + two


def test_repr_shows_no_values() -> None:
    clipped = clipped_gradients(Poisoned(), poisoned_loss, poisoned_batch([1.0] * 3), 1.0)
    for shown in (
        repr(clipped),
        str(clipped),
        f"{clipped}",
        repr([clipped]),
        repr(clipped.private),
        repr(Observed(None, torch.ones(3))),
    ):
        assert "tensor" not in shown and "examples=" not in shown and "nonfinite=" not in shown


def test_dropout_outside_the_fallback_is_drawn_once() -> None:
    # One mask an example, the same in norm and sum. Nothing is clipped, so the sum is autograd's
    # with the same draws.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), Mean(1), nn.Linear(7, 3))
    batch = {"x": torch.randn(6, 4, 5), "y": torch.randint(0, 3, (6,))}
    with keyed_generators(1):
        clipped = clipped_gradients(model, cross_entropy, batch, 1e6).gradients
    torch.manual_seed(1)
    cross_entropy(model, batch).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(clipped[name], p.grad, rtol=1e-5, atol=1e-6)


class Scalars(nn.Module):
    """One number an example, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.layer = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.weights).sum(1)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(8))
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.a + self.b).tanh().sum(1)


@pytest.mark.parametrize("kind", [Scalars, TwoNames])
def test_parameters_of_a_module_itself(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(5, 8)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    found = clipped_gradients(model, loss, x, 0.5).gradients
    expected = oracle_clipped_sum(oracle_gradients(model, loss, x), 0.5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-5)


class BiasAlone(nn.Module):
    """A frozen weight with a trainable bias, whose input is changed afterwards: autograd, which
    needs the input for the weight alone, lets that pass.
    """

    def __init__(self, trained: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        for name, parameter in self.middle.named_parameters():
            parameter.requires_grad_(name == trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        y = self.middle(h)
        h.mul_(0.5)
        return self.last(y + h).square().sum(1)


@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost", "hutch"])
def test_the_input_of_a_frozen_weight_may_change_in_place(estimator: str) -> None:
    torch.manual_seed(0)
    model, x = BiasAlone("bias"), torch.randn(5, 6)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch)

    found = clipped_gradients(model, loss, x, 1e6, estimator=estimator).gradients
    expected = oracle_clipped_sum(oracle_gradients(model, loss, x), 1e6)
    assert "middle.bias" in found and "middle.weight" not in found
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as in training
        clipped_gradients(BiasAlone("weight"), loss, x, 1e6, estimator=estimator)
