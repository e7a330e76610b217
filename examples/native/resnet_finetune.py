"""A residual network that saw other images before, with a new head: pretrained here on digits 0 to
4, which play the public data, then fine-tuned on 5 to 9.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from quietgrad import PrivacyConfig
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
import digits


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, channels)

    def forward(self, x):
        inside = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inside)))


def pretrain(model, loader, epochs):
    optimizer = optim.Adam(model.parameters(), lr=0.003)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs = 1 if args.smoke else args.epochs
    torch.manual_seed(0)
    images, labels = digits.load()
    public, own = labels < 5, labels >= 5
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), Block(16), nn.MaxPool2d(2), Block(16)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 4 * 4, 5))
    pretrain(model, DataLoader(TensorDataset(images[public], labels[public]), 64), 1 + args.epochs)
    model[-1] = nn.Linear(16 * 4 * 4, 5)
    records = TensorDataset(images[own], labels[own] - 5)
    train_set, test_set = torch.utils.data.random_split(records, [len(records) - 200, 200])
    optimizer = optim.SGD(model.parameters(), lr=args.lr)

    def per_example_loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    dp = PrivacyConfig(target_epsilon=8.0, expected_batch_size=args.batch_size, epochs=args.epochs)
    run = dp.build(len(train_set)).start()
    train_loader = run.loader(train_set)
    for epoch in range(args.epochs):
        for batch in train_loader:
            optimizer.zero_grad()
            run.backward(model, per_example_loss, batch)
            optimizer.step()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test_set, 50))
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
