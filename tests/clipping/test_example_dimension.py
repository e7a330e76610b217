"""Every captured layer has to see the examples as its first dimension, and modules whose forward
pass is repeated may draw nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn

from quietgrad.clipping import Clipper, clipped_gradients

EXAMPLES = 4
BOOKKEEPING = Clipper(1.0, engine="bookkeeping")


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


class Positions(nn.Module):
    """Word and position embeddings; ``leading`` is the leading dimensions that the position ids
    have.
    """

    def __init__(self, leading: tuple[int, ...], table: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 6)
        self.positions = table
        self.head = nn.Linear(6, 3)
        self.leading = leading

    def forward(self, ids: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1]).expand(*self.leading, -1)
        return self.head((self.words(ids) + self.positions(where)).tanh().mean(1))


class OwnTable(nn.Module):
    """An embedding written by hand: no rule, so the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


@pytest.mark.parametrize("physical_batch_size", [None, 1, 3])
@pytest.mark.parametrize("table", [lambda: nn.Embedding(8, 6), OwnTable], ids=["rule", "fallback"])
def test_inputs_with_one_row_for_all_examples_are_expanded(table, physical_batch_size) -> None:
    assert_equal_to_oracle(
        Positions((1,), table()), cross_entropy, ids_of(), physical_batch_size=physical_batch_size
    )


@pytest.mark.parametrize("length", [5, EXAMPLES], ids=["other-length", "length-equals-batch-size"])
@pytest.mark.parametrize("table", [lambda: nn.Embedding(8, 6), OwnTable], ids=["rule", "fallback"])
@pytest.mark.parametrize("function", [Clipper.clip, Clipper.norms])
def test_inputs_without_an_example_dimension_are_refused(function, table, length: int) -> None:
    # With as many positions as examples, every shape looks right.
    with pytest.raises(ValueError, match=r"layer 'positions'.*not the example.*example dimension"):
        function(BOOKKEEPING, Positions((), table()), cross_entropy, ids_of(length))


class SoftPrompt(nn.Module):
    """Learned rows added to every example, from a module that is called without inputs."""

    def __init__(self, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prompt = Table(length)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.prompt()).tanh().mean(1))


class Table(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(length, 6))

    def forward(self) -> Tensor:
        return self.rows * 1.0


@pytest.mark.parametrize("length", [5, EXAMPLES], ids=["other-length", "length-equals-batch-size"])
def test_module_called_without_inputs_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="layer 'prompt'"):
        BOOKKEEPING.clip(SoftPrompt(length), cross_entropy, batch_of(length, 6))


def test_frozen_layer_without_an_example_dimension_is_allowed() -> None:
    model = Positions((), nn.Embedding(8, 6).requires_grad_(False))
    assert_equal_to_oracle(model, cross_entropy, ids_of())


def test_time_first_inputs_are_refused() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).mean(0)

    for length in (6, EXAMPLES):
        with pytest.raises(ValueError, match=r"layer 'layer'.*not the example"):
            BOOKKEEPING.clip(TimeFirst(), cross_entropy, batch_of(length, 5))


@pytest.mark.parametrize("layer", ["rnn", "attention"])
def test_modules_with_time_first_say_where_their_examples_are(layer: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(6, 6) if layer == "rnn" else nn.MultiheadAttention(6, 2)
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            return self.head((self.rnn(x) if layer == "rnn" else self.rnn(x, x, x))[0].mean(0))

    torch.manual_seed(0)
    for length in (5, EXAMPLES, 1):
        model, batch = Model(), batch_of(length, 6)
        assert_equal_to_oracle(model, cross_entropy, batch)
        BOOKKEEPING.clip(model, cross_entropy, batch)


def test_dropout_in_a_fallback_module_is_taken_one_example_at_a_time() -> None:
    """Repeated for the gradients, its forward pass would draw another mask."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))
            self.drop = nn.Dropout(0.1)
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(x * self.scale))

    model = nn.Sequential(Block())
    with pytest.raises(
        ValueError, match=r"layer '0' \(Block\).*'scale'.*'drop'.*dropout with probability 0.1"
    ):
        BOOKKEEPING.clip(model, cross_entropy, batch_of(5))
    total = clipped_gradients(model, cross_entropy, batch_of(5), 1e-3).gradients
    assert 0 < sum(float(g.square().sum()) for g in total.values()) ** 0.5 <= EXAMPLES * 1e-3
    assert_equal_to_oracle(model.eval(), cross_entropy, batch_of(5))


def test_random_numbers_of_a_fallback_module_are_not_ignored() -> None:
    # Its forward pass is repeated for the gradients: with other random numbers these would be
    # another function's. One example at a time nothing is repeated.
    class Jitter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.scale, 0.5, training=self.training)

    model = nn.Sequential(Jitter(), nn.Linear(5, 3)).train()
    with pytest.raises(ValueError, match=r"layer '0' has no rule.*draws random"):
        Clipper(1.0, engine="bookkeeping").bind(model, cross_entropy).clip(batch_of(5))
    bound = Clipper(1.0).bind(model, cross_entropy)
    bound.clip(batch_of(5))
    assert bound.execution_choice(batch_of(5)).engine == "one-example"
