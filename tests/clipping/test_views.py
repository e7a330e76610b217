"""Augmentation multiplicity: the gradient of the mean of a record's views is clipped, by every
engine, estimator and kind of layer.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import Clipper
from quietgrad.clipping.norms.estimators.projections import Projections
from quietgrad.clipping.soundness.oracle import oracle_clipped_sum, oracle_norms
from quietgrad.randomness import RandomKey

RECORDS, VIEWS = 5, 3
Pair = dict[str, Tensor]


class Small(nn.Module):
    """A convolution with groups, a normalisation, an embedding, and linear layers at positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.convolution = nn.Conv1d(4, 6, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 6)
        self.positions = nn.Linear(6, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.convolution(self.embedding(ids).transpose(1, 2)))
        return self.head(torch.tanh(self.positions(h.transpose(1, 2))).mean(1))


def loss(model: nn.Module, batch: Pair) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"], reduction="none")


def data() -> tuple[nn.Module, Pair]:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 9, (RECORDS, VIEWS, 6)), "y": torch.randint(0, 3, (RECORDS,))}
    batch["y"] = batch["y"].unsqueeze(1).expand(-1, VIEWS)
    return Small(), batch


def gradients_of_means(model: nn.Module, batch: Pair) -> list[dict[str, Tensor]]:
    parameters = dict(model.named_parameters())
    found = []
    for i in range(RECORDS):
        mean = loss(model, {name: t[i] for name, t in batch.items()}).mean()
        found.append(
            dict(zip(parameters, torch.autograd.grad(mean, list(parameters.values())), strict=True))
        )
    return found


@pytest.mark.parametrize("physical_batch_size", [None, 2])
@pytest.mark.parametrize(
    ("estimator", "engine"),
    [
        ("exact", "bookkeeping"),
        ("ghost", "bookkeeping"),
        ("materialized", "bookkeeping"),
        ("exact", "one-example"),
    ],
)
def test_views_are_averaged_before_clipping(
    estimator: str, engine: str, physical_batch_size: int | None
) -> None:
    model, batch = data()
    expected = gradients_of_means(model, batch)
    norms = oracle_norms(expected)
    clip = float(norms.median())
    size = None if engine == "one-example" else physical_batch_size
    clipper = Clipper(clip, estimator, engine=engine, physical_batch_size=size, views=VIEWS)
    torch.testing.assert_close(
        clipper.norms(model, loss, batch).double(), norms.double(), rtol=1e-5, atol=0
    )
    clipped = clipper.clip(model, loss, batch)
    assert clipped.private.examples == RECORDS
    for name, g in oracle_clipped_sum(expected, clip).items():
        torch.testing.assert_close(clipped.gradients[name], g, rtol=1e-4, atol=1e-6)
    flat = {name: t.flatten(0, 1) for name, t in batch.items()}
    as_records = Clipper(clip, estimator, engine=engine, physical_batch_size=size).clip(
        model, loss, flat
    )
    assert not torch.allclose(
        as_records.gradients["head.weight"], clipped.gradients["head.weight"], rtol=1e-2
    )


def test_views_of_a_sketch_are_further_positions() -> None:
    model, batch = data()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "positions.weight")
    bound = Clipper(1.0, "hutch", 8, views=VIEWS).bind(model, loss)
    drawn = [
        float(bound.norms(batch, Projections(RandomKey.from_seed(1), t), t)[0]) for t in range(400)
    ]
    squares = torch.tensor(drawn).double().square()
    truth = float(Clipper(1.0, views=VIEWS).norms(model, loss, batch)[0]) ** 2
    # Unbiased: six standard errors, exceeded with probability 2e-9.
    assert abs(float(squares.mean()) - truth) < 6 * float(squares.std()) / 20
    assert abs(float(squares.mean()) - truth * VIEWS) > 6 * float(squares.std()) / 20


def test_a_batch_without_views_is_refused() -> None:
    model, batch = data()
    with pytest.raises(ValueError, match=r"views=3.*\[records, views"):
        Clipper(1.0, views=VIEWS).clip(
            model, loss, {"ids": batch["ids"][:, 0], "y": batch["y"][:, 0]}
        )
    with pytest.raises(ValueError, match="views=0"):
        Clipper(1.0, views=0)


def test_a_run_counts_records_and_not_views() -> None:
    model, batch = data()
    config = PrivacyConfig(
        noise_multiplier=1.0, sample_rate=0.5, steps=3, augmentation_multiplicity=VIEWS
    )
    with config.build(RECORDS).start() as run:
        for indices in run.batches():
            part = {name: t[torch.as_tensor(indices)] for name, t in batch.items()}
            assert run.step(model, loss, part).gradients
