"""What book-keeping cannot capture is taken one example at a time by itself, exactly, and
``explain`` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import cross_entropy
from torch import Tensor, nn
from torch.nn.utils import prune

from quietgrad.clipping import Clipper, clipped_gradients, per_example_norms
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.planner.explain import explain
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients, oracle_norms

EXAMPLES = 4


def batch_of(*shape: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, *shape, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (EXAMPLES,), generator=generator)}


class NeverCalled(nn.Module):
    """A convolution's weight that a routine of its own reads (Mamba)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.layer.weight).tanh().mean(1))


class Flat(nn.Module):
    """Positions of all examples in one dimension, to each of which one of two layers is applied
    (Mixtral).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first = flat[:, :1] > 0
        mixed = torch.where(first, self.layer(flat), self.other(flat)).tanh()
        return self.head(mixed.view_as(x).mean(1))


class Windows(nn.Module):
    """Two windows of each example stand beside one another as if they were examples (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(1, (2, -1)).flatten(0, 1)
        return self.head(self.layer(windows).softmax(1).unflatten(0, (len(x), 2)).mean((1, 2)))


class Repeats(nn.Module):
    """A table for all examples, repeated by the model itself (DeBERTa)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(torch.arange(6).unsqueeze(0)).repeat(len(x), 1, 1)
        return self.head((x @ rows).tanh().mean(1))


class Penalised(nn.Module):
    """Computes a gradient while it runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.layer(x).tanh().square().sum()
        [force] = torch.autograd.grad(energy, x, create_graph=True)
        return self.head(force.mean(1))


MODELS = [NeverCalled, Flat, Windows, Repeats, Penalised]


def built(kind: type[nn.Module]) -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    return kind(), cross_entropy, batch_of(4, 6)


@pytest.mark.grid(5, "models for which the same is chosen")
@pytest.mark.parametrize(
    "settings", [{}, {"physical_batch_size": 2}, {"max_physical_batch_size": 3}], ids=str
)
@pytest.mark.parametrize("kind", MODELS)
def test_the_planner_takes_one_example_at_a_time(
    kind: type[nn.Module], settings: dict[str, int]
) -> None:
    model, loss, batch = built(kind)
    gradients = oracle_gradients(model, loss, batch)
    norms = oracle_norms(gradients)
    clip = float(norms.median())
    bound = Clipper(clip, **settings).bind(model, loss)
    expected = oracle_clipped_sum(gradients, clip)
    for _ in range(2):
        actual = bound.clip(batch).gradients
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bound.norms(batch).double(), norms.double(), rtol=1e-5, atol=0)
    how = bound.execution_choice(batch)
    assert (how.engine, how.physical_batch_size) == ("one-example", 1)
    assert "one example at a time, since" in how.why and (
        "layer" in how.why or "parameter" in how.why
    )


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_asked_for_by_name_is_refused(kind: type[nn.Module]) -> None:
    model, loss, batch = built(kind)
    for clipper in (Clipper(1.0, engine="bookkeeping"), Clipper(1.0, "hutch")):
        with pytest.raises(NotCaptured, match="engine='one-example'"):
            clipper.clip(model, loss, batch)


def test_the_two_functions_fall_back_too() -> None:
    model, loss, batch = built(Windows)
    norms = oracle_norms(oracle_gradients(model, loss, batch))
    torch.testing.assert_close(
        per_example_norms(model, loss, batch).double(), norms.double(), rtol=1e-5, atol=0
    )
    assert (
        clipped_gradients(model, loss, batch, 1.0).gradients.keys()
        == dict(model.named_parameters()).keys()
    )


@pytest.mark.parametrize("kind", MODELS)
def test_the_explanation_names_the_layer(kind: type[nn.Module]) -> None:
    model, loss, batch = built(kind)
    record = explain(Clipper(1.0), model, loss, batch)
    assert (
        record["engine"].startswith("one example")
        and "one example at a time, since" in record["why"]
    )
    assert [row["engine"] for row in record["alternatives"]] == ["one-example"]
    assert sum(row["count"] for row in record["layers"]) == len(list(model.parameters()))
    assert record["non_private"]["seconds"] > 0 and record["non_private"]["mib"] > 0


def test_with_the_layer_frozen_the_planner_is_free_again() -> None:
    model, loss, batch = built(Windows)
    bound = Clipper(1.0, physical_batch_size=EXAMPLES).bind(model, loss)
    assert bound.execution_choice(batch).engine == "one-example"
    model.layer.requires_grad_(False)
    assert bound.execution_choice(batch).engine == "bookkeeping"


def test_a_module_that_vmap_refuses_is_repeated_example_by_example() -> None:
    """Its own forward pass only; the rest of the model is still captured."""
    torch.manual_seed(0)
    model = nn.Sequential(Scale(), nn.Linear(6, 3), Mean())
    batch = batch_of(4, 6)
    gradients = oracle_gradients(model, cross_entropy, batch)
    clip = float(oracle_norms(gradients).median())
    expected = oracle_clipped_sum(gradients, clip)
    actual = Clipper(clip, engine="bookkeeping").clip(model, cross_entropy, batch).gradients
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-7)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Scale(nn.Module):
    """Looks at a value: vmap refuses that, however little depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        assert float(x.detach().abs().sum()) >= 0
        return x * self.scale


# ------------------------------------------------------------------------------------------------
# real ones

LENGTH = 7
TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}


def _next_word(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["x"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["x"][:, 1:], reduction="none").mean(1)


def _class(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).logits, batch["y"], reduction="none")


def _mamba(hf: Any) -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**TEXT, state_size=4, use_mambapy=False))


def _mixtral(hf: Any) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 20}
    experts = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, **heads, **experts))


def _swin(hf: Any) -> nn.Module:
    shape = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2],
        "num_heads": [2],
        "window_size": 4,
    }
    return hf.SwinForImageClassification(hf.SwinConfig(**shape, num_labels=3, drop_path_rate=0.0))


def _deberta(hf: Any) -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    places = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    heads = {
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 20,
        "num_labels": 3,
    }
    config = hf.DebertaV2Config(**TEXT, **dropout, **places, **heads)
    return hf.DebertaV2ForSequenceClassification(config)


REAL = [(_mamba, _next_word), (_mixtral, _next_word), (_swin, _class), (_deberta, _class)]


@pytest.mark.parametrize(("make", "loss"), REAL, ids=["mamba", "mixtral", "swin", "deberta"])
def test_architectures_without_a_batching_rule(make: Any, loss: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make(transformers)
    x = torch.randn(3, 3, 16, 16) if make is _swin else torch.randint(3, 40, (3, LENGTH))
    batch = {"x": x, "y": torch.randint(0, 3, (3,))}
    gradients = oracle_gradients(model, loss, batch)
    clip = float(oracle_norms(gradients).median())
    bound = Clipper(clip).bind(model, loss)
    expected, actual = oracle_clipped_sum(gradients, clip), bound.clip(batch).gradients
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6)
    assert bound.execution_choice(batch).engine == "one-example"
    with pytest.raises(NotCaptured):
        Clipper(clip, engine="bookkeeping").clip(model, loss, batch)


class BiasOfTheDecoder(nn.Module):
    """The head keeps the bias that its decoder adds (BERT's and RoBERTa's, for masked words); or
    adds it once more itself.
    """

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.decoder = nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.randn(3))
        self.decoder.bias = self.bias
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x) + (self.bias if self.again else 0)


@pytest.mark.parametrize("again", [False, True])
def test_what_a_child_holds_of_its_parent_is_counted_once_a_use(again: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), BiasOfTheDecoder(again))
    batch = batch_of(6)
    gradients = oracle_gradients(model, cross_entropy, batch)
    clip = float(oracle_norms(gradients).median())
    expected = oracle_clipped_sum(gradients, clip)
    actual = Clipper(clip, engine="bookkeeping").clip(model, cross_entropy, batch).gradients
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-7)


class Depths(nn.Module):
    """Positions for every depth, as YOLOS has: [depths, 1, positions, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(-1, 1, 30).view(1, 1, 5, 6))

    def forward(self, size: tuple[int, int]) -> Tensor:
        return self.places * size[0]


class WithDepths(nn.Module):
    """One depth alone: the table's first dimension is as long as one example's."""

    def __init__(self) -> None:
        super().__init__()
        self.depths, self.inner, self.head = Depths(), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = self.depths((2, 2))
        return self.head((self.inner(x) + table[0]).tanh().mean(1))


def test_a_table_of_one_depth_is_not_taken_for_mixing() -> None:
    torch.manual_seed(0)
    model, batch = WithDepths(), batch_of(5, 6)
    gradients = oracle_gradients(model, cross_entropy, batch)
    clip = float(oracle_norms(gradients).mean())
    found = clipped_gradients(model, cross_entropy, batch, clip).gradients
    for name, g in oracle_clipped_sum(gradients, clip).items():
        torch.testing.assert_close(found[name], g)
    with pytest.raises(NotCaptured, match=r"'depths'.*example dimension.*engine='one-example'"):
        Clipper(clip, engine="bookkeeping").clip(model, cross_entropy, batch)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.5)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("computed", [nn.utils.weight_norm, pruned])
def test_weights_that_hooks_compute_are_trained(
    computed: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    layers = (computed(nn.Conv1d(2, 4, 3)), nn.Tanh(), nn.Flatten(), computed(nn.Linear(16, 3)))
    model, batch = nn.Sequential(*layers), batch_of(2, 6)
    gradients = oracle_gradients(model, cross_entropy, batch)
    clip = float(oracle_norms(gradients).mean())
    bound = Clipper(clip, engine="bookkeeping").bind(model, cross_entropy)
    found = bound.clip(batch, step=0).gradients
    for name, g in oracle_clipped_sum(gradients, clip).items():
        assert g.abs().max() > 0, name
        torch.testing.assert_close(found[name], g)
    for layer in (model[0], model[3]):  # before: a wrapper that no later look could read
        weight = vars(layer)["weight"]
        assert type(weight) is Tensor and weight.untyped_storage().nbytes()
    for step in range(1, 4):
        bound.clip(batch_of(2, 6), step=step)


def test_what_a_layer_keeps_of_its_input_is_no_wrapper() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last, self.calls = x.detach(), getattr(self, "calls", 0) + 1
            return super().forward(x)

    torch.manual_seed(0)
    model, batch = nn.Sequential(Keeps(4, 3)), batch_of(4)
    bound = Clipper(1.0, engine="bookkeeping").bind(model, cross_entropy)
    for step in range(4):
        bound.clip(batch, step=step)
    assert "last" not in vars(model[0]) or type(model[0].last) is Tensor
