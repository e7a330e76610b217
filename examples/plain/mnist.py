"""Handwritten digits with a small convolutional network."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
import digits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs = 1 if args.smoke else args.epochs
    torch.manual_seed(0)
    images, labels = digits.load()
    train_set = TensorDataset(images[:1400], labels[:1400])
    test_set = TensorDataset(images[1400:], labels[1400:])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )
    optimizer = optim.SGD(model.parameters(), lr=args.lr)

    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    for epoch in range(args.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test_set, 100))
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")


if __name__ == "__main__":
    main()
