"""Whether a review is good or bad: embeddings, their mean, two layers."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from quietgrad import PrivacyConfig
from torch import nn, optim
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[1]))
import made


class SampleNet(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.emb = nn.Embedding(words, 16, padding_idx=0)
        self.fc1 = nn.Linear(16, 16)
        self.fc2 = nn.Linear(16, 2)

    def forward(self, ids):
        mask = (ids > 0).unsqueeze(-1)
        x = (self.emb(ids) * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return self.fc2(F.relu(self.fc1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs, size = (1, 600) if args.smoke else (args.epochs, 3000)
    torch.manual_seed(0)
    train_set, test_set = made.reviews(size, 0), made.reviews(500, 1)
    test_loader = DataLoader(test_set, batch_size=100, collate_fn=made.padded)
    model = SampleNet(len(made.WORDS))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)

    def per_example_loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    dp = PrivacyConfig(target_epsilon=8.0, expected_batch_size=args.batch_size, epochs=args.epochs)
    run = dp.build(len(train_set)).start()
    train_loader = run.loader(train_set, collate_fn=made.padded)
    for epoch in range(args.epochs):
        for batch in train_loader:
            optimizer.zero_grad()
            run.backward(model, per_example_loss, batch)
            optimizer.step()
        with torch.no_grad():
            right = sum((model(ids).argmax(1) == labels).sum() for ids, labels in test_loader)
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
