"""Classifiers of rows: a linear one, and a small network on numbers and embedded categories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quietgrad.checks import nearest

PREFIX = "table:"
HIDDEN = {"table:linear": (), "table:mlp": (128, 64)}
LARGEST_EMBEDDING = 16


class TableClassifier(nn.Module):
    """Numbers beside an embedding of every column of categories, hidden layers, linear head."""

    def __init__(
        self, width: int, categories: Sequence[int], hidden: Sequence[int], num_labels: int
    ) -> None:
        """Builds it.

        Args:
            width: numbers a row.
            categories: of each other column.
            hidden: widths of the hidden layers.
            num_labels: of the head, which begins at zero.
        """
        super().__init__()
        sizes = [min(LARGEST_EMBEDDING, (count + 1) // 2) for count in categories]
        self.embeddings = nn.ModuleList(
            nn.Embedding(n, size) for n, size in zip(categories, sizes, strict=True)
        )
        layers: list[nn.Module] = []
        inputs = width + sum(sizes)
        for units in hidden:
            layers += [nn.Linear(inputs, units), nn.ReLU()]
            inputs = units
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_labels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """[examples, width] numbers and [examples, columns] categories to [examples, labels]
        logits.
        """
        embedded = [table(codes[:, i]) for i, table in enumerate(self.embeddings)]
        logits: Tensor = self.head(self.body(torch.cat([numbers, *embedded], dim=1)))
        return logits


def hidden_layers(name: str) -> tuple[int, ...]:
    """Widths of the hidden layers of a model's name.

    Raises:
        ValueError: for a name that is not known.
    """
    if name not in HIDDEN:
        raise ValueError(
            f"model.name={name!r} is no model of tables{nearest(name, HIDDEN)}; use one of "
            f"{', '.join(HIDDEN)}"
        )
    return HIDDEN[name]
