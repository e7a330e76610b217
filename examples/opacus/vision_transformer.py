"""A vision transformer on small coloured shapes that are made here: the compatibility layers for
attention, noise that falls by a schedule, and batches in parts.

An Opacus script; with ``from opacus import ...`` in the four lines below it runs there.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.schedulers import StepNoise
from quietgrad.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from quietgrad.integrations.opacus.validators import ModuleValidator

sys.path.append(str(Path(__file__).parents[1]))
import made


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        y = self.before(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.mlp(self.between(x))


class VisionTransformer(nn.Module):
    def __init__(self, classes, width=32, heads=4, depth=2):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Embedding(16, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        places = torch.arange(16, device=x.device).expand(len(x), 16)
        return self.head(self.norm(self.blocks(x + self.places(places))).mean(1))


def train(args, model, train_loader, optimizer, privacy_engine, epoch):
    model.train()
    with BatchMemoryManager(
        data_loader=train_loader,
        max_physical_batch_size=args.max_physical_batch_size,
        optimizer=optimizer,
    ) as parts:
        for images, target in parts:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), target)
            loss.backward()
            optimizer.step()
    epsilon = privacy_engine.get_epsilon(delta=args.delta)
    print(f"epoch {epoch}: sigma {optimizer.noise_multiplier:.3f}, epsilon {epsilon}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--max-physical-batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    size = 4000
    if args.smoke:
        args.epochs, args.batch_size, size = 2, 100, 300
    torch.manual_seed(0)
    train_loader = DataLoader(made.images(size, 0), batch_size=args.batch_size)
    test_loader = DataLoader(made.images(500, 1), batch_size=100)

    model = VisionTransformer(9)
    if not ModuleValidator.is_valid(model):  # Opacus puts attention layers of its own in
        model = ModuleValidator.fix(model)
    model.train()
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)
    privacy_engine = PrivacyEngine(accountant="rdp")
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=args.sigma,
        max_grad_norm=args.clip,
    )
    noise = StepNoise(optimizer, step_size=5, gamma=0.9)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, privacy_engine, epoch)
        noise.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(dim=1) == y).sum().item() for x, y in test_loader)
        print(f"test accuracy {right / 500:.3f}")


if __name__ == "__main__":
    main()
