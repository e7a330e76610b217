"""Small colour images with a vision transformer: patches, places and attention."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs, size = (1, 300) if args.smoke else (args.epochs, 4000)
    torch.manual_seed(0)
    train_set, test_set = made.images(size, 0), made.images(500, 1)
    model = VisionTransformer(9)
    optimizer = optim.AdamW(model.parameters(), lr=args.lr)

    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test_set, 100))
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")


if __name__ == "__main__":
    main()
