"""Handwritten digits with a small convolutional network, the images that scikit-learn carries.

An Opacus script; with ``from opacus import PrivacyEngine`` it runs there.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine

sys.path.append(str(Path(__file__).parents[1]))
import digits


class SmallConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(args, model, device, train_loader, optimizer, privacy_engine, epoch):
    model.train()
    criterion = nn.CrossEntropyLoss()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
    epsilon = privacy_engine.get_epsilon(delta=args.delta)
    print(f"epoch {epoch}: epsilon {epsilon} at delta {args.delta}")


def test(model, device, test_loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for data, target in test_loader:
            prediction = model(data.to(device)).argmax(dim=1)
            correct += (prediction == target.to(device)).sum().item()
            total += len(target)
    print(f"test accuracy {correct / total:.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--max-per-sample-grad-norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.epochs = 1

    images, labels = digits.load()
    train_loader = DataLoader(
        TensorDataset(images[:1400], labels[:1400]), batch_size=args.batch_size, shuffle=True
    )
    test_loader = DataLoader(TensorDataset(images[1400:], labels[1400:]), batch_size=200)

    model = SmallConvNet().to(args.device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=args.sigma,
        max_grad_norm=args.max_per_sample_grad_norm,
    )
    for epoch in range(1, args.epochs + 1):
        train(args, model, args.device, train_loader, optimizer, privacy_engine, epoch)
        test(model, args.device, test_loader)


if __name__ == "__main__":
    main()
