"""What is done once where it was done for every layer or every few examples: sums of small
products, walks through a model, layouts and choices.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from quietgrad.clipping import Clipper
from quietgrad.clipping.capture.layout import Layouts, SharedInputs, layout_of
from quietgrad.clipping.capture.layout.modules import (
    modules_of,
    named_modules_of,
    named_parameters_of,
    tensors_in,
    walked_once,
)
from quietgrad.clipping.norms.factors.sums import examples
from quietgrad.clipping.norms.factors.sums.examples import sum_of_products, sum_of_spans
from quietgrad.clipping.norms.rules import registry
from quietgrad.clipping.planner import execution
from quietgrad.clipping.planner.execution import Planned, choose_execution
from quietgrad.tensors import Batch


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def records(n: int, width: int = 6) -> Batch:
    torch.manual_seed(1)
    return (torch.randn(n, width), torch.randint(0, 3, (n,)))


class Shared(nn.Module):
    """A module in two places, one inside another, a missing one and a shared parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.first = nn.Sequential(nn.Sequential(self.inner, nn.ReLU()), nn.LayerNorm(6))
        self.nothing = None
        self.register_module("absent", None)
        self.register_parameter("none", None)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.inner.weight
        self.register_buffer("table", torch.zeros(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.first(x)))


def test_walks_find_what_torch_finds_in_its_order() -> None:
    model = Shared()
    assert named_modules_of(model) == list(model.named_modules())
    assert modules_of(model) == list(model.modules())
    assert [name for name, _ in named_parameters_of(model)] == [
        name for name, _ in model.named_parameters()
    ]
    found = {id(t) for t in tensors_in(model)}
    assert found == {id(t) for t in (*model.parameters(), *model.buffers())}


def test_a_walk_is_of_one_model_and_ends() -> None:
    model, other = Shared(), nn.Sequential(nn.ReLU())
    with walked_once(model):
        model.added = nn.ReLU()
        other.append(nn.ReLU())
        assert len(modules_of(model)) == len(list(model.modules())) - 1
        assert modules_of(other) == list(other.modules())
        with walked_once(other):
            assert modules_of(other) == list(other.modules())
        assert len(modules_of(model)) == len(list(model.modules())) - 1
    assert modules_of(model) == list(model.modules())


@pytest.mark.parametrize("what", ["module", "buffer", "parameter", "mode"])
def test_what_a_loss_adds_to_the_model_is_seen_at_the_end_of_the_step(what: str) -> None:
    """Though the step walks through the model once."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0))
    armed = False

    def adding(model: nn.Module, batch: Batch) -> Tensor:
        if armed and what == "module":
            model.append(nn.Linear(3, 3))
        if armed and what == "buffer":
            model[1].register_buffer("seen", batch[0].mean())
        if armed and what == "parameter":
            model[1].register_parameter("seen", nn.Parameter(batch[0].mean()))
        if armed and what == "mode":
            model[1].train(not model[1].training)
        return loss(model, batch)

    bound = Clipper(1.0).bind(model, adding)
    for step in (0, 1, 2):
        bound.clip(records(8), step=step)
    armed = True
    with pytest.raises(ValueError, match=r"seen|'2|switched|rewritten|changes"):
        bound.clip(records(8), step=4)  # not a guarded step: nothing but the walks sees it


def test_a_layout_lasts_for_as_long_as_it_is_the_models() -> None:
    model, shared, layouts = Shared(), SharedInputs(), Layouts()

    def now():
        found, fresh = layouts.of(model, shared), layout_of(model, shared)
        assert list(found.parameters) == list(fresh.parameters)
        assert all(a is b for a, b in zip(*(x.parameters.values() for x in (found, fresh))))
        assert found.sites == fresh.sites and found.frozen == fresh.frozen
        return found

    first = now()
    assert layouts.of(model, shared) is first
    model.last.requires_grad_(False)
    frozen = now()
    assert frozen is not first and "last.weight" not in frozen.parameters
    model.last.requires_grad_(True)
    model.last = nn.Linear(6, 3)  # another one of its name
    assert now() is not frozen
    model.inner.weight = nn.Parameter(torch.randn(6, 6))  # no longer shared
    assert "again.weight" in now().parameters
    model.first[1].__class__ = type("Own", (nn.LayerNorm,), {})
    assert next(s for s in now().sites if s.name == "first.1").rule is None
    torch.nn.utils.parametrizations.weight_norm(model.last)
    assert next(s for s in now().sites if s.name == "last").rule is None


def test_a_rule_that_is_added_counts_from_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Own", (nn.Linear,), {})
    model, shared, layouts = nn.Sequential(kind(6, 3)), SharedInputs(), Layouts()
    assert layouts.of(model, shared).sites[0].rule is None
    monkeypatch.setitem(registry._RULES, kind, registry.linear_rule)
    assert layouts.of(model, shared).sites[0].rule is registry.linear_rule


@pytest.mark.parametrize("n", [1, 3, 4, 5, 11, 64, 200, 263])
@pytest.mark.parametrize("together", [1, 4, 64])
def test_sums_side_by_side_are_those_of_spans(
    n: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are added to which does not follow from how many lie side by side."""
    torch.manual_seed(0)
    left, right = (torch.randint(-9, 9, (n, k)).float() for k in (3, 5))
    whole = left.T @ right
    for side_by_side in (1, 15, 70, 2**18):
        monkeypatch.setattr(examples, "SIDE_BY_SIDE", side_by_side)
        assert torch.equal(sum_of_products(left, right, torch.float32, together), whole)
    # Numbers of which every order of additions makes another sum.
    left, right = torch.randn(n, 1) * 10.0 ** torch.randint(-6, 6, (n, 1)), torch.ones(n, 1)
    spans = sum_of_spans(n, lambda few: left[few].sum(0, keepdim=True), 1)
    for side_by_side in (1, 15, 70, 2**18):
        monkeypatch.setattr(examples, "SIDE_BY_SIDE", side_by_side)
        assert torch.equal(sum_of_products(left, right, torch.float32, 1), spans)


def test_copies_round_little_however_many_lie_side_by_side() -> None:
    """4,096 copies in one sum are off by 0.14 of one of them (``sums/examples.py``)."""
    row, weights = torch.full((4096, 20), 0.7371), torch.full((4096, 1), 0.3333)
    right = weights[0].double() * row[0].double() * 4096
    for together in (4, 64):
        found = sum_of_products(weights, row, torch.float32, together).double()
        assert float((found - right).abs().max()) < 0.01 * float(row[0, 0])


def test_a_choice_is_remembered_and_is_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    model, clipper = nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3)), Clipper(1.0)
    bound = clipper.bind(model, loss)
    bound.clip(records(20), step=0)
    layout = layout_of(model)
    planned = Planned(bound.planned(layout, records(20)).model)
    speed = clipper.policies(layout)["0.weight"].speed
    asked = []

    def policies():
        asked.append(1)
        return clipper.policies(layout)

    engines = ("bookkeeping", "one-example")
    for budget in (1e12, 3e12, 1e4):  # more memory than a plain step takes is one budget
        for n in (20, 30):
            for _ in range(2):
                found = planned.choose(policies, n, speed, budget, engines)
                right = choose_execution(
                    planned.model, clipper.policies(layout), n, speed, budget, engines
                )
                assert found == right
    assert len(asked) == 4
    monkeypatch.setattr(execution, "MOST_CHOICES", 2)
    planned.choose(policies, 40, speed, 1e12, engines)
    assert len(planned._chosen) == 1


def test_an_example_is_not_counted_with_its_batchs_memory() -> None:
    """It is a slice of it: a head on 512 embeddings was taken in two halves for that."""
    batch = (torch.randn(512, 384), torch.randint(0, 3, (512,)))
    model = nn.Linear(384, 3)
    bound = Clipper(1.0).bind(model, loss)
    how = bound.execution_choice(batch)
    assert how.physical_batch_size == 512 and how.bytes < 2**20
    assert bound.planned(layout_of(model), batch).model.saved_bytes < 1024


def test_a_parameter_under_another_name_makes_another_layout() -> None:
    """Pruning in the middle of a run: the same tensors, in the same order."""
    model, shared, layouts = nn.Sequential(nn.Linear(6, 3, bias=False)), SharedInputs(), Layouts()
    before = layouts.of(model, shared)
    prune.random_unstructured(model[0], "weight", 0.5)
    assert layouts.of(model, shared) is not before
    assert set(layouts.of(model, shared).parameters) == {"0.weight_orig"}
