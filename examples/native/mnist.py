"""Handwritten digits with a small convolutional network."""

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
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test_set, 100))
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
