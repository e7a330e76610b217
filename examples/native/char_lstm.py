"""Which language a name is of, letter by letter, with an LSTM."""

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


class CharNN(nn.Module):
    def __init__(self, classes, hidden_size=64):
        super().__init__()
        self.embedding = nn.Embedding(27, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, classes)

    def forward(self, letters):
        mask = (letters > 0).unsqueeze(-1)
        hidden, _ = self.lstm(self.embedding(letters))
        return self.out((hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2.0)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.epochs, size = (1, 1000) if args.smoke else (args.epochs, 4000)
    torch.manual_seed(0)
    train_set, test_set = made.names(size, 0), made.names(500, 1)
    test_loader = DataLoader(test_set, batch_size=100, collate_fn=made.padded)
    model = CharNN(len(made.SYLLABLES))
    optimizer = optim.SGD(model.parameters(), lr=args.lr)

    def per_example_loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    dp = PrivacyConfig(target_epsilon=8.0, expected_batch_size=args.batch_size, epochs=args.epochs)
    run = dp.build(len(train_set)).start()
    train_loader = run.loader(train_set, collate_fn=made.padded)
    for epoch in range(args.epochs):
        for batch in train_loader:
            optimizer.zero_grad()
            run.backward(model, per_example_loss, batch)
            optimizer.step()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == labels).sum() for x, labels in test_loader)
        print(f"epoch {epoch}: test accuracy {right / len(test_set):.3f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
