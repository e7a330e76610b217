"""Small parts that the doors to other libraries rest on, each by itself: what may be stepped on,
and which loaders say nothing of how records are drawn.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from quietgrad.integrations.lightning.data import training_data
from quietgrad.integrations.stepping import ReleasedGradients

DATA = TensorDataset(torch.zeros(6, 2))


def test_a_release_is_stepped_on_once_in_its_own_step() -> None:
    """Mutants: the number of the step, the gradient's version, or itself, is not looked at."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    released = ReleasedGradients("the remedy")

    def note(releases: int) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        released.note(model, releases)

    note(1)
    released.require(optimizer, 1)
    with pytest.raises(RuntimeError, match=r"not released.*the remedy"):
        released.require(optimizer, 1)  # once more
    note(2)
    with pytest.raises(RuntimeError, match="not released"):
        released.require(optimizer, 3)
    note(4)
    model.weight.grad.mul_(2.0)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="not released"):
        released.require(optimizer, 4)
    note(5)
    model.bias.grad = torch.ones_like(model.bias)
    with pytest.raises(RuntimeError, match="not released"):
        released.require(optimizer, 5)
    note(6)
    released.require(optimizer, 6)


@pytest.mark.parametrize("options", [{"replacement": True}, {"num_samples": 5}])
def test_loaders_with_a_law_of_their_own_are_refused(options: dict[str, int]) -> None:
    loader = DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, **options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no epsilon covers another law"):
        training_data(loader)
    for plain in (RandomSampler(DATA), SequentialSampler(DATA)):
        assert training_data(DataLoader(DATA, batch_size=2, sampler=plain)).at_once == 2
