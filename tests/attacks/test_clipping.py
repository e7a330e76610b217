"""Attacks on the bound of one record's contribution: cancelling positions, other scales of numbers,
half precision, cuts of the batch, an adversarial search.

A record's contribution is what the clipped sum holds because of it. The loss is the inner product
of a layer's outputs with given numbers, so an attacker chooses the layer's inputs and output
gradients freely, which is more than data and weights allow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quietgrad.clipping import Clipper
from quietgrad.clipping.engines import accumulator, bookkeeping
from quietgrad.clipping.norms import rounding
from quietgrad.clipping.norms.estimators import ghost
from quietgrad.clipping.norms.estimators.ghost import ghost_norms
from quietgrad.clipping.norms.estimators.materialized import materialized_norms
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.norms.estimators.several import hutch_together
from quietgrad.clipping.norms.factors import DenseFactors, OneHotFactors
from quietgrad.clipping.norms.rounding import Measured, Norms
from quietgrad.randomness import RandomKey

LARGEST = 1.001
UNGUARDED = 4  # a release that the guard does not look at (``is_guarded``)
EXACT = ["exact", "ghost", "ghost64", "materialized"]
SKETCHES = ["hutch", "hutch++"]
KEY = RandomKey.from_seed(0)
Pair = tuple[Tensor, Tensor]


def given_gradients(model: nn.Module, batch: Pair) -> Tensor:
    return (model(batch[0]) * batch[1]).flatten(1).sum(1)


def total(clipper: Clipper, model: nn.Module, batch: Pair, step: int = 0) -> Tensor:
    gradients = clipper.clip(model, given_gradients, batch, Projections(KEY, step)).gradients
    return torch.cat([g.double().flatten() for g in gradients.values()])


def contribution(clipper: Clipper, model: nn.Module, batch: Pair) -> float:
    """Of the last record, in units of C, beside one whose gradient is zero: at a release that the
    guard looks at, or at another, whichever is more.
    """
    x, g = batch
    other = (torch.zeros_like(x[-1:]), torch.zeros_like(g[-1:]))
    both = tuple(torch.cat(pair) for pair in zip(other, (x[-1:], g[-1:]), strict=True))
    bound, most = clipper.bind(model, given_gradients), 0.0
    for step in (0, UNGUARDED):
        sums = bound.clip(both, Projections(KEY, 0), step=step).gradients.values()
        most = max(most, float(torch.cat([g.double().flatten() for g in sums]).norm()))
    return most / clipper.max_grad_norm


def unguarded(clipper: Clipper, model: nn.Module, batch: Pair) -> float:
    """Of one record, in units of C, once the guard has seen others."""
    bound = clipper.bind(model, given_gradients)
    bound.check(tuple(torch.randn(2, *part.shape[1:], dtype=part.dtype) for part in batch))
    found = bound.clip(batch, Projections(KEY, 0), step=UNGUARDED).gradients.values()
    return float(torch.cat([g.double().flatten() for g in found]).norm()) / clipper.max_grad_norm


def linear(x: Tensor, g: Tensor) -> nn.Linear:
    return nn.Linear(x.shape[-1], g.shape[-1], bias=False, dtype=x.dtype)


def cancelling(size: float, true_norm: float, positions: int = 4) -> Pair:
    """One record whose positions cancel but for ``true_norm``: factors of norm ``size``."""
    source = torch.Generator().manual_seed(0)
    a, g = (
        torch.nn.functional.normalize(torch.randn(n, generator=source), dim=0) * size
        for n in (32, 24)
    )
    x = a.expand(positions, -1).clone()
    signs = torch.ones(positions, 1)
    signs[1::2] = -1
    grads = g * signs
    grads[0] += g / size**2 * true_norm
    return x.unsqueeze(0), grads.unsqueeze(0)


@pytest.mark.grid(10, "scales times estimators")
@pytest.mark.parametrize("engine", ["bookkeeping", "one-example"])
@pytest.mark.parametrize("estimator", EXACT)
@pytest.mark.parametrize(
    ("size", "true_norm"), [(1e3, 100.0), (1e4, 1e4), (1e4, 100.0), (3e3, 1.0)]
)
def test_cancelling_positions(size: float, true_norm: float, estimator: str, engine: str) -> None:
    """Before: the ghost norm was 0, and the record contributed 100 C and 1e4 C."""
    batch = cancelling(size, true_norm)
    assert contribution(Clipper(1.0, estimator, engine=engine), linear(*batch), batch) <= LARGEST


@pytest.mark.parametrize("estimator", SKETCHES)
def test_cancelling_positions_of_a_sketch(estimator: str) -> None:
    """A sketch is not measured again: what rounding may have hidden is added to its norm."""
    batch = cancelling(1e4, 1e4)
    assert (
        contribution(Clipper(1.0, estimator, 64, engine="bookkeeping"), linear(*batch), batch)
        <= 1.3
    )  # R^-1/2


@pytest.mark.parametrize("estimator", ["auto", *EXACT])
def test_unix_time_as_an_input(estimator: str) -> None:
    """Ordinary data: a column of 1.7e9 under a layer whose outputs are centred over positions.
    Before: 33 of 60 records above C, the worst 5e7 C.
    """

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.tanh(y - y.mean(1, keepdim=True))

    torch.manual_seed(0)
    model = Centred()
    source = torch.Generator().manual_seed(1)
    x = torch.randn(60, 12, 3, generator=source)
    x[:, :, 0] = 1.7e9 + 3600 * torch.arange(12) + 86400 * torch.rand(60, 1, generator=source)
    g = torch.randn(60, 12, 16, generator=source)
    clipper = Clipper(1.0, estimator, engine="bookkeeping", physical_batch_size=60)
    bound = clipper.bind(model, given_gradients)
    bound.clip((x, g), step=0)
    empty = torch.zeros_like(g)
    for i in range(60):
        only = empty.clone()
        only[i] = g[i]
        sums = bound.clip((x, only), step=UNGUARDED).gradients.values()
        assert float(sum(s.double().square().sum() for s in sums)) ** 0.5 <= LARGEST


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
        yield


WAYS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16-autocast": (torch.float32, torch.bfloat16),
    "float16-autocast": (torch.float32, torch.float16),
    "bfloat16-parameters": (torch.bfloat16, None),
}


def layer_of(kind: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[int, ...], tuple[int, ...]]:
    """A layer, the shape of a record's input and of its output."""
    if kind == "convolution":
        return nn.Conv1d(3, 4, 3, padding=1).to(dtype), (3, 10), (4, 10)
    if kind == "groups":
        return nn.Conv1d(4, 4, 3, groups=2).to(dtype), (4, 9), (4, 7)
    if kind == "normalisation":
        return nn.LayerNorm(6).to(dtype), (5, 6), (5, 6)
    if kind == "recurrent":

        class Last(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.GRU(3, 4, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)[0]

        return Last().to(dtype), (5, 3), (5, 4)
    return nn.Linear(5, 4).to(dtype), (6, 5), (6, 4)


def search(
    score: Callable[[Pair], float], start: Pair, steps: int, source: torch.Generator
) -> float:
    """Gradient-free: keeps a random change of signs, scales, copies or entries where the score
    grows. Returns the best score.
    """
    best, best_score = start, score(start)
    for _ in range(steps):
        x, g = (t.clone() for t in best)
        which = int(torch.randint(0, 6, (1,), generator=source))
        i, j = torch.randint(0, x.shape[1], (2,), generator=source).tolist()
        size = 10.0 ** float(torch.randn(1, generator=source) * 6)
        if which == 0:
            x *= size
        elif which == 1:
            g *= size
        elif which == 2 and g.shape[1] > max(i, j):
            x[:, i], g[:, i] = x[:, j], -g[:, j]
        elif which == 3 and g.shape[1] > i:
            x[:, i] *= size
            g[:, i] /= size
        elif which == 4:
            x += 1e-3 * x.abs().max() * torch.randn(x.shape, generator=source).to(x.dtype)
        else:
            g *= 1 + 1e-3 * torch.randn(g.shape, generator=source).to(g.dtype)
        found = score((x, g))
        if found >= best_score:
            best, best_score = (x, g), found
    return best_score


@pytest.mark.grid(7, "layers times types times estimators; each searches anew")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["linear", "convolution", "groups", "normalisation", "recurrent"])
def test_adversarial_search_finds_no_contribution_above_the_bound(kind: str, way: str) -> None:
    """Over inputs and output gradients that try to cancel, overflow, underflow; every engine and
    exact estimator.
    """
    if kind in ("recurrent", "normalisation") and way == "float16-autocast":
        pytest.skip("float16 recurrent and normalisation kernels do not exist on a processor")
    dtype, autocast = WAYS[way]
    source = torch.Generator().manual_seed(len(kind) + 10 * len(way))
    torch.manual_seed(0)
    model, inputs, outputs = layer_of(kind, dtype)

    def loss(model: nn.Module, batch: Pair) -> Tensor:
        with _autocast(autocast):
            return (model(batch[0]).float() * batch[1].float()).flatten(1).sum(1)

    clippers = [Clipper(1.0, e, engine="bookkeeping") for e in EXACT]
    clippers += [
        Clipper(1.0, engine="one-example"),
        Clipper(1.0, "ghost", engine="bookkeeping", scaling="automatic"),
    ]

    def beside_nothing(pair: Pair) -> Pair:
        x, g = (torch.cat([torch.zeros_like(t), t]) for t in pair)
        return x, g

    def worst(pair: Pair) -> float:
        found = 0.0
        for bound in bounds:
            with contextlib.suppress(ValueError):  # refused by the guard: nothing is contributed
                sums = bound.clip(beside_nothing(pair), step=UNGUARDED).gradients.values()
                found = max(found, float(sum(s.double().square().sum() for s in sums)) ** 0.5)
        return found

    start = (
        torch.randn(1, *inputs, generator=source).to(dtype),
        torch.randn(1, *outputs, generator=source).to(dtype) * 100,
    )
    # The guard looks at the first pair alone, so that it stops none of the attacks that follow.
    bounds = [clipper.bind(model, loss) for clipper in clippers]
    for bound in bounds:
        with contextlib.suppress(ValueError):
            bound.clip(beside_nothing(start), step=0)
    found = search(worst, start, 30, source)
    assert 0.99 < found <= LARGEST


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    positions=st.sampled_from([1, 2, 7, 64, 300]),
    sizes=st.tuples(st.floats(-30, 20), st.floats(-30, 30)),
    cancel=st.floats(-12, 0),
    shift=st.floats(0, 9),
)
def test_certified_norms_are_upper_bounds(
    seed: int, positions: int, sizes: tuple[float, float], cancel: float, shift: float
) -> None:
    """Of every estimator, against float64, at any scale and degree of cancellation."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 1, positions, 11, generator=source)
    x[..., 0] += 10.0**shift
    g = torch.randn(2, 1, positions, 9, generator=source)
    g -= (1 - 10.0**cancel) * g.mean(2, keepdim=True)
    x, g = x * 10.0 ** sizes[0], g * 10.0 ** sizes[1]
    use = DenseFactors(g, x)
    # What the sum will hold of each, as it is formed: and no norm may be below that.
    held = [
        estimators_sum(DenseFactors(g[i : i + 1], x[i : i + 1])).double().norm()
        for i in range(len(x))
    ]
    truth = torch.linalg.matrix_norm(g.double().transpose(2, 3) @ x.double())[:, 0]
    for measure in (ghost_norms, materialized_norms):
        found = measure([use], torch.float32)
        sums = rounding.NormSums.empty(1, len(x), x.device)
        sums.add(0, found, 99)
        certified = sums.norms().certified[0]
        for i in range(len(x)):
            if torch.isfinite(certified[i]):
                assert float(certified[i]) >= float(truth[i]) * (1 - 1e-12)
                assert not torch.isfinite(held[i]) or float(certified[i]) >= float(held[i]) * (
                    1 - 1e-7
                )


def estimators_sum(use: DenseFactors) -> Tensor:
    return use.weighted_sum(torch.ones(1), torch.Size((use.sizes.p, use.sizes.d)), torch.float32)


def test_an_embedding_that_reads_one_row_many_times() -> None:
    """Rows are added up one position after the other: 32 768 times the rounding of one addition.
    Before: 1.0027 C, with a million positions 1.12 C.
    """
    g = torch.ones(1, 1, 32768, 4)
    g[:, :, 0] = 2.0**24
    use = OneHotFactors(torch.zeros(1, 32768, dtype=torch.int64), g, 16)
    found = materialized_norms([use], torch.float32)
    factor = 1.0625 / float(found.squared.sqrt())
    held = float(
        use.weighted_sum(torch.full((1,), factor), torch.Size((16, 4)), torch.float32)
        .double()
        .norm()
    )
    assert held > 1.0625 * LARGEST  # the attack works on the estimate alone
    sums = rounding.NormSums.empty(1, 1, g.device)
    sums.add(0, found, 64)
    norms = sums.norms()
    assert float(norms.certified[0, 0]) * factor >= held
    assert bool(norms.doubtful(torch.tensor([1.0], dtype=torch.float64), 0.0).all())


def test_half_precision_and_padding_do_not_switch_a_record_off() -> None:
    """A gradient that overflows float16 where autograd forms it, and not where the sum does:
    whichever way it is measured, it contributes the same.
    """
    x, g = torch.full((1, 8, 4), 300.0), torch.full((1, 8, 4), 300.0)
    found = []
    for padding in (0, 200, 3000):
        wide = tuple(torch.nn.functional.pad(t, (0, 0, 0, padding)) for t in (x, g))
        for estimator in EXACT:
            model = linear(*wide)

            def loss(model: nn.Module, batch: Pair) -> Tensor:
                with torch.autocast("cpu", torch.float16):
                    return (model(batch[0]) * batch[1].half()).float().flatten(1).sum(1)

            clipper = Clipper(1.0, estimator, engine="bookkeeping", physical_batch_size=2)
            both = tuple(torch.cat([torch.zeros_like(t), t]) for t in wide)
            found.append(float(clipper.clip(model, loss, both).gradients["weight"].norm()))
    assert max(found) <= LARGEST and min(found) > 0.99


def test_clip_factors_are_not_rounded_to_half_precision() -> None:
    """Before: 1.0037 C under bfloat16 autocast."""
    worst = 0.0
    for seed in range(40):
        source = torch.Generator().manual_seed(seed)
        batch = tuple(torch.randn(1, 1, n, generator=source) for n in (40, 30))
        with torch.autocast("cpu", torch.bfloat16):
            worst = max(
                worst, contribution(Clipper(1.0, engine="bookkeeping"), linear(*batch), batch)
            )
    assert 0.998 < worst <= 1.0 + 1e-5


def test_thousands_of_half_precision_records_are_summed_in_float32() -> None:
    """Before, with a second backward pass of weighted losses: 32 C for one record beside 4112."""
    source = torch.Generator().manual_seed(0)
    x, g = (1 + torch.rand(4113, n, generator=source).to(torch.bfloat16) / 8 for n in (4, 3))
    model = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    sums = [total(Clipper(1.0), model, (x[:n], g[:n])) for n in (4112, 4113)]
    assert float((sums[1] - sums[0]).norm()) <= LARGEST
    with pytest.raises(ValueError, match="engine='two-pass' is unknown"):
        Clipper(1.0, engine="two-pass")


CUTS = [(7, 7), (7, 3), (7, 1), (4, 2)]


@pytest.mark.grid(6, "models times cuts")
@pytest.mark.parametrize("estimator", [*EXACT, *SKETCHES])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_one_record_more_changes_nothing_of_the_others(estimator: str, place: int) -> None:
    """Under every cut into micro-batches and with padding to a longer record; sketches to the bit,
    exact norms to rounding (E14).
    """
    source = torch.Generator().manual_seed(3)
    x, g = torch.randn(7, 6, 8, generator=source), torch.randn(7, 6, 5, generator=source)
    model = linear(x, g)

    def padded(t: Tensor, by: int) -> Tensor:
        return torch.nn.functional.pad(t, (0, 0, 0, by))

    def others(batch: Pair, size: int, mine: list[int]) -> list[Tensor]:
        """Each record's own contribution: the others' output gradients set to zero."""
        clipper = Clipper(0.5, estimator, 4, engine="bookkeeping", physical_batch_size=size)
        bound, keys = clipper.bind(model, given_gradients), Projections(KEY, 0)
        bound.clip(batch, keys, step=0)
        found = []
        for i in mine:
            only = torch.zeros_like(batch[1])
            only[i] = batch[1][i]
            sums = bound.clip((batch[0], only), keys, step=UNGUARDED).gradients
            found.append(torch.cat([s.double().flatten() for s in sums.values()]))
        return found

    expected = others((x, g), 7, list(range(7)))
    new_x, new_g = (
        torch.randn(1, 9, 8, generator=source) * 50,
        torch.randn(1, 9, 5, generator=source) * 50,
    )
    more = tuple(
        torch.cat([padded(old[:place], 3), new, padded(old[place:], 3)])
        for old, new in ((x, new_x), (g, new_g))
    )
    mine = [i for i in range(8) if i != place]
    for size in (8, 5, 3, 1):
        for a, b in zip(others(more, size, mine), expected, strict=True):
            if estimator in SKETCHES:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_cancelling_crowd_is_not_revealed_by_one_record_more() -> None:
    """E14 as it was run: 800 records whose clipped gradients cancel inside every micro-batch of
    four; one record in front shifts all others. Before: a standard deviation of 3.8 C.
    """
    source = torch.Generator().manual_seed(0)
    a, b = torch.randn(1, 6, generator=source), torch.randn(1, 5, generator=source)
    signs = torch.tensor([1.0, -1.0]).repeat(400)
    x = torch.nn.functional.normalize(a, dim=1).expand(800, 1, 6) * 50
    g = torch.nn.functional.normalize(b, dim=1).expand(800, 1, 5) * signs.view(-1, 1, 1)
    model = linear(x, g)
    clipper = Clipper(1.0, "hutch", 32, physical_batch_size=4)
    silent = (torch.cat([x[:1], x]), torch.cat([torch.zeros_like(g[:1]), g]))
    for step in range(5):
        assert float(total(clipper, model, (x, g), step).norm()) < 1e-3
        assert float(total(clipper, model, silent, step).norm()) < 1e-3


# ------------------------------------------------------------------------------------- the
# protections, switched off


def _no_slack(self: rounding.NormSums, least_times: float) -> Norms:
    estimate = self.squared.clamp_min(0).sqrt()
    return Norms(estimate, estimate, estimate, torch.zeros_like(estimate))


def test_without_certified_bounds_the_attack_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding.NormSums, "norms", _no_slack)
    # What is left of a sum that cancels differs by processor: of one number of positions or other.
    # On some its loss does too, alone and in company, and the guard would not let it pass.
    batches = [cancelling(1e4, 100.0, positions) for positions in (2, 4, 6, 8, 16)]
    clipper = Clipper(1.0, "ghost", engine="bookkeeping")
    assert max(unguarded(clipper, linear(*batch), batch) for batch in batches) > 10


def test_without_the_lost_squares_underflow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g = (
        torch.full((1, 2, 8), 1e-24),
        torch.full((1, 2, 6), 1e18),
    )  # squares of inputs are flushed to zero
    clipper = Clipper(1e-6, "ghost", engine="bookkeeping")
    assert contribution(clipper, linear(x, g), (x, g)) <= LARGEST
    right = ghost._measured_by_ghost

    def forgetful(*arguments: object) -> Measured:
        found = right(*arguments)
        return Measured(
            found.squared, torch.zeros_like(found.slack), torch.zeros_like(found.margin)
        )

    monkeypatch.setattr(ghost, "_measured_by_ghost", forgetful)
    assert contribution(clipper, linear(x, g), (x, g)) > 10


def test_with_a_projection_for_each_micro_batch_the_crowd_is_revealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, calls = hutch_together.sketch_of, []

    def fresh(uses: list, name: str, k: int, _: Projections, *others: object) -> tuple:
        calls.append(name)
        return right(uses, name, k, Projections(KEY, len(calls)), *others)

    monkeypatch.setattr(hutch_together, "sketch_of", fresh)
    monkeypatch.setattr(accumulator, "require_same_norms", lambda *_: None)  # sees it too
    with pytest.raises(AssertionError):
        test_one_record_more_changes_nothing_of_the_others("hutch", 0)


def test_with_half_precision_factors_the_attack_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bookkeeping.clip_factors
    monkeypatch.setattr(bookkeeping, "clip_factors", lambda *a: right(*a).to(torch.bfloat16))
    with pytest.raises(AssertionError):
        test_clip_factors_are_not_rounded_to_half_precision()
