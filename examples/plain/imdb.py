"""Whether a review is good or bad: embeddings, their mean, two layers."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
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

    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=made.padded)
    for epoch in range(args.epochs):
        for ids, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(ids), labels).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((model(ids).argmax(1) == labels).sum() for ids, labels in test_loader)
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")


if __name__ == "__main__":
    main()
