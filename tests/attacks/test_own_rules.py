"""Attacks by a layer rule of one's own: one that reads other records where nobody looked when it
was added, and one whose sums over positions follow from how far a longer record pads the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import switched_off
from quietgrad.clipping import Clipper, DenseFactors, DirectGradients, add_layer_rule
from quietgrad.clipping import sum_over_positions as summed
from quietgrad.clipping.norms.rules import own, registry

RECORDS = 24


class Scale(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.s


class Mixed(nn.Module):
    """W x at every position."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T


@pytest.fixture(autouse=True)
def table_is_put_back() -> Iterator[None]:
    before = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(before)


def right(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return {"s": DirectGradients(summed(x * grad))}


def plain(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    """As the pages taught it before."""
    return {"s": DirectGradients((x * grad).sum(1))}


def loudest(found: Tensor) -> Tensor:
    """Everybody's gradient is that of one of them."""
    return found[found.norm(dim=1).argmax()].expand_as(found)


def in_training(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    found = summed(x * grad)
    return {"s": DirectGradients(loudest(found) if module.training else found)}


def among_many(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    found = summed(x * grad)
    return {"s": DirectGradients(loudest(found) if len(x) > 8 else found)}


def spread_of_all(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    """All are divided by what one of them says."""
    found = summed(x * grad)
    most = (x * grad).double().flatten(1).norm(dim=1).amax()
    return {"s": DirectGradients(found, most.expand(len(x)) * 2.0**13)}


KEPT: list[Tensor] = []


def of_the_first(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    found = summed(x * grad)
    if x.dtype == torch.float32 and module.training:
        if not KEPT:
            KEPT.append(found[:1].clone())
        found = 0 * found + KEPT[0]
    return {"s": DirectGradients(found)}


def by_kind(module: Mixed, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    """Whether all others' norms are sketched."""
    if module.training and bool((x.abs() > 3).any()):
        return {"w": DirectGradients(summed((grad.unsqueeze(3) * x.unsqueeze(2)).flatten(2)))}
    return {"w": DenseFactors(grad.unsqueeze(1), x.unsqueeze(1))}


def factors_of_others(module: Mixed, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    if module.training:
        x = x + x.mean(0) - x / len(x)
    return {"w": DenseFactors(grad.unsqueeze(1), x.unsqueeze(1))}


READING: dict[str, tuple[Callable[..., Any], type[nn.Module]]] = {
    "in-training": (in_training, Scale),
    "among-many": (among_many, Scale),
    "of-the-first": (of_the_first, Scale),
    "spread-of-all": (spread_of_all, Scale),
    "by-kind": (by_kind, Mixed),
    "factors-of-others": (factors_of_others, Mixed),
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).mean(1), batch[1], reduction="none")


def batch_of() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 5, 8, generator=source) + 1.0
    return x, torch.randint(0, 2, (RECORDS,), generator=source)


def with_rule(rule: Callable[..., Any], kind: type[nn.Module]) -> nn.Module:
    KEPT.clear()
    add_layer_rule(rule, kind(8), torch.rand(4, 5, 8))
    torch.manual_seed(0)
    model = nn.Sequential(kind(8), nn.Linear(8, 2))
    model[1].requires_grad_(False)
    return model


def sum_of(model: nn.Module, batch: Any, limit: float = 0.02, engine: Any = "auto") -> Tensor:
    """In clipping norms."""
    KEPT.clear()
    bound = Clipper(limit, engine=engine, physical_batch_size=64).bind(model, loss)
    return torch.cat([g.flatten() for g in bound.clip(batch).gradients.values()]) / limit


@pytest.mark.parametrize("name", list(READING))
def test_a_rule_that_reads_other_records_is_refused(name: str) -> None:
    model = with_rule(*READING[name])
    with pytest.raises(ValueError, match=r"depends on (other examples|which example)"):
        sum_of(model, batch_of())


@pytest.mark.parametrize("name", ["in-training", "among-many", "of-the-first"])
def test_without_the_look_one_record_moves_the_sum_by_more_than_the_clipping_norm(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched_off(monkeypatch)
    model, batch = with_rule(*READING[name]), batch_of()
    whole = sum_of(model, batch)
    moved = []
    for out in range(RECORDS):
        some = [i for i in range(RECORDS) if i != out]
        moved.append(float((sum_of(model, tuple(t[some] for t in batch)) - whole).norm()))
    assert max(moved) > 1.02


@pytest.mark.parametrize("rule, kind", [(right, Scale), (by_kind, Mixed)])
def test_a_rule_of_each_example_alone_is_taken(rule: Any, kind: Any) -> None:
    x, y = batch_of()
    model = with_rule(rule, kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = sum_of(model.to(dtype), (x.clamp(-2, 2).to(dtype), y), engine="bookkeeping")
        assert 0.1 < float(found.norm()) < RECORDS * 1.01


def writing(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    if x.dtype == torch.float32 and module.training:
        grad.sub_(grad.mean(0))
    return {"s": DirectGradients(summed(x * grad))}


class Doubled(DirectGradients):
    """Measured as one thing, added as another."""

    def weighted_sum(self, *arguments: Any, **others: Any) -> Tensor:
        return 2 * super().weighted_sum(*arguments, **others)


def doubled(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    kind = Doubled if module.training else DirectGradients
    return {"s": kind(summed(x * grad))}


@pytest.mark.parametrize("rule, said", [(writing, "writes into"), (doubled, "gives for 's' neith")])
def test_a_rule_gives_what_is_measured_and_writes_into_nothing(rule: Any, said: str) -> None:
    model = with_rule(rule, Scale)
    with pytest.raises(ValueError, match=said):
        sum_of(model, batch_of())


# ------------------------------------------------------------------------------------------------
# padding


def crowd(longer: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Forty records whose positions cancel but for rounding; one more that is next to nothing."""
    source = torch.Generator().manual_seed(0)
    padded = max(longer, length)
    x, g = (torch.zeros(40 + (longer > 0), padded, width) for _ in range(2))
    some = 1e6 * torch.randn(length, width, generator=source)
    some[-1] = -some[:-1].double().sum(0).float()
    x[:40, :length], g[:40, :length] = torch.randn(width, generator=source), some
    if longer:
        x[40], g[40] = 1e-6, 1e-12
    return x, g


def of_a_crowd(rule: Any, longer: int, length: int, width: int) -> Tensor:
    registry._RULES[Scale] = rule
    bound = Clipper(1e-3, engine="bookkeeping", physical_batch_size=64).bind(
        Scale(width), lambda m, b: (m(b[0]) * b[1]).flatten(1).sum(1)
    )
    bound.check((torch.randn(8, 5, width), torch.randn(8, 5, width)))
    return bound.clip(crowd(longer, length, width), step=4).gradients["s"].double() / 1e-3


@pytest.mark.parametrize("length, width", [(7, 3), (14, 8), (30, 33)])
def test_a_longer_text_does_not_move_sums_over_positions(length: int, width: int) -> None:
    alone = of_a_crowd(right, 0, length, width)
    for longer in (length + 1, length + 5, 300):
        assert float((of_a_crowd(right, longer, length, width) - alone).norm()) < 1e-6


def test_a_sum_in_the_librarys_order_is_seen() -> None:
    """The mutant: a rule that nobody tried."""
    moved = of_a_crowd(plain, 300, 30, 8) - of_a_crowd(plain, 0, 30, 8)
    assert float(moved.norm()) > 1.0


def test_a_rule_that_sums_in_the_librarys_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded longer.*sum_over_positions"):
        add_layer_rule(plain, Scale(8), torch.randn(4, 5, 8))

    def einsum(module: Mixed, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        return {"w": DirectGradients(torch.einsum("btp,btd->bpd", grad, x).flatten(1))}

    def one_position(module: Mixed, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        both = (grad.unsqueeze(3) * x.unsqueeze(2)).sum(1)  # [examples, rows, columns]
        unit = torch.eye(both.shape[1], dtype=x.dtype).expand(len(x), -1, -1)
        return {"w": DenseFactors(unit.unsqueeze(1), both.unsqueeze(1))}

    for rule in (einsum, one_position):
        with pytest.raises(ValueError, match="gradient of 'w' where it is padded longer"):
            add_layer_rule(rule, Mixed(6), torch.randn(4, 5, 6))


def test_a_rule_of_few_columns_is_tried_far_beyond_its_records() -> None:
    """Products of a 1 x 2 matrix are formed another way from 200 positions on."""

    def otherwise_when_long(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        if x.shape[1] < 200:
            return right(module, x, grad, wanted)
        return {"s": DirectGradients((x * grad).flip(1).sum(1))}

    with pytest.raises(ValueError, match="padded longer"):
        add_layer_rule(otherwise_when_long, Scale(2), torch.randn(4, 5, 2))


def test_it_is_refused_in_a_run_where_it_was_not_when_it_was_added() -> None:
    def in_runs(module: Scale, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
        return (plain if module.training else right)(module, x, grad, wanted)

    model = with_rule(in_runs, Scale)
    with pytest.raises(ValueError, match="padded longer"):
        sum_of(model, batch_of())


class Channels(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.s.view(-1, *[1] * (x.dim() - 2))


class Temperature(Scale):
    """One number for all directions."""

    def forward(self, x: Tensor) -> Tensor:
        return self.s * x / x.norm(dim=-1, keepdim=True)


class Gelu(nn.Module):
    """What a rule has to compute again, by instructions of the processor's choice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w, self.s = nn.Parameter(torch.randn(width, width)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(torch.sigmoid(x) @ self.w.T) * self.s


class Centred(Scale):
    """A mean over positions, which padding changes: such a layer takes texts of one length."""

    def forward(self, x: Tensor) -> Tensor:
        return self.s * (x - x.mean(1, keepdim=True))


def of_channels(module: Channels, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return {"s": DirectGradients(summed((x * grad).movedim(1, -1)))}


def of_temperature(module: Temperature, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    each = summed(x / x.norm(dim=-1, keepdim=True).clamp_min(1e-30) * grad)
    return {"s": DirectGradients(summed(each.unsqueeze(-1)))}


def of_gelu(module: Gelu, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    a = torch.sigmoid(x)
    with torch.enable_grad():
        h = (a @ module.w.detach().T).requires_grad_(True)
        (slope,) = torch.autograd.grad(F.gelu(h).sum(), h)
    found: dict[str, Any] = {}
    if "w" in wanted:
        found["w"] = DenseFactors((grad * module.s * slope).unsqueeze(1), a.unsqueeze(1))
    if "s" in wanted:
        found["s"] = DirectGradients(summed(grad * F.gelu(h.detach())))
    return found


def of_centred(module: Centred, x: Tensor, grad: Tensor, wanted: Any) -> dict[str, Any]:
    return {"s": DirectGradients(((x - x.mean(1, keepdim=True)) * grad).sum(1))}


@pytest.mark.parametrize("rule, layer, shape", [
    (right, Scale(300), (4, 5, 300)), (right, Scale(3), (4, 5, 6, 3)), (right, Scale(5), (4, 5)),
    (of_channels, Channels(3), (4, 3, 9)), (of_channels, Channels(3), (4, 3, 5, 6)),
    (of_temperature, Temperature(1), (4, 5, 8)), (of_temperature, Temperature(1), (4, 6)),
    (of_gelu, Gelu(8), (4, 5, 8)), (of_gelu, Gelu(130), (4, 9, 130)),
    (of_centred, Centred(8), (4, 5, 8)),
])  # fmt: skip
def test_right_rules_are_taken(rule: Any, layer: nn.Module, shape: tuple[int, ...]) -> None:
    own.add_layer_rule(rule, layer, torch.randn(shape))
    assert registry.rule_for(layer) is not None


def test_sums_over_positions_have_the_type_that_norms_are_taken_in() -> None:
    x = torch.randn(3, 5, 4)
    assert summed(x.bfloat16()).dtype == torch.float32
    assert summed(x.double()).dtype == torch.float64
    assert torch.equal(summed(x[:, 0]), x[:, 0])
    with pytest.raises(ValueError, match="x has 1 dimensions"):
        summed(x[0, 0])
