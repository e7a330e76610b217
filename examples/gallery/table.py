"""Rows with numbers and a category: a vector for each category beside the numbers."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from quietgrad import PrivacyConfig


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.jobs = nn.Embedding(4, 3)
        self.body = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, numbers, job):
        return self.body(torch.cat([numbers, self.jobs(job)], 1))


def made(count):
    """Two numbers, a job, and whether a loan is paid back."""
    numbers, job = torch.randn(count, 2), torch.randint(0, 4, (count,))
    return numbers, job, (numbers[:, 0] + job - 1.5 + 0.3 * torch.randn(count) > 0).long()


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0], batch[1]), batch[2], reduction="none")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    size, steps = (500, 5) if parser.parse_args().smoke else (5000, 200)
    torch.manual_seed(0)
    train, public = TensorDataset(*made(size)), made(1000)
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    plan = PrivacyConfig(target_epsilon=1.0, expected_batch_size=size // 10, steps=steps).build(
        len(train)
    )
    with plan.start() as run:
        for batch in run.loader(train, steps=plan.steps):
            run.backward(model, per_example_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model(*public[:2]).argmax(1) == public[2]).float().mean()
    print(f"public accuracy {right:.3f}")
    print(f"epsilon {run.epsilon():.3f} at delta {plan.delta:.1e}")


if __name__ == "__main__":
    main()
