"""Handwritten digits with a small convolutional network, in Quietgrad's own interface."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

from quietgrad import PrivacyConfig

sys.path.append(str(Path(__file__).parents[1]))
import digits


def losses(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    images, labels = digits.load()
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
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    plan = PrivacyConfig(
        noise_multiplier=1.0,
        target_delta=1e-4,
        max_grad_norm=1.0,
        expected_batch_size=128,
        epochs=1 if args.smoke else args.epochs,
    ).build(1400)
    with plan.start() as run:
        loader = run.loader(TensorDataset(images[:1400], labels[:1400]))
        for epoch in run.epochs():
            for batch in loader:
                run.backward(model, losses, batch)
                optimizer.step()
            print(f"epoch {epoch}: epsilon {run.epsilon():.2f} at delta {plan.delta}")
    with torch.no_grad():
        right = (model(images[1400:]).argmax(dim=1) == labels[1400:]).float().mean()
    print(f"test accuracy {right:.3f}")


if __name__ == "__main__":
    main()
