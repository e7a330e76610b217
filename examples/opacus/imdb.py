"""Whether a review is good or bad: embeddings, their mean, two layers. The reviews are made here of
words that are mostly good or mostly bad.

An Opacus script; with ``from opacus import PrivacyEngine`` it runs there.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from quietgrad.integrations.opacus import PrivacyEngine

GOOD = [
    "splendid",
    "moving",
    "bright",
    "clever",
    "tender",
    "funny",
    "superb",
    "honest",
    "warm",
    "gripping",
]
BAD = [
    "dull",
    "clumsy",
    "endless",
    "hollow",
    "noisy",
    "tired",
    "bland",
    "careless",
    "weak",
    "shallow",
]
OTHER = [
    "the",
    "film",
    "plot",
    "actor",
    "scene",
    "music",
    "camera",
    "story",
    "end",
    "hour",
    "this",
    "that",
    "was",
    "and",
]
WORDS = {word: i for i, word in enumerate(["<pad>", *GOOD, *BAD, *OTHER])}


def reviews(count, seed):
    draw, made = random.Random(seed), []
    for _ in range(count):
        label = draw.randrange(2)
        own, others = (GOOD, BAD) if label else (BAD, GOOD)
        words = draw.choices(OTHER, k=draw.randint(5, 30)) + draw.choices(own, k=4)
        words += draw.choices(others, k=2)
        draw.shuffle(words)
        made.append({"ids": torch.tensor([WORDS[word] for word in words]), "label": label})
    return made


def padded_collate(batch, padding_idx=0):
    ids = pad_sequence([r["ids"] for r in batch], batch_first=True, padding_value=padding_idx)
    return ids, torch.tensor([r["label"] for r in batch])


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

    def name(self):
        return "SampleNet"


def binary_accuracy(outputs, labels):
    return (outputs.argmax(dim=1) == labels).float().sum() / len(labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--sigma", type=float, default=0.7)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    size = 3000
    if args.smoke:
        args.epochs, size = 1, 600
    torch.manual_seed(0)
    train_loader = DataLoader(
        reviews(size, 0),
        batch_size=args.batch_size,
        collate_fn=padded_collate,
        num_workers=args.workers,
        shuffle=True,
    )
    test_loader = DataLoader(reviews(500, 1), batch_size=100, collate_fn=padded_collate)
    model = SampleNet(len(WORDS))
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=args.sigma,
        max_grad_norm=1.0,
        poisson_sampling=True,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, args.epochs + 1):
        model.train()
        for ids, labels in train_loader:
            optimizer.zero_grad()
            predictions = model(ids).squeeze(1)
            loss = criterion(predictions, labels)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = [binary_accuracy(model(ids), labels) for ids, labels in test_loader]
        epsilon = privacy_engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: test accuracy {sum(found) / len(found):.3f}, epsilon {epsilon}")


if __name__ == "__main__":
    main()
