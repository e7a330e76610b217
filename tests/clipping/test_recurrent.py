"""LSTM, GRU and RNN under capture: the same numbers as one example at a time, whatever their
configuration, and never by way of the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import cross_entropy
from test_against_oracle import assert_equal_to_oracle
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from quietgrad.clipping import Clipper
from quietgrad.clipping.bound import BoundClipper
from quietgrad.clipping.capture import fallback
from quietgrad.clipping.capture.escapes import NotCaptured
from quietgrad.clipping.capture.routines import opening
from quietgrad.clipping.capture.routines.recurrent import recurrent
from quietgrad.clipping.engines import contributions
from quietgrad.clipping.soundness.guard import Guard
from quietgrad.clipping.soundness.oracle import oracle_gradients
from quietgrad.generators import keyed_generators

pytestmark = pytest.mark.usefixtures("examined_once")

EXAMPLES, STEPS, WIDTH, HIDDEN = 4, 5, 6, 5
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
Read = Callable[["Sequences", Tensor], Tensor]


def outputs(model: Sequences, x: Tensor) -> Tensor:
    found, _ = model.rnn(x)
    return found.tanh()


def last_states(model: Sequences, x: Tensor) -> Tensor:
    _, last = model.rnn(x)
    states = last if isinstance(last, tuple) else (last,)
    return torch.cat([s.tanh() for s in states], dim=2).transpose(0, 1)


def cells_alone(model: Sequences, x: Tensor) -> Tensor:
    return model.rnn(x)[1][1].tanh().transpose(0, 1)


def time_first(model: Sequences, x: Tensor) -> Tensor:
    found, _ = model.rnn(x.transpose(0, 1))
    return found.tanh().transpose(0, 1)


def initial_states(model: Sequences, x: Tensor) -> Tensor:
    """States that depend on the example, through a layer of their own."""
    start = model.start(x.mean(1)).unflatten(1, (model.states, -1)).transpose(0, 1).contiguous()
    found, _ = model.rnn(x, (start, start.cos()) if isinstance(model.rnn, nn.LSTM) else start)
    return found.tanh()


def twice(model: Sequences, x: Tensor) -> Tensor:
    """One module, two calls; the second reads the first's states."""
    found, last = model.rnn(x)
    again, _ = model.rnn(x.flip(1), last)
    return found.tanh() + again.sin()


def in_place(model: Sequences, x: Tensor) -> Tensor:
    found, _ = model.rnn(x)
    return found.mul_(2.0).tanh_()


def _packed(model: Sequences, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
    lengths = (x[:, :, 0] != 0).sum(1).clamp(min=1)  # not in order
    batch_first = model.rnn.batch_first
    x = x if batch_first else x.transpose(0, 1)
    packed = pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False)
    found, last = model.rnn(packed, hx)
    return pad_packed_sequence(found, batch_first, total_length=STEPS)[0], last


def packed_outputs(model: Sequences, x: Tensor) -> Tensor:
    found, _ = _packed(model, x)
    return (found if model.rnn.batch_first else found.transpose(0, 1)).tanh()


def packed_states(model: Sequences, x: Tensor) -> Tensor:
    start = model.start(x.mean(1)).unflatten(1, (model.states, -1)).transpose(0, 1).contiguous()
    _, last = _packed(model, x, (start, start) if isinstance(model.rnn, nn.LSTM) else start)
    states = last if isinstance(last, tuple) else (last,)
    return torch.cat([s.tanh() for s in states], dim=2).transpose(0, 1)


class Sequences(nn.Module):
    """A recurrent module, what is read of it, and a linear layer."""

    def __init__(self, kind: str, read: Read = outputs, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        settings = {"batch_first": True} | settings
        self.rnn = KINDS[kind](WIDTH, HIDDEN, **settings)
        self.states = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.start = nn.Linear(WIDTH, self.states * HIDDEN)
        self.head = nn.LazyLinear(3)
        self.read = read
        self(torch.zeros(2, STEPS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(self, x).mean(1))


def batch_of(lengths: tuple[int, ...] = (3, 5, 1, 4)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, STEPS, WIDTH, generator=generator)
    for row, length in zip(x, lengths, strict=True):
        row[length:] = 0
    return {"x": x, "y": torch.randint(0, 3, (EXAMPLES,), generator=generator)}


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(use: Any, examples: int, signs: Any) -> Any:
        raise AssertionError(f"{use.site.name} went through the fallback")

    monkeypatch.setattr(contributions, "fallback_contributions", refuse)
    # Nor one example at a time. Looks of the guard take most of the time; it has its own tests, and
    # looks at these layers in the shared list of cases.
    monkeypatch.setattr(BoundClipper, "_falling_back", lambda self, work: work())
    monkeypatch.setattr(Guard, "is_due", lambda *arguments: False)


def assert_captured(model: nn.Module, batch: Any, **settings: Any) -> None:
    assert_equal_to_oracle(model, cross_entropy, batch, **settings)


ALL = [
    {},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
]


@pytest.mark.grid(16, "options of three layers that share their code")
@pytest.mark.parametrize("settings", ALL, ids=str)
@pytest.mark.parametrize(
    "read", [outputs, last_states, time_first, initial_states, twice, packed_outputs, packed_states]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_use(kind: str, read: Read, settings: dict[str, Any]) -> None:
    model = Sequences(kind, read, **settings, batch_first=read is not time_first)
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)


@pytest.mark.grid(4, "options of three layers that share their code")
@pytest.mark.parametrize("estimator", ["materialized", "ghost"])
@pytest.mark.parametrize("physical_batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_estimator_and_cut(kind: str, physical_batch_size: int, estimator: Any) -> None:
    model = Sequences(kind, num_layers=2)
    assert_captured(model, batch_of(), estimator=estimator, physical_batch_size=physical_batch_size)


# Plain PyTorch says that it has no kernel of oneDNN for projections.
projections = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")


@pytest.mark.grid(4, "options of three layers that share their code")
@projections
@pytest.mark.parametrize("read", [outputs, last_states, time_first, packed_outputs])
@pytest.mark.parametrize("settings", ALL, ids=str)
def test_projections(settings: dict[str, Any], read: Read) -> None:
    model = Sequences("lstm", read, proj_size=3, **settings, batch_first=read is not time_first)
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)


@pytest.mark.parametrize(("kind", "read"), [("lstm", cells_alone), ("gru", in_place)])
def test_what_one_kind_allows(kind: str, read: Read) -> None:
    assert_captured(Sequences(kind, read), batch_of(), physical_batch_size=EXAMPLES)


def test_rectified() -> None:
    model = Sequences("rnn", nonlinearity="relu", num_layers=2, bidirectional=True)
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)


@projections
@pytest.mark.parametrize("read", [outputs, packed_states])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("lstm", {}), ("lstm", {"proj_size": 3}), ("gru", {}), ("rnn", {})],
    ids=str,
)
def test_double_precision(kind: str, settings: dict[str, Any], read: Read) -> None:
    if settings and read is packed_states:
        pytest.skip("states and cells differ in width")
    model = Sequences(kind, read, num_layers=2, bidirectional=True, **settings).double()
    batch = batch_of()
    batch["x"] = batch["x"].double()
    assert_captured(model, batch, physical_batch_size=EXAMPLES, tolerance=1e-10)


@pytest.mark.grid(6, "options of three layers that share their code")
@pytest.mark.parametrize("frozen", ["weight_ih", "weight_hh", "bias", "weight", "_l0", "reverse"])
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts(kind: str, frozen: str) -> None:
    model = Sequences(kind, num_layers=2, bidirectional=True)
    for name, parameter in model.rnn.named_parameters():
        parameter.requires_grad_(frozen not in name)
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights(kind: str) -> None:
    model = Sequences(kind, num_layers=2)
    model.rnn.weight_hh_l1 = model.rnn.weight_hh_l0
    model.rnn.bias_ih_l1 = model.rnn.bias_ih_l0
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_draws_as_the_plain_pass_does(kind: str) -> None:
    model, batch = Sequences(kind, num_layers=3, dropout=0.4).train(), batch_of()
    bound = Clipper(1e6, physical_batch_size=EXAMPLES).bind(model, cross_entropy)
    bound.check(batch)
    with keyed_generators(5):
        captured = bound.clip(batch, step=5).gradients  # no guarded step
    torch.manual_seed(5)
    parameters = dict(model.named_parameters())
    parameters = {n: p for n, p in parameters.items() if not n.startswith("start")}
    losses = cross_entropy(model, batch).sum()
    plain = torch.autograd.grad(losses, list(parameters.values()))
    for name, gradient in zip(parameters, plain, strict=True):
        torch.testing.assert_close(captured[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.grid(4, "options of three layers that share their code")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("read", [outputs, packed_outputs])
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_is_not_finite_stays_alone(kind: str, read: Read, value: float) -> None:
    model, batch = Sequences(kind, read, num_layers=2, bidirectional=True), batch_of()
    bound = Clipper(1.0, physical_batch_size=EXAMPLES).bind(model, cross_entropy)
    bound.check(batch)
    others = {name: tensor[[0, 2, 3]] for name, tensor in batch.items()}
    expected = bound.clip(others, step=5).gradients
    batch["x"][1, 2, 1] = value
    with_it = bound.clip(batch, step=5)
    assert int(with_it.private.nonfinite) == 1
    for name, gradient in with_it.gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_computes_it_twice(kind: str, reentrant: bool) -> None:
    def read(model: Sequences, x: Tensor) -> Tensor:
        def states(x: Tensor) -> Tensor:
            return model.rnn(x)[0].tanh()

        return checkpoint(states, x, use_reentrant=reentrant) if x.requires_grad else states(x)

    def clipped(read: Read) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sequences(kind, read))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(WIDTH))
            model[0].bias.zero_()
        clipper = Clipper(0.2, engine="bookkeeping")
        return clipper.clip(model, cross_entropy, batch_of()).gradients

    torch.testing.assert_close(clipped(read), clipped(outputs))


class Subclass(nn.GRU):
    def forward(self, x: Tensor, hx: Any = None) -> Any:
        found, last = super().forward(x, hx)
        return 2 * found, last


def test_unknown_forward_passes_go_through_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "fallback_contributions", fallback.fallback_contributions)
    model = Sequences("gru")
    model.rnn = Subclass(WIDTH, HIDDEN, batch_first=True)
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)
    own = nn.GRU(WIDTH, HIDDEN, batch_first=True)
    plain = own.forward
    own.forward = lambda *args: plain(*args)
    model.rnn = own
    assert_captured(model, batch_of(), physical_batch_size=EXAMPLES)
    assert "forward" in vars(own)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_forward_pass_is_the_modules_own_again_after_an_error(
    error: type[BaseException],
) -> None:
    def stop(model: Sequences, x: Tensor) -> Tensor:
        found, _ = model.rnn(x)
        if len(x) == EXAMPLES:
            raise error("stop")
        return found

    model = Sequences("lstm", stop)
    with pytest.raises(error):
        Clipper(1.0).clip(model, cross_entropy, batch_of())
    assert "forward" not in vars(model.rnn)


def test_flattened_examples_are_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def windows(model: Sequences, x: Tensor) -> Tensor:
        found, _ = model.rnn(x.repeat_interleave(2, dim=0))
        return found.unflatten(0, (-1, 2)).mean(1)

    model, batch = Sequences("gru", windows), batch_of()
    with pytest.raises(NotCaptured, match="layer 'rnn'"):
        Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)
    assert_equal_to_oracle(model, cross_entropy, batch)


def test_examples_in_the_place_of_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """batch_first forgotten: the recurrence runs over the examples."""
    monkeypatch.undo()
    model, batch = Sequences("gru"), batch_of()
    model.rnn.batch_first = False
    for length in (EXAMPLES, STEPS):
        short = {"x": batch["x"][:, :length], "y": batch["y"]}
        with pytest.raises(ValueError):
            Clipper(1.0).clip(model, cross_entropy, short)


def test_gradients_between_layers_are_plain_autograds() -> None:
    """Of what comes before the recurrence: the pass back through time hands them on."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Sequences("lstm", twice, num_layers=2))
    batch = batch_of()
    expected = oracle_gradients(model, cross_entropy, batch)
    total = Clipper(1e6, physical_batch_size=EXAMPLES).clip(model, cross_entropy, batch).gradients
    torch.testing.assert_close(total["0.weight"], sum(g["0.weight"] for g in expected))


def test_a_routine_that_computes_something_else_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)

    def other(routine: str, *args: Any) -> Any:
        found, *last = recurrent(routine, *args)
        return 2 * found, *last

    monkeypatch.setattr(opening, "recurrent", other)
    model, batch = Sequences("gru"), batch_of()
    with pytest.raises(NotCaptured, match="layer 'rnn' gives another loss"):
        Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)
    assert_equal_to_oracle(model, cross_entropy, batch)


def sorted_by_hand(model: Sequences, x: Tensor) -> Tensor:
    lengths = (x[:, :, 0] != 0).sum(1).clamp(min=1)
    order = lengths.argsort(descending=True)
    packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
    found, _ = model.rnn(packed)
    found, _ = pad_packed_sequence(found, batch_first=True, total_length=STEPS)
    return found[order.argsort()].tanh()


def test_examples_in_an_order_that_nobody_tells_are_taken_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layer above sees the batch's order, the recurrence perhaps another one."""
    monkeypatch.undo()
    for lengths in ((3, 5, 1, 4), (5, 4, 3, 1), (4, 4, 4, 4)):
        model, batch = Sequences("gru", sorted_by_hand), batch_of(lengths)
        with pytest.raises(NotCaptured, match=r"layer 'rnn'.*enforce_sorted=False"):
            Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)
        assert_equal_to_oracle(model, cross_entropy, batch)


def test_packed_sequences_of_a_subclass_are_taken_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    model, batch = Sequences("gru", packed_outputs), batch_of()
    model.rnn = type("Other", (nn.GRU,), {})(WIDTH, HIDDEN, batch_first=True)
    with pytest.raises(NotCaptured, match="layer 'rnn'"):
        Clipper(1.0, engine="bookkeeping").clip(model, cross_entropy, batch)
    assert_equal_to_oracle(model, cross_entropy, batch)
