"""Good and bad reviews, told apart by the mean of their words' vectors."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from quietgrad import PrivacyConfig

sys.path.append(str(Path(__file__).parents[1]))
import made


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(made.WORDS), 16, padding_idx=0)
        self.head = nn.Linear(16, 2)

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        return self.head((self.words(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    size, epochs = (400, 2) if parser.parse_args().smoke else (4000, 10)
    torch.manual_seed(0)
    train, public = made.reviews(size, 0), made.reviews(500, 1)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    config = PrivacyConfig(target_epsilon=3.0, expected_batch_size=size // 10, epochs=epochs)
    plan = config.build(len(train))
    with plan.start() as run:
        loader = run.loader(train, collate_fn=made.padded)
        for _ in run.epochs():
            for batch in loader:
                run.backward(model, per_example_loss, batch)
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        told = [
            (model(x).argmax(1) == y).sum()
            for x, y in DataLoader(public, 100, collate_fn=made.padded)
        ]
    print(f"public accuracy {sum(told) / len(public):.3f}")
    print(f"epsilon {run.epsilon():.3f} at delta {plan.delta:.1e}")


if __name__ == "__main__":
    main()
