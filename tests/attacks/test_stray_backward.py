"""The line that a loop without privacy has, left in beside the private one: ``loss.backward()``.
Nothing that was not released is stepped on in a run's loop.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.guarded import RECORDS, good, records, rows, small
from quietgrad.noise import NoisySum
from quietgrad.plan import PrivacyConfig, PrivateRun
from quietgrad.plan.session import stepping

Batch = dict[str, Tensor]
Body = Callable[[PrivateRun, nn.Module, torch.optim.Optimizer, Batch], None]
# A release of this clipping norm and its noise hardly move a weight; raw gradients do.
TINY = 1e-8


def raw(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def started(steps: int = 3, **settings: Any) -> PrivateRun:
    config = {"noise_multiplier": 1.0, "max_grad_norm": TINY, "expected_batch_size": 12}
    return PrivacyConfig(**(config | settings), steps=steps).build(RECORDS).start()  # type: ignore[arg-type]


def adam(**settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.Adam(parameters, lr=0.1, **settings)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def looped(
    body: Body, model: nn.Module | None = None, make: Any = sgd, beside: Any = (), steps: int = 3
) -> tuple[PrivateRun, float]:
    """Runs the body for each batch.

    Returns:
        The run, and how far the weights moved.
    """
    model = small() if model is None else model
    optimizer = make([*model.parameters(), *beside])
    before = [p.detach().clone() for p in model.parameters()]
    with started(steps) as run:
        for indices in run.batches():
            body(run, model, optimizer, rows(records(), *indices.tolist()))
    after = [p.detach() for p in model.parameters()]
    return run, max(float((a - b).norm()) for a, b in zip(after, before, strict=True))


def behind(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    run.backward(model, good, batch)
    raw(model, batch).backward()
    optimizer.step()


def halved(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    run.backward(model, good, batch)
    raw(model, batch).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.5
    optimizer.step()


def in_a_closure(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    run.backward(model, good, batch)

    def closure() -> Tensor:
        loss = raw(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)


def without_the_run_s(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    if run.released == 0:
        run.backward(model, good, batch)
        return
    optimizer.zero_grad()
    raw(model, batch).backward()
    optimizer.step()


def of_the_last_layer(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    """The gradients before it, which are looked at first, are the release's."""
    optimizer.zero_grad()
    run.backward(model, good, batch)
    last = [*model.parameters()][-1]
    raw(model, batch).backward(inputs=[last])
    assert last.grad is not None
    last.grad = last.grad.clone()
    optimizer.step()


@pytest.mark.parametrize(
    "body", [behind, halved, in_a_closure, without_the_run_s, of_the_last_layer]
)
@pytest.mark.parametrize("make", [sgd, adam(), adam(foreach=True), adam(fused=True)])
def test_what_a_stray_backward_left_is_not_stepped_on(body: Body, make: Any) -> None:
    model = small()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"not released.*Take loss.backward\(\) out"):
        looped(body, model, make)
    for now, then in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), then, rtol=0, atol=0)


@pytest.mark.parametrize("body", [behind, in_a_closure])
def test_unwatched_it_would_be_stepped_on(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping.Stepping, "is_asked", lambda self: False)
    _, moved = looped(body)
    assert moved > 1e-3


def test_a_step_before_the_first_release_ends_the_run() -> None:
    """The run does not know its model yet: it is refused as soon as it does."""

    def first(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
        raw(model, batch).backward()
        optimizer.step()
        run.backward(model, good, batch)

    with pytest.raises(RuntimeError, match=r"before run.backward was called"):
        looped(first)


def test_a_step_behind_a_loop_that_was_left() -> None:
    model = small()
    optimizer = sgd(model.parameters())
    with started() as run:
        for indices in run.batches():
            batch = rows(records(), *indices.tolist())
            run.backward(model, good, batch)
            raw(model, batch).backward()
            break
        with pytest.raises(RuntimeError, match="not released"):
            optimizer.step()


def test_micro_batches_of_a_loader_are_no_way_round() -> None:
    data = [{name: t[i] for name, t in records().items()} for i in range(RECORDS)]
    model = small()
    optimizer = sgd(model.parameters())
    with started() as run:
        for batch in run.loader(data, physical_batch_size=4):
            total = None
            for part in batch:
                raw(model, part.records).backward()
                clipped = run.clip(model, good, part)
                total = clipped if total is None else total + clipped
            assert total is not None
            with pytest.raises(RuntimeError, match="not released"):
                optimizer.step()
            run.release(total).write_gradients(model)
            optimizer.step()  # what was released is in the place of the rest


def test_a_head_beside_the_model_is_not_stepped_on() -> None:
    """It has the gradient of a stray line, which ``run.backward`` does not replace."""
    head = nn.Parameter(torch.zeros(3))

    def beside(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]) + head, batch["y"]).backward()
        run.backward(model, good, batch)
        optimizer.step()

    with pytest.raises(RuntimeError, match="beside those that the run trains"):
        looped(beside, beside=[head])
    assert not head.any()


def test_loops_that_step_on_releases_alone_go_on() -> None:
    """A stray line before the private one is replaced by it; the rest is post-processing."""

    def body(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
        raw(model, batch).backward()
        run.backward(model, good, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(2.0)
        optimizer.step()
        optimizer.step()

    run, moved = looped(body)
    assert run.released == 3
    assert 0 < moved < 1e-6


def test_gradients_of_public_records_are_for_outside_of_the_loop() -> None:
    model = small()
    optimizer = sgd(model.parameters())
    before = model[0].weight.detach().clone()
    with started() as run:
        while run.released < run.plan.steps:
            for indices in run.batches(1):
                run.backward(model, good, rows(records(), *indices.tolist()))
                optimizer.step()
            optimizer.zero_grad()
            raw(model, records(seed=1)).backward()
            optimizer.step()
    assert float((model[0].weight.detach() - before).norm()) > 1e-3


def test_a_second_network_learns_through_the_private_one() -> None:
    """A generator, from made-up numbers: the discriminator's gradient of that is stepped on by
    nobody, and replaced by its next release.
    """
    generator = nn.Linear(2, 6)
    own = sgd(generator.parameters())
    before = generator.weight.detach().clone()

    def body(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
        optimizer.zero_grad()
        run.backward(model, good, batch)
        optimizer.step()
        own.zero_grad()
        model(generator(torch.randn(4, 2))).logsumexp(1).mean().backward()
        own.step()

    run, moved = looped(body)
    assert run.released == 3
    assert moved < 1e-6
    assert float((generator.weight.detach() - before).norm()) > 1e-6


def test_after_the_run_the_model_is_free() -> None:
    model = small()
    optimizer = sgd(model.parameters())
    with started(1) as run:
        for indices in run.batches():
            run.backward(model, good, rows(records(), *indices.tolist()))
            optimizer.step()
            copy.deepcopy(model)  # in a loop: what averages weights does so
            torch.save(model, io.BytesIO())
    raw(model, records()).backward()
    optimizer.step()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]


def test_a_second_run_on_the_model_takes_the_first_one_s_place() -> None:
    """Its watch, left by a run that was never closed, is no hook that is refused."""
    model = small()
    lost = started(1)
    for indices in lost.batches():
        lost.backward(model, good, rows(records(), *indices.tolist()))
    with pytest.warns(UserWarning, match="trained by another private run"):
        run, _ = looped(lambda r, m, o, b: (r.backward(m, good, b), o.step()), model)  # type: ignore[func-returns-value]
    assert run.released == 3
    lost.close()


def test_gradients_that_a_script_makes_of_a_release_are_its_own() -> None:
    def by_hand(run: PrivateRun, model: nn.Module, optimizer: Any, batch: Batch) -> None:
        noisy: NoisySum = run.release(run.clip(model, good, batch))
        for name, p in model.named_parameters():
            p.grad = noisy.mean()[name]
        optimizer.step()

    assert looped(by_hand)[0].released == 3
