"""Small colour images with a convolutional network, and a rate that falls."""

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


def block(inputs, outputs):
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs, size = (1, 400) if args.smoke else (args.epochs, 4000)
    torch.manual_seed(0)
    train_set, test_set = made.images(size, 0), made.images(500, 1)
    layers = [*block(3, 16), *block(16, 32), *block(32, 32)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 2 * 2, 9))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)

    def per_example_loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    dp = PrivacyConfig(target_epsilon=8.0, expected_batch_size=args.batch_size, epochs=args.epochs)
    run = dp.build(len(train_set)).start()
    train_loader = run.loader(train_set)
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            optimizer.zero_grad()
            run.backward(model, per_example_loss, batch)
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test_set, 100))
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
