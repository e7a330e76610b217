"""Users are clipped as one: against an oracle that takes one user at a time through autograd, over
the shared list of models, in groups of different sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, Case, cross_entropy
from torch import Tensor, nn

from quietgrad.clipping import Clipper, UserBatch
from quietgrad.clipping.capture.examples import Examples, whole_users
from quietgrad.clipping.capture.views import slice_batch
from quietgrad.clipping.norms import rounding
from quietgrad.clipping.norms.estimators import sketches
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.factors.groups import RowGroups
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_norms
from quietgrad.randomness import RandomKey

pytestmark = pytest.mark.usefixtures("examined_once")
SMALL = [case for case in CASES if case.name != "minilm"]
SIZES = [(1, 3), (2, 1, 1), (4,)]


def gradients_of_users(
    model: nn.Module, loss: Any, batch: Any, sizes: tuple[int, ...], combined: str
) -> list[dict[str, Tensor]]:
    """[users] parameter name -> gradient, by plain autograd, a user at a time."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    users: list[dict[str, Tensor]] = []
    start = 0
    for size in sizes:
        losses = loss(model, slice_batch(batch, start, start + size))
        start += size
        total = losses.mean() if combined == "mean" else losses.sum()
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        pairs = zip(parameters.items(), found, strict=True)
        users.append({name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs})
    return users


def assert_like_oracle(
    case: Case, sizes: tuple[int, ...], combined: Any, tolerance: float = 1e-5, **settings: Any
) -> None:
    model, loss, batch = case.build()
    gradients = gradients_of_users(model, loss, batch, sizes, combined)
    norms = oracle_norms(gradients)
    clip = float(norms.median())
    expected = oracle_clipped_sum(gradients, clip)
    bound = Clipper(clip, combined=combined, **settings).bind(model, loss)
    users = UserBatch(batch, sizes)
    clipped = bound.clip(users, step=0)
    torch.testing.assert_close(
        bound.norms(users, step=0).double(), norms.double(), rtol=tolerance, atol=0
    )
    assert clipped.private.examples == len(sizes)
    largest = max(float(g.norm()) for g in expected.values())
    for name, g in expected.items():
        error = float((clipped.gradients[name] - g).norm())
        assert error < tolerance * max(float(g.norm()), 1e-2 * largest), name


@pytest.mark.grid(7, "models times ways of counting")
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_users_agree_with_autograd(case: Case, sizes: tuple[int, ...]) -> None:
    assert_like_oracle(case, sizes, "mean")


@pytest.mark.grid(4, "estimators times cuts")
@pytest.mark.parametrize("settings", [{"physical_batch_size": n} for n in (1, 2, 3)], ids=str)
@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost", "ghost64"])
@pytest.mark.parametrize("case", [c for c in SMALL if c.name in ("cnn-groupnorm", "llama-tied")])
def test_estimators_and_micro_batches_agree(case: Case, estimator: Any, settings: Any) -> None:
    for combined in ("mean", "sum"):
        assert_like_oracle(case, (1, 3), combined, estimator=estimator, **settings)


@pytest.mark.grid(4, "the same models as with autograd")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_one_user_at_a_time_agrees(case: Case) -> None:
    assert_like_oracle(case, (1, 3), "sum", engine="one-example")


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
@pytest.mark.parametrize("name", ["cnn-groupnorm", "llama-tied"])
def test_a_sketch_of_one_record_is_the_same_beside_a_user_of_two(name: str, estimator: Any) -> None:
    """Which projection a user meets, and on which side, is not a matter of who else is there: both
    estimates were far apart if the dimension that is projected followed the batch.
    """
    model, loss, batch = next(case for case in CASES if case.name == name).build()
    drawn = Projections(RandomKey.from_seed(3), 0)
    settings: Any = {"sketch_dim": 4, "combined": "sum", "physical_batch_size": 4}
    bound = Clipper(0.1, estimator, **settings).bind(model, loss)
    alone = bound.norms(UserBatch(slice_batch(batch, 0, 1), (1,)), drawn, step=5)
    beside = bound.norms(UserBatch(slice_batch(batch, 0, 3), (1, 2)), drawn, step=5)
    torch.testing.assert_close(alone[0], beside[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("estimator", ["hutch", "hutch++"])
def test_sketches_estimate_a_users_norm(estimator: Any) -> None:
    model, loss, batch = CASES[1].build()
    norms = oracle_norms(gradients_of_users(model, loss, batch, (1, 3), "mean"))
    clipper = Clipper(1.0, estimator, sketch_dim=512, combined="mean")
    found = clipper.norms(model, loss, UserBatch(batch, (1, 3)))
    torch.testing.assert_close(found.double(), norms.double(), rtol=0.2, atol=0)


def mlp() -> tuple[nn.Module, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return model, cross_entropy, {"x": torch.randn(9, 5), "y": torch.randint(0, 3, (9,))}


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_a_mean_in_half_precision_is_divided_alike_in_any_company(engine: Any) -> None:
    """257 is 256 in bfloat16. Users as large as each other were divided by the number, beside a
    smaller one by what it rounds to: one user more moved each of the others by half a per cent of
    the clipping norm.
    """
    size, source = 257, torch.Generator().manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    many, few = (torch.randn(n, 4, generator=source).bfloat16() for n in (2 * size, 3))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    bound = Clipper(1e3, combined="mean", engine=engine).bind(model, loss)
    alone = bound.norms(UserBatch(many, (size, size)), step=4)
    beside = bound.norms(UserBatch(torch.cat([few, many]), (3, size, size)), step=4)
    assert torch.equal(alone, beside[1:])


def test_many_records_contribute_no_more_than_the_clipping_norm() -> None:
    """Nine records that pull one way; clipped one by one they would be nine times as long."""
    model, loss, batch = mlp()
    same = {name: tensor[:1].expand(9, *tensor.shape[1:]) for name, tensor in batch.items()}

    def length(combined: Any, batch: Any) -> float:
        found = Clipper(0.01, combined=combined).clip(model, loss, batch).gradients
        return float(sum(g.square().sum() for g in found.values())) ** 0.5

    for combined in ("mean", "sum"):
        assert length(combined, UserBatch(same, (9,))) <= 0.01
    assert length(None, same) > 0.08  # the wrong way


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_what_fills_up_a_user_is_exactly_zero(engine: Any) -> None:
    """A user of one record beside one of eight, whose gradient is not finite: the second is dropped
    whole, and nothing of it reaches the first, whose contribution is what it is alone.
    """
    model, loss, batch = mlp()
    batch["x"][8] = float("inf")
    clipper = Clipper(1.0, combined="mean", engine=engine)
    alone = clipper.clip(model, loss, UserBatch(slice_batch(batch, 0, 1), (1,)))
    both = clipper.bind(model, loss).clip(UserBatch(batch, (1, 8)), step=5)
    assert int(both.private.nonfinite) == 1
    for name, g in alone.gradients.items():
        torch.testing.assert_close(both.gradients[name], g, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("estimator", ["exact", "hutch"])
def test_a_users_contribution_depends_on_no_other_user(estimator: Any) -> None:
    """Filled up beside users of many records, and beside single records not."""
    model, loss, batch = mlp()
    drawn = Projections(RandomKey.from_seed(3), 0)
    bound = Clipper(0.1, estimator, sketch_dim=8, combined="sum").bind(model, loss)

    def of_the_first_user(sizes: tuple[int, ...]) -> dict[str, Tensor]:
        both = bound.clip(UserBatch(slice_batch(batch, 0, sum(sizes)), sizes), drawn, step=5)
        rest = UserBatch(slice_batch(batch, sizes[0], sum(sizes)), sizes[1:])
        others = bound.clip(rest, drawn, step=5)
        return {name: g - others.gradients[name] for name, g in both.gradients.items()}

    first = of_the_first_user((2, 1, 1))
    for sizes in ((2, 7), (2, 1, 3, 3), (2, 2)):
        for name, g in of_the_first_user(sizes).items():
            torch.testing.assert_close(g, first[name], rtol=1e-4, atol=1e-6)


def test_bounds_of_sketches_count_a_users_own_positions() -> None:
    """Filled up with padding and with other users' room, a user has as many additions as alone."""
    from quietgrad.clipping.norms.factors import DenseFactors

    def factors(length: int) -> DenseFactors:
        own = torch.zeros(3, 1, length, 2)
        own[:, :, :300] = 1.0  # what lies behind is padding
        return DenseFactors(own, own)

    def nothing(length: int) -> DenseFactors:
        return DenseFactors(torch.zeros(3, 1, length, 2), torch.ones(3, 1, length, 2))

    counted = {
        (length, sizes): sketches._own_additions(
            [factors(length).merged(RowGroups(sizes))] * 3
            + [nothing(length).merged(RowGroups(sizes))]
        )
        for length in (300, 900)
        for sizes in ((3,), (1, 2))
    }
    assert all(isinstance(found, Tensor) for found in counted.values())
    assert len({float(each) for found in counted.values() for each in found}) == 1


def test_views_of_a_users_records_are_averaged_too() -> None:
    model, loss, rows = mlp()
    batch = {name: tensor[:8] for name, tensor in rows.items()}
    in_views = {name: tensor.unflatten(0, (4, 2)) for name, tensor in batch.items()}
    gradients = gradients_of_users(model, loss, batch, (2, 6), "mean")
    clip = float(oracle_norms(gradients).median())
    expected = oracle_clipped_sum(gradients, clip)
    clipper = Clipper(clip, views=2, combined="mean")
    found = clipper.clip(model, loss, UserBatch(in_views, (1, 3))).gradients
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-6)


def test_public_records_with_views_are_examined_in_rows() -> None:
    model, loss, rows = mlp()
    in_views = {name: tensor[:8].unflatten(0, (4, 2)) for name, tensor in rows.items()}
    bound = Clipper(1.0, views=2).bind(model, loss, guard_batch=in_views)
    assert len(bound.norms(in_views, step=0)) == 4


def divide_by_the_users(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Examples, "averaged", lambda self, losses: losses / len(self))


def forget_to_divide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Examples, "averaged", lambda self, losses: losses)


def fill_up_in_front(patch: pytest.MonkeyPatch) -> None:
    """Of two factors one only."""
    places = RowGroups._filled_up

    def shifted(self: RowGroups, rows: Tensor) -> Tensor:
        filled = places(self, rows)
        return filled.roll(1, 0) if rows.dim() == 4 and rows.shape[-1] > 4 else filled

    patch.setattr(RowGroups, "_filled_up", shifted)


def fill_up_with_the_last_record(patch: pytest.MonkeyPatch) -> None:
    def repeated(self: RowGroups, rows: Tensor) -> Tensor:
        groups = rows.split(self.sizes)
        return torch.cat([torch.cat([g, g[-1:].expand(self.largest - len(g), *g.shape[1:])])
                          for g in groups])  # fmt: skip

    patch.setattr(RowGroups, "_filled_up", repeated)


def mix_up_the_sizes(patch: pytest.MonkeyPatch) -> None:
    of = Examples.of

    def reversed_sizes(batch: Any, views: int, combined: Any) -> Examples:
        return of(UserBatch(batch.records, batch.sizes[::-1]), views, combined)

    patch.setattr(Examples, "of", reversed_sizes)


def first_record_only(patch: pytest.MonkeyPatch) -> None:
    def first(self: RowGroups, values: Tensor) -> Tensor:
        return self._filled_up(values).unflatten(0, (-1, self.largest))[:, 0]

    patch.setattr(RowGroups, "totals", first)


@pytest.mark.parametrize(
    "broken",
    [
        divide_by_the_users,
        forget_to_divide,
        fill_up_in_front,
        fill_up_with_the_last_record,
        mix_up_the_sizes,
        first_record_only,
    ],
)
def test_the_oracle_notices(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("mlp", mlp)
    assert_like_oracle(case, (1, 2, 6), "mean")
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        assert_like_oracle(case, (1, 2, 6), "mean")


def test_one_record_each_is_record_level_clipping_to_the_bit() -> None:
    model, loss, batch = mlp()
    for engine in ("bookkeeping", "one-example"):
        for combined in ("mean", "sum"):
            of_users = Clipper(0.3, combined=combined, engine=engine)
            users = of_users.clip(model, loss, UserBatch(batch, (1,) * 9)).gradients
            records = Clipper(0.3, engine=engine).clip(model, loss, batch).gradients
            assert all(torch.equal(g, records[name]) for name, g in users.items())


def test_no_users_sum_to_zero() -> None:
    model, loss, batch = mlp()
    none = Clipper(1.0, combined="mean").clip(
        model, loss, UserBatch({name: tensor[:0] for name, tensor in batch.items()}, ())
    )
    assert none.private.examples == 0
    assert all(not g.any() for g in none.gradients.values())


def test_micro_batches_hold_whole_users_and_no_more_than_asked_for() -> None:
    sizes = (1, 1, 1, 2, 2, 5, 9, 1)
    spans = [sizes[span] for span in whole_users(sizes, 4)]
    assert [size for span in spans for size in span] == list(sizes)
    assert all(len(span) == 1 or len(span) * max(span) <= 4 for span in spans)
    assert spans == [(1, 1, 1), (2, 2), (5,), (9,), (1,)]
    parts = list(Examples(torch.arange(22), sizes, 1, "mean").parts(4))
    assert [len(part.records) for part in parts] == [3, 4, 5, 9, 1]
    assert list(whole_users((), 4)) == []


@pytest.mark.parametrize(
    ("combined", "batch", "message"),
    [
        ("mean", torch.zeros(3, 5), "nothing says which records"),
        (None, UserBatch(torch.zeros(3, 5), (1, 2)), "build the plan with record_owner"),
        ("mean", UserBatch(torch.zeros(3, 5), (1, 1)), "add up to its records"),
        ("mean", UserBatch(torch.zeros(3, 5), (3, 0)), "at least 1"),
    ],
)
def test_batches_that_do_not_say_whose_records_are_whose_are_refused(
    combined: Any, batch: Any, message: str
) -> None:
    model = nn.Linear(5, 2)
    with pytest.raises(ValueError, match=message) as refused:
        Clipper(1.0, combined=combined).clip(model, lambda m, b: m(b).sum(1), batch)
    assert not any(number in str(refused.value) for number in ("3", "(1, 1)"))


def test_an_unknown_way_to_combine_is_refused() -> None:
    with pytest.raises(ValueError, match="combined='median' is unknown"):
        Clipper(1.0, combined="median")  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["exact", "materialized", "ghost"])
def test_a_crowd_that_cancels_is_not_moved_by_a_user_with_more_records(
    estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six users alike, of whose gradient rounding alone is left, at the clipping norm: where other
    rows were filled up beside them, products of over 128 positions rounded otherwise, and a user
    who adds nothing moved the sum by 6 C.
    """
    monkeypatch.setattr(rounding, "OF_SPREAD", 0.0)  # else they add next to nothing
    source = torch.Generator().manual_seed(0)
    x, g = (torch.randn(100, 64, generator=source) * 1e4 for _ in range(2))
    order = torch.randperm(200, generator=source)
    x, g = torch.cat([x, x])[order].repeat(6, 1), torch.cat([g, -g])[order].repeat(6, 1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) * batch[1]).sum(1)

    clipper = Clipper(0.01, estimator, combined="sum", physical_batch_size=10_000)
    bound = clipper.bind(nn.Linear(64, 64, bias=False), loss)
    alone = bound.clip(UserBatch((x, g), (200,) * 6), step=4).gradients["weight"]
    assert float(alone.norm()) > 5 * 0.01  # each at full length
    for records in (203, 231, 1000):
        more = tuple(torch.cat([t, torch.zeros(records, 64)]) for t in (x, g))
        beside = bound.clip(UserBatch(more, (200,) * 6 + (records,)), step=4).gradients["weight"]
        assert float((beside - alone).norm()) < 1e-3 * 0.01
