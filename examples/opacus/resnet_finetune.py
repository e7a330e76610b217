"""A residual network that saw other images before, with a new head: pretrained here on digits 0 to
4 without privacy (they play the public data), then fine-tuned privately on 5 to 9.

An Opacus script; with ``opacus`` in place of ``quietgrad.integrations.opacus`` it runs there.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.validators import ModuleValidator

sys.path.append(str(Path(__file__).parents[1]))
import digits


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        inside = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inside)))


class ResNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Sequential(Block(16), nn.MaxPool2d(2), Block(16))
        self.fc = nn.Linear(16 * 4 * 4, classes)

    def forward(self, x):
        return self.fc(self.body(F.relu(self.stem(x))).flatten(1))


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
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--freeze", action="store_true", help="train the head alone")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.epochs = 1
    torch.manual_seed(0)
    images, labels = digits.load()
    public, own = labels < 5, labels >= 5
    model = ModuleValidator.fix(ResNet(5))
    pretrain(model, DataLoader(TensorDataset(images[public], labels[public]), 64), 1 + args.epochs)
    model.fc = nn.Linear(16 * 4 * 4, 5)
    if args.freeze:
        model.requires_grad_(False)
        model.fc.requires_grad_(True)
    records = TensorDataset(images[own], labels[own] - 5)
    train_set, test_set = torch.utils.data.random_split(records, [len(records) - 200, 200])
    model.train()
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(train_set, batch_size=args.batch_size, shuffle=True),
        noise_multiplier=args.sigma,
        max_grad_norm=1.0,
    )
    for epoch in range(1, args.epochs + 1):
        model.train()
        for x, y in train_loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test_set, 50))
        epsilon = privacy_engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: test accuracy {right / 200:.3f}, epsilon {epsilon}")


if __name__ == "__main__":
    main()
