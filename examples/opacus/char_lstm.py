"""Which language a name is of, letter by letter, with an LSTM whose first state the loop makes. The
names are made here of each language's syllables.

An Opacus script; with ``opacus`` in place of ``quietgrad.integrations.opacus`` it runs there.
"""

import argparse
import random

import torch
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from quietgrad.integrations.opacus import PrivacyEngine
from quietgrad.integrations.opacus.layers import DPLSTM

SYLLABLES = {
    "north": ["bjorn", "sen", "gard", "sig", "run", "ulf", "hild"],
    "south": ["gio", "van", "ni", "lu", "ca", "elli", "rosa"],
    "east": ["ko", "shi", "ta", "na", "ka", "mu", "ra"],
    "west": ["mac", "lean", "o", "brien", "fitz", "ger", "ald"],
}


class Names(Dataset):
    def __init__(self, count, seed):
        draw = random.Random(seed)
        self.languages = sorted(SYLLABLES)
        self.records = []
        for _ in range(count):
            label = draw.randrange(len(self.languages))
            syllables = SYLLABLES[self.languages[label]]
            name = "".join(draw.choices(syllables, k=draw.randint(2, 4)))
            letters = torch.tensor([ord(letter) - 96 for letter in name])
            self.records.append((letters, label))

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return self.records[index]


def padded_collate(records):
    letters = pad_sequence([x for x, _ in records], batch_first=True)
    return letters, torch.tensor([label for _, label in records])


class CharNN(nn.Module):
    def __init__(self, classes, hidden_size=64, layers=1):
        super().__init__()
        self.hidden_size, self.layers = hidden_size, layers
        self.embedding = nn.Embedding(27, 32)
        self.lstm = DPLSTM(32, hidden_size, num_layers=layers, batch_first=True)
        self.out = nn.Linear(hidden_size, classes)

    def forward(self, x, hidden=None):
        x, hidden = self.lstm(self.embedding(x), hidden)
        return self.out(x.mean(dim=1))


def first_state(layers, batch_size, hidden_size):
    return torch.zeros(layers, batch_size, hidden_size), torch.zeros(
        layers, batch_size, hidden_size
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=2.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("-c", "--max-per-sample-grad-norm", type=float, default=1.5)
    parser.add_argument("--delta", type=float, default=8e-5)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    size = 4000
    if args.smoke:
        args.epochs, size = 1, 1000
    torch.manual_seed(0)
    train_loader = DataLoader(
        Names(size, 0), batch_size=args.batch_size, collate_fn=padded_collate, shuffle=True
    )
    test_loader = DataLoader(Names(500, 1), batch_size=100, collate_fn=padded_collate)
    model = CharNN(len(SYLLABLES))
    optimizer = optim.SGD(model.parameters(), lr=args.learning_rate)
    criterion = nn.CrossEntropyLoss()
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=args.sigma,
        max_grad_norm=args.max_per_sample_grad_norm,
    )
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            hidden = first_state(1, len(x), 64)
            loss = criterion(model(x, hidden), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(dim=1) == y).sum().item() for x, y in test_loader)
        epsilon = privacy_engine.get_epsilon(delta=args.delta)
        print(f"epoch {epoch}: test accuracy {right / 500:.3f}, epsilon {epsilon}")


if __name__ == "__main__":
    main()
