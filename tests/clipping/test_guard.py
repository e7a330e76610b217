"""The guard's parts on their own: losses that are one function, made-up records, watched tensors,
randomness held still, views.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.bindings import Bindings, same_function
from quietgrad.clipping.capture.capture import Use
from quietgrad.clipping.capture.layout import Site
from quietgrad.clipping.soundness.fingerprints import factors_of
from quietgrad.clipping.soundness.held_still import CommonRandomness
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_gradients
from quietgrad.clipping.soundness.records import spread, take, with_companions
from quietgrad.clipping.soundness.unchanged import StateChanged, unchanged


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def batch_of(n: int = 12, *shape: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(n, *(shape or (5,)), generator=source),
        "y": torch.randint(0, 3, (n,), generator=source),
    }


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


# ------------------------------------------------------------------------------------------------
# one function or two


class Criterion:
    def __init__(self) -> None:
        self.scale = 1.0

    def of(self, model: Any, batch: Any) -> Any:
        return loss(model, batch) * self.scale


def made(scale: object, bias: float = 0.0) -> Any:
    return lambda model, batch, extra=scale: loss(model, batch) * scale + bias + 0 * extra


def test_functions_are_the_same_by_what_they_can_read() -> None:
    scale, other, criterion = torch.tensor(1.0), torch.tensor(1.0), Criterion()
    assert same_function(loss, loss)
    assert same_function(made(scale), made(scale))
    assert not same_function(made(scale), made(other))  # equal is not the same: a tensor may change
    assert not same_function(made(scale), made(scale, 1.0))
    assert not same_function(
        lambda m, b: loss(m, b), lambda m, b: loss(m, b)
    )  # two places in the source
    assert same_function(criterion.of, criterion.of) and not same_function(
        criterion.of, Criterion().of
    )
    partial = functools.partial(loss, batch=scale)
    assert same_function(partial, functools.partial(loss, batch=scale))
    assert not same_function(partial, functools.partial(loss, batch=other))
    assert not same_function(partial, functools.partial(loss, scale))
    assert not same_function(loss, partial) and not same_function(criterion, Criterion())
    with_attribute = made(scale)
    with_attribute.scale = 2.0
    assert not same_function(made(scale), with_attribute)


def test_bindings_keep_the_last_pairs_and_no_more() -> None:
    bindings = Bindings(Clipper(1.0), most=2)
    model, another = small(), small()
    first = bindings.of(model, loss)
    assert bindings.of(model, loss) is first
    second = bindings.of(another, loss)
    assert second is not first and bindings.of(model, loss) is first
    bindings.of(model, Criterion().of)
    assert bindings.of(model, loss) is first and bindings.of(another, loss) is not second


# ------------------------------------------------------------------------------------------------
# made-up records


def test_made_up_records_move_numbers_and_keep_masks_and_labels() -> None:
    one = {
        "ids": torch.tensor([[7, 8, 9, 3]]),
        "mask": torch.tensor([[1, 1, 1, 0]]),
        "x": torch.tensor([[0.2, 0.4, 0.9]]),
        "y": torch.tensor([2]),
        "known": torch.tensor([True]),
    }
    found = with_companions(one, 3)
    assert found is not None and all(t.shape[0] == 3 for t in found.values())
    assert all(
        torch.equal(found[name][:1], t) for name, t in one.items()
    )  # the record itself comes first
    assert found["ids"].tolist() == [[7, 8, 9, 3], [3, 7, 8, 9], [9, 3, 7, 8]]
    assert found["mask"].tolist() == [[1, 1, 1, 0]] * 3 and found["y"].tolist() == [2, 2, 2]
    assert (
        bool((found["x"] >= 0).all() and (found["x"] <= 0.9).all())
        and len(found["x"].unique(dim=0)) == 3
    )


def test_a_record_that_cannot_be_varied_decides_nothing() -> None:
    assert with_companions({"ids": torch.tensor([[4]]), "y": torch.tensor([1])}, 3) is None


def test_made_up_records_that_a_model_cannot_take_leave_the_verdict_open() -> None:
    def picky(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not bool((batch["x"][:, 0] == 1).all()):
            raise RuntimeError("not one of mine")
        return loss(model, batch)

    batch = batch_of()
    batch["x"][:, 0] = 1
    bound = Clipper(1.0).bind(small(), picky)
    bound.clip(take(batch, [0]))
    verdict = next(iter(bound._guard._verdicts.values()))
    assert not verdict.together and not verdict.remembers_nothing
    bound.clip(batch)
    assert verdict.together and verdict.remembers_nothing


# ------------------------------------------------------------------------------------------------
# what is decided


def test_examples_that_are_not_finite_are_passed_over() -> None:
    batch = batch_of()
    batch["x"][0] = float("nan")
    batch["x"][11] = float("inf")
    bound = Clipper(1.0, physical_batch_size=12).bind(small(), loss)
    bound.clip(batch)
    assert next(iter(bound._guard._verdicts.values())).together == 12


def test_copies_of_one_record_and_losses_without_numbers_decide_nothing() -> None:
    batch = batch_of()
    for chosen in (take(batch, [3] * 12), {"x": batch["x"] * float("nan"), "y": batch["y"]}):
        bound = Clipper(1.0, physical_batch_size=12).bind(small(), loss)
        clipped = bound.clip(chosen)
        assert not next(iter(bound._guard._verdicts.values())).together
        assert clipped.private.examples == 12


@pytest.mark.parametrize("engine", ["auto", "bookkeeping", "one-example"])
def test_the_guard_leaves_random_state_and_model_alone(engine: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).train()
    bound = Clipper(1.0, engine=engine).bind(model, loss)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    bound.check(batch_of())
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_check_of_public_records_examines_whatever_was_decided_before() -> None:
    seen: list[int] = []

    def watching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(len(batch["y"]))
        return loss(model, batch)

    bound = Clipper(1.0).bind(small(), watching)
    bound.clip(batch_of())
    seen.clear()
    bound.check(batch_of(6))
    assert len(seen) > 10


def test_a_loss_that_differentiates_by_itself_can_be_taken_one_example_at_a_time() -> None:
    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss(model, batch) + slope.pow(2).sum(1)

    batch, model = batch_of(), small()
    actual = Clipper(0.1, engine="one-example").clip(model, penalised, batch).gradients
    expected = oracle_clipped_sum(oracle_gradients(model, penalised, batch), 0.1)
    for name, g in expected.items():
        torch.testing.assert_close(actual[name], g, rtol=1e-4, atol=1e-7)


# ------------------------------------------------------------------------------------------------
# views


def test_views_of_all_records_are_examined() -> None:
    batch = {"x": batch_of(6, 2, 5)["x"], "y": torch.randint(0, 3, (6, 1)).expand(-1, 2)}
    clipper = Clipper(1.0, views=2)
    bound = clipper.bind(small(), loss)
    bound.clip(batch)
    assert next(iter(bound._guard._verdicts.values())).together == 12

    def centred(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits - logits.detach().mean(0), batch["y"], reduction="none")

    with pytest.raises(ValueError, match="depends on other examples"):
        clipper.clip(small(), centred, batch)


# ------------------------------------------------------------------------------------------------
# tensors watched


def test_buffers_are_put_back_after_an_exception() -> None:
    model = nn.BatchNorm1d(3)
    with pytest.raises(OSError), unchanged(model):
        model(torch.randn(4, 3))
        raise OSError
    assert not model.running_mean.any() and int(model.num_batches_tracked) == 0


def test_every_kind_of_change_is_named_and_whole_numbers_and_not_a_numbers_stay() -> None:
    model = nn.Module()
    model.register_buffer("odd", torch.tensor([float("nan"), 1.0]))
    model.register_buffer("gone", torch.zeros(2))
    model.register_buffer("count", torch.tensor(0))
    with unchanged(model, thorough=True):
        pass
    with pytest.raises(StateChanged, match="buffer 'gone' changes"), unchanged(model):
        del model.gone
    assert torch.equal(model.gone, torch.zeros(2))
    with pytest.raises(StateChanged, match="buffer 'count' changes"), unchanged(model):
        model.count += 1
    assert int(model.count) == 0


# ------------------------------------------------------------------------------------------------
# randomness held still


def test_dropout_of_fused_attention_is_known_where_its_seed_is() -> None:
    q = torch.ones(2, 2, 8, 16)
    with CommonRandomness() as still:
        for dropout in (0.0, 0.3):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, dropout)
    assert still.known == [(2, 2, 8, 16)]


def test_every_example_draws_the_same_and_so_does_every_pass() -> None:
    x = torch.randn(6, 5, 8)
    with CommonRandomness() as still:
        whole, alone = F.dropout(x.exp(), 0.5), F.dropout(x[2:3].exp(), 0.5)
        noise, one = torch.randn(6, 5, 8), torch.randn(1, 5, 8)
    assert still.used
    assert torch.equal(whole[2:3], alone) and torch.equal(noise[2:3], one)
    assert (
        torch.equal(whole == 0, (whole[:1] == 0).expand(6, 5, 8))
        and 0 < float((whole == 0).float().mean()) < 1
    )
    assert not torch.equal(torch.randn(6, 5, 8)[0], torch.randn(6, 5, 8)[1])
    with CommonRandomness() as still:
        x.exp()
    assert not still.used


def test_places_are_spread_from_the_first_to_the_last() -> None:
    assert spread(3, 8) == [0, 1, 2] and spread(64, 4) == [0, 21, 42, 63] and len(spread(9, 8)) == 8


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("recurrent-attention", "bare-parameters", "gpt2")],
    ids=str,
)
def test_models_of_the_shared_list_are_decided(case: Any) -> None:
    model, chosen, batch = case.build()
    bound = Clipper(1.0, engine="bookkeeping", physical_batch_size=4).bind(model, chosen)
    bound.clip(batch)
    assert next(iter(bound._guard._verdicts.values())).together == 4


def test_single_records_are_looked_at_once_a_guarded_step_and_leave_the_verdict_open() -> None:
    passes: list[int] = []

    def counting(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        passes.append(len(batch["y"]))
        return loss(model, batch)

    bound, batch = Clipper(1.0, engine="bookkeeping").bind(small(), counting), batch_of()
    made = []
    for step in (0, 0, 1, 1, 2, 2):
        passes.clear()
        bound.clip(take(batch, [step]), step=step)
        made.append(len(passes))
    assert made[0] > 5 and made[2] > 5 and made[1] == made[3] == made[4] == made[5] == 1
    passes.clear()
    bound.clip(batch, step=2)
    assert len(passes) > 10  # several records at last: they are examined before they are clipped


def test_a_gradient_that_is_rounding_alone_counts_as_none() -> None:
    """The first query under a causal softmax: exactly zero by one kernel, 1e-10 by another, over an
    input that matters elsewhere.
    """
    site = Site("layer", nn.Linear(3, 2), {}, None)
    x, gradient = torch.randn(1, 4, 3), torch.randn(1, 4, 2)
    gradient[0, 0] = 0
    rounded = gradient.clone()
    rounded[0, 0] = 1e-10
    exact, other = (factors_of(Use(site, (x,), {}, {0: g}), 1) for g in (gradient, rounded))
    assert exact is not None and other is not None and exact.is_row_of(other, 0, 1e-6, floor=1e-8)
    moved = factors_of(Use(site, (x.roll(1, dims=1),), {}, {0: gradient}), 1)
    assert moved is not None and not exact.is_row_of(moved, 0, 0.02, floor=0.0)


@pytest.mark.parametrize("what", ["gradient", "input"])
def test_a_fingerprint_sees_what_no_norm_does(what: str) -> None:
    """Another sign, and other positions, have the same norm; signs alone would not see two of them
    change places.
    """
    source = torch.Generator().manual_seed(3)
    x, gradient = (torch.randn(1, 6, width, generator=source) for width in (3, 4))
    site = Site("layer", nn.Linear(3, 4), {}, None)

    def of(change: Any) -> Any:
        given = {"input": x, "gradient": gradient}
        given[what] = change(given[what])
        return factors_of(Use(site, (given["input"],), {}, {0: given["gradient"]}), 1)

    same = of(lambda t: t.clone())
    exchanged = of(lambda t: t[:, [0, 2, 1, 3, 4, 5]])
    for other in (of(torch.neg), of(lambda t: t.roll(1, dims=1)), exchanged):
        assert not same.is_row_of(other, 0, 0.02, floor=0.0)
    # Zeros behind change nothing: a shorter example is padded.
    padded = Use(site, (F.pad(x, (0, 0, 0, 2)),), {}, {0: F.pad(gradient, (0, 0, 0, 2))})
    assert same.is_row_of(factors_of(padded, 1), 0, 1e-6, floor=0.0)
