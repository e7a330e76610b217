"""What cannot be clipped per example is refused by name, with the remedy: models, losses and
batches.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import CASES, SmallCnn, cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.clipping import Clipper, clipped_gradients, per_example_norms, replace_batch_norm
from quietgrad.clipping.verify import verify_clipping

EXAMPLES = 4


def batch_of(*shape: int, examples: int = EXAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(examples, *shape, generator=generator),
        "y": torch.randint(0, 3, (examples,), generator=generator),
    }


def ids_of(length: int = 5, examples: int = EXAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randint(0, 10, (examples, length), generator=generator),
        "y": torch.randint(0, 3, (examples,), generator=generator),
    }


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


# ------------------------------------------------------------------------------------------------
# losses


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda losses: losses.mean(), r"returned a tensor of 0 dimensions.*reduction='none'"),
        (
            lambda losses: losses.sum(0, keepdim=True),
            r"a row of another number of losses than the batch",
        ),
        (lambda losses: losses.unsqueeze(1), r"returned a tensor of 2 dimensions"),
        (lambda losses: losses[:2], r"return a tensor of shape \(examples,\)"),
        (lambda losses: torch.stack([losses, losses], dim=1), r"returned a tensor of 2 dimensions"),
        (lambda losses: losses.sum().item(), "returned float"),
        (lambda losses: [losses], "returned list"),
        (lambda losses: losses.detach(), "without a gradient.*detach"),
    ],
    ids=["mean", "sum", "column", "too-few", "per-token", "number", "list", "detached"],
)
def test_losses_that_are_not_one_per_example_are_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_gradients(
            small(), lambda model, batch: change(cross_entropy(model, batch)), batch_of(5), 1.0
        )


def test_loss_under_no_grad_is_refused() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return cross_entropy(model, batch)

    with pytest.raises(ValueError, match="without a gradient"):
        clipped_gradients(small(), loss, batch_of(5), 1.0)


# ------------------------------------------------------------------------------------------------
# layers


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU())
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean(dim=(2, 3)))


def test_batch_norm_in_training_is_refused_by_name() -> None:
    for model in (
        WithBatchNorm(),
        WithBatchNorm().eval(),
    ):  # in evaluation mode its weights still train
        with pytest.raises(ValueError, match=r"layer 'body.1' \(BatchNorm2d\).*replace_batch_norm"):
            clipped_gradients(model, cross_entropy, batch_of(3, 6, 6), 1.0)


def test_frozen_batch_norm_in_training_mode_is_refused() -> None:
    model = WithBatchNorm()  # it would still normalise by the batch
    model.body[1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"body\.1"):
        clipped_gradients(model, cross_entropy, batch_of(3, 6, 6), 1.0)


def test_frozen_batch_norm_without_running_statistics_is_refused() -> None:
    model = WithBatchNorm()
    model.body[1] = nn.BatchNorm2d(24, track_running_stats=False).requires_grad_(False)
    with pytest.raises(ValueError, match=r"body\.1"):
        clipped_gradients(model.eval(), cross_entropy, batch_of(3, 6, 6), 1.0)


def test_frozen_batch_norm_in_evaluation_mode_is_allowed() -> None:
    torch.manual_seed(0)
    model = WithBatchNorm()
    model(torch.randn(8, 3, 6, 6))  # some running statistics
    model.body[1].eval().requires_grad_(False)
    assert_equal_to_oracle(model, cross_entropy, batch_of(3, 6, 6))


def test_replace_batch_norm() -> None:
    torch.manual_seed(0)
    model = WithBatchNorm()
    nn.init.normal_(model.body[1].weight)
    weight = model.body[1].weight.detach().clone()
    assert replace_batch_norm(model) is model
    assert isinstance(model.body[1], nn.GroupNorm)
    assert model.body[1].num_groups == 12  # the largest divisor of 24 that is not above 16
    assert torch.equal(model.body[1].weight, weight)
    assert_equal_to_oracle(model, cross_entropy, batch_of(3, 6, 6))
    assert isinstance(replace_batch_norm(nn.BatchNorm1d(7, affine=False)), nn.GroupNorm)


def test_instance_norm_with_running_statistics_is_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True), nn.Flatten()
    )
    with pytest.raises(
        ValueError, match=r"layer '1' \(InstanceNorm2d\).*track_running_stats=False"
    ):
        clipped_gradients(model, cross_entropy, batch_of(3, 6, 6), 1.0)


class WithEmbedding(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 6, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).tanh().mean(1))


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_embedding_options_that_break_the_bound_are_refused(option: dict) -> None:
    with pytest.raises(ValueError, match=f"layer 'words'.*{next(iter(option))}"):
        clipped_gradients(WithEmbedding(**option), cross_entropy, ids_of(), 1.0)


def test_padding_row_gets_no_gradient() -> None:
    model, batch = WithEmbedding(padding_idx=4), ids_of()
    batch["x"][:, -2:] = 4
    for estimator in ("exact", "materialized", "ghost"):
        assert_equal_to_oracle(model, cross_entropy, batch, estimator=estimator)
    assert (
        not clipped_gradients(model, cross_entropy, batch, 1.0).gradients["words.weight"][4].any()
    )


class UsesParameterDirectly(nn.Module):
    """A Linear layer whose weight is used without calling the layer; with ``also_called``, it is
    called as well.
    """

    def __init__(self, also_called: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 5)
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)
        self.also_called = also_called

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.also_called:
            h = self.layer(h).tanh()
        return self.head(F.linear(h, self.layer.weight))


def test_parameter_of_a_module_that_is_never_called_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"parameter 'layer.weight' influences the loss.*never called.*freeze it"
    ):
        Clipper(1.0, engine="bookkeeping").clip(
            UsesParameterDirectly(False), cross_entropy, batch_of(5)
        )


@pytest.mark.parametrize("also_called", [True, False])
def test_one_that_is_used_directly_is_taken_one_example_at_a_time_by_default(
    also_called: bool,
) -> None:
    """A table that is read here and multiplied by there, without a head of its own."""
    model, batch = UsesParameterDirectly(also_called), batch_of(5)
    with pytest.raises(ValueError, match=r"'layer.weight'.*take one example at a time"):
        Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)
    bound = Clipper(0.1).bind(model, cross_entropy)
    found, alone = bound.clip(batch), Clipper(0.1, engine="one-example")
    expected = alone.clip(model, cross_entropy, batch).gradients
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected[name])
    choice = bound.execution_choice(batch)
    assert choice.engine == "one-example" and "layer.weight" in choice.why
    with pytest.raises(ValueError, match=r"'layer.weight'"):  # no sketch of it is unbiased
        Clipper(1.0, "hutch").clip(model, cross_entropy, batch)


def test_frozen_parameter_may_be_used_directly() -> None:
    model = UsesParameterDirectly(also_called=False)
    model.layer.requires_grad_(False)
    assert_equal_to_oracle(model, cross_entropy, batch_of(5))


def refused_or_right(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Never a silent wrong answer."""
    try:
        clipped_gradients(model, cross_entropy, batch, 1.0)
    except ValueError:
        return
    assert_equal_to_oracle(model, cross_entropy, batch)


def test_parameter_used_directly_beside_a_call_of_its_module_is_not_missed() -> None:
    refused_or_right(UsesParameterDirectly(also_called=True), batch_of(5))


class TiedByHand(nn.Module):
    """The usual idiom of language models written by hand: the embedding table as output layer,
    through F.linear.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.words(ids)).tanh().mean(1), self.words.weight)[:, :3]


def test_embedding_used_as_output_layer_by_hand_is_not_missed() -> None:
    refused_or_right(TiedByHand(), ids_of())


def test_verify_notices_a_use_that_capture_misses() -> None:
    # Should capture ever miss a use of a parameter, the check that every training run makes must
    # not.
    model = TiedByHand()
    try:
        assert verify_clipping(model, cross_entropy, ids_of()) > 1e-3
    except ValueError as refused:
        assert "words.weight" in str(refused)


# ------------------------------------------------------------------------------------------------
# models, batches, arguments


def test_model_without_trainable_parameters_is_refused() -> None:
    for function in (clipped_gradients, lambda *args: per_example_norms(*args[:3])):
        with pytest.raises(
            ValueError, match=r"Sequential has no trainable parameters.*requires_grad=True"
        ):
            function(small().requires_grad_(False), cross_entropy, batch_of(5), 1.0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.randn(4, 5), "y": torch.zeros(3, dtype=torch.long)},
            "different first dimensions; every",
        ),
        (
            {"x": torch.randn(4, 5), "y": torch.zeros(4, dtype=torch.long), "c": torch.tensor(1.0)},
            "first dimension",
        ),
        ({"x": "text"}, "holds no tensor"),
        ({}, "holds no tensor"),
    ],
    ids=["ragged", "scalar", "text", "empty"],
)
def test_batches_without_a_common_example_dimension_are_refused(batch: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_gradients(small(), cross_entropy, batch, 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm=0.0 must be positive"),
        ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm"),
        ({"estimator": "fast"}, ValueError, "estimator='fast' is unknown; use one of auto"),
        ({"estimator": "hutch", "sketch_dim": 1}, ValueError, "sketch_dim=1"),
        ({"estimator": "hutch", "sketch_dim": 2.0}, TypeError, "sketch_dim"),
        ({"physical_batch_size": 0}, ValueError, "physical_batch_size=0"),
        ({"physical_batch_size": 1.5}, TypeError, "physical_batch_size"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(
    arguments: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        clipped_gradients(
            small(), cross_entropy, batch_of(5), **({"max_grad_norm": 1.0} | arguments)
        )


def test_both_kinds_of_checkpointing_work() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(
                lambda h: self.inner(h).tanh(), self.first(x), use_reentrant=self.reentrant
            )
            return self.head(h)

    assert_equal_to_oracle(Checkpointed(False), cross_entropy, batch_of(5))
    expected = clipped_gradients(Checkpointed(False), cross_entropy, batch_of(5), 1.0).gradients
    for engine in ("bookkeeping", "one-example"):
        model = Checkpointed(True)
        actual = Clipper(1.0, engine=engine).clip(model, cross_entropy, batch_of(5)).gradients
        for name, g in expected.items():
            torch.testing.assert_close(actual[name], g, rtol=1e-5, atol=1e-7)
        assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_refusals_come_before_the_loss_is_called() -> None:
    def never(model: nn.Module, batch: object) -> Tensor:
        raise AssertionError("the loss was called")

    for model in (WithBatchNorm(), WithEmbedding(max_norm=1.0), small().requires_grad_(False)):
        with pytest.raises(ValueError, match=r"layer|trainable"):
            Clipper(1.0).clip(model, never, batch_of(5))


def test_models_of_the_shared_list_are_not_refused() -> None:
    assert any(isinstance(CASES[i].build()[0], SmallCnn) for i in range(4))
    for case in CASES[:6]:
        model, loss, batch = case.build()
        Clipper(1.0).clip(model, loss, batch)


def test_a_layer_that_makes_its_weights_when_the_first_record_comes_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    batch = {"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    with pytest.raises(ValueError, match=r"layer '0' .* has no weights yet"):
        Clipper(1.0).bind(model, loss).clip(batch)
    model(torch.zeros(1, 6))
    Clipper(1.0).bind(model, loss).clip(batch)


class Spectral(nn.Module):
    """A Fourier layer, as neural operators have it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if weight.layout is not torch.strided:
            return self.head(torch.sparse.mm(weight, x.T).T)
        factors = weight if weight.is_complex() else torch.view_as_complex(weight)
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * factors, n=8))


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(5, dtype=torch.cfloat), "'weight' is of the dtype torch.complex64"),
        (torch.eye(8).to_sparse(), "'weight' has the layout torch.sparse_coo"),
    ],
)
def test_parameters_without_noise_of_their_own_are_refused(
    weight: torch.Tensor, words: str
) -> None:
    batch = (torch.randn(4, 8), torch.randint(0, 2, (4,)))
    with pytest.raises(ValueError, match=words):
        clipped_gradients(Spectral(weight), pair_loss, batch, 1.0)


def test_the_remedy_for_complex_parameters_works() -> None:
    batch = (torch.randn(4, 8), torch.randint(0, 2, (4,)))
    assert verify_clipping(Spectral(torch.randn(5, 2)), pair_loss, batch) < 1e-4


def pair_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
