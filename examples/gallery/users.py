"""People with several records each: all records of one person are protected together."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from quietgrad import PrivacyConfig, Users


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def made(count):
    x = torch.randn(count, 20)
    return x, (x[:, 0] + 0.3 * torch.randn(count) > 0).long()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    people, steps = (100, 4) if parser.parse_args().smoke else (1000, 100)
    torch.manual_seed(0)
    train, (public, labels) = TensorDataset(*made(5 * people)), made(1000)
    owners = [f"person {i % people}" for i in range(len(train))]
    model = torch.nn.Linear(20, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = PrivacyConfig(
        target_epsilon=2.0,
        expected_batch_size=people // 10,  # people, not records
        steps=steps,
        users=Users(records_per_user=4, combined="mean"),
    )
    plan = config.build(len(train), record_owner=owners)
    with plan.start() as run:
        for batch in run.loader(train, physical_batch_size=64, steps=plan.steps):
            run.backward(model, per_example_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model(public).argmax(1) == labels).float().mean()
    print(f"public accuracy {right:.3f}, {plan.dataset_size} people")
    print(f"epsilon {run.epsilon():.3f} per person, at delta {plan.delta:.1e}")


if __name__ == "__main__":
    main()
