"""What a model keeps between calls: buffers, parameters and plain attributes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attacks.guarded import KeepsMean, Remembers, With, good, records
from quietgrad.clipping import Clipper
from quietgrad.clipping.soundness.unchanged import Watch

BUFFERS = ["in-place", "assigned", "data", "new", "large"]


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("how", [*BUFFERS, "parameter", "parameter-data"])
def test_what_a_forward_pass_writes_into_the_model_is_refused(how: str, engine: str) -> None:
    model = KeepsMean(how)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    what = "parameter 'inner.bias'" if "parameter" in how else "buffer '(mean|another|large)'"
    with pytest.raises(
        ValueError, match=f"{what} (changes|is rewritten) while the loss is computed"
    ):
        Clipper(1.0, engine=engine).bind(model, good).clip(records())
    if "parameter" not in how:  # buffers are put back
        after = model.state_dict()
        assert after.keys() == before.keys() and all(
            torch.equal(t, after[name]) for name, t in before.items()
        )


@pytest.mark.parametrize("how", [*BUFFERS, "parameter"])
def test_a_write_behind_a_gate_is_seen_in_the_call_that_makes_it(how: str) -> None:
    model = KeepsMean(how, opens_at=6)
    if (
        how == "data"
        # writes past the version counter are seen in small buffers at once, in large ones at
        # guarded steps
    ):
        del model.large
    bound = Clipper(1.0).bind(model, good)
    for step in range(6):
        model.now = step
        bound.clip(records(), step=step)
    model.now = 6  # not a guarded step
    with pytest.raises(ValueError, match="while the loss is computed"):
        bound.clip(records(), step=6)
    if how not in ("parameter", "large"):
        assert not model.state_dict()["mean"].any() and "another" not in model.state_dict()


class Exchanges(nn.Module):
    """Where a rare record comes two hidden units change places for good, past torch's count of
    writes: every loss stays as it was, and the published weights tell of the record.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x).tanh())
        if (x[:, 0] == 30).any():
            order = [2, 1, 0, *range(3, 8)]
            self.first.weight.data.copy_(self.first.weight.data[order])
            self.first.bias.data.copy_(self.first.bias.data[order])
            self.head.weight.data.copy_(self.head.weight.data[:, order])
        return out


def clipped_with_a_rare_record() -> Exchanges:
    model, rare = Exchanges(), records()
    rare["x"][5, 0] = 30.0
    bound = Clipper(1.0, engine="one-example").bind(model, good)
    bound.clip(records(), step=0)
    bound.clip(rare, step=1)
    return model


def test_weights_that_change_places_are_seen_at_guarded_releases() -> None:
    """Before: accepted. The sum of all bits was the same."""
    with pytest.raises(ValueError, match=r"parameter 'first.weight' is rewritten"):
        clipped_with_a_rare_record()


def test_without_places_the_published_weights_tell_of_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def plain(weight: Tensor) -> Tensor:
        return weight.detach().contiguous().view(torch.int32).sum(dtype=torch.int64).expand(2)

    monkeypatch.setattr("quietgrad.clipping.soundness.unchanged.digest_of", plain)
    assert not torch.equal(clipped_with_a_rare_record().first.bias, Exchanges().first.bias)


def test_buffers_that_stay_and_weights_that_the_optimizer_writes_are_allowed() -> None:
    model = KeepsMean("not at all")
    bound = Clipper(1.0).bind(model, good)
    for step in range(3):
        bound.clip(records(), step=step)
        with torch.no_grad():
            model.inner.weight.add_(0.1)
            model.mean.fill_(step)  # between the calls they are the user's to write


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
def test_a_model_that_remembers_earlier_records_is_refused(engine: str) -> None:
    with pytest.raises(ValueError, match="keeps something between calls"):
        Clipper(1.0, engine=engine).bind(Remembers(), good).clip(records())


def test_an_attribute_that_nothing_reads_is_allowed() -> None:
    """It reaches neither state_dict nor any loss; docs/privacy/guard.md says not to publish whole
    modules.
    """

    def note(model: With, h: Tensor) -> Tensor:
        model.last = h.detach()
        return h

    Clipper(1.0).bind(With(note), good).clip(records())


class Rectifier(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class Exchanging(nn.Module):
    """As BigBird: the first record of a kind exchanges a layer for good."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] == 30).any():
            self.exchange()
        h = self.first(x)
        return self.head(h if self.inner is None else self.inner(h))

    def exchange(self) -> None:
        if self.how == "layer":
            self.inner = nn.ReLU()
        elif self.how == "away":
            self.inner = None
        elif self.how == "class":
            self.inner.__class__ = Rectifier
        else:
            self.inner.forward = torch.relu


@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("how", ["layer", "away", "class", "forward"])
def test_a_layer_that_is_exchanged_at_a_rare_record_is_seen_at_once(how: str, engine: str) -> None:
    model = Exchanging(how)
    bound, inner = Clipper(1.0, engine=engine).bind(model, good), model.inner
    for step in range(6):
        bound.clip(records(), step=step)
    rare = records()
    rare["x"][3, 0] = 30.0
    with pytest.raises(ValueError, match="layer 'inner' is exchanged for another one"):
        bound.clip(rare, step=6)  # not a guarded step
    assert model.inner is inner and type(inner) is nn.Tanh and "forward" not in vars(inner)


@pytest.mark.parametrize("how", ["layer", "away", "class", "forward"])
def test_without_the_look_one_record_moves_all_later_ones(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "exchanged", lambda self: None)
    torch.manual_seed(0)
    bound = Clipper(0.05).bind(Exchanging(how), good)
    before = bound.clip(records(), step=0).gradients
    bound.clip({"x": torch.full((2, 6), 30.0), "y": torch.tensor([0, 1])}, step=4)
    after = bound.clip(records(), step=8).gradients
    moved = sum(float((g - after[name]).square().sum()) for name, g in before.items()) ** 0.5
    assert moved > 2 * 0.05


def test_the_model_itself_is_named_where_its_forward_is_exchanged() -> None:
    model = With(lambda model, h: h)

    def loss(model: With, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        model.forward = type(model).forward.__get__(model)
        return found

    with pytest.raises(ValueError, match="layer 'the model' is exchanged"):
        Clipper(1.0).bind(model, loss).clip(records())
    assert "forward" not in vars(model)


def test_a_layer_that_is_made_when_it_is_first_needed_is_allowed() -> None:
    def first(model: With, h: Tensor) -> Tensor:
        if not hasattr(model, "late"):
            model.late = nn.Tanh()
        return model.late(h)

    bound = Clipper(1.0).bind(With(first), good)
    for step in range(3):
        bound.clip(records(), step=step)


@pytest.mark.parametrize("what", ["layer 'drop'", "the model", "parameter 'first.bias'"])
def test_a_record_that_switches_the_model_is_refused_in_its_call(what: str) -> None:
    """From then on all others would be without dropout, or without that layer's gradient."""

    def loss(model: With, batch: dict[str, Tensor]) -> Tensor:
        if bool((batch["x"] > 30).any()):
            if what == "the model":
                model.training = False
            elif "layer" in what:
                model.drop.eval()
            else:
                model.first.bias.requires_grad_(True)
        return good(model, batch)

    model = With(lambda model, h: h, dropout=0.5).train()
    model.first.bias.requires_grad_(False)
    bound = Clipper(1.0, engine="one-example").bind(model, loss)
    for step in range(6):
        bound.clip(records(), step=step)
    batch = records()
    batch["x"][5] = 40.0
    with pytest.raises(ValueError, match=f"{what} is switched while the loss is computed"):
        bound.clip(batch, step=6)  # not a guarded release
    assert model.training and model.drop.training and not model.first.bias.requires_grad


def test_a_loss_that_undoes_its_switches_is_allowed() -> None:
    def loss(model: With, batch: dict[str, Tensor]) -> Tensor:
        model.eval()
        with torch.no_grad():
            target = model(batch["x"]).argmax(1)
        model.train()
        return good(model, {**batch, "y": target})

    model = With(lambda model, h: h, dropout=0.5).train()
    bound = Clipper(1.0, physical_batch_size=4).bind(model, loss)
    for step in range(3):
        bound.clip(records(), step=step)


def test_a_layer_that_the_loss_takes_away_is_named() -> None:
    # Before: an AttributeError, from the look at what it was.
    def loss(model: With, batch: dict[str, Tensor]) -> Tensor:
        found = good(model, batch)
        del model.spare
        return found

    model = With(lambda model, h: h)
    model.spare = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="layer 'spare' is exchanged for another one, taken"):
        Clipper(1.0).bind(model, loss).clip(records())
