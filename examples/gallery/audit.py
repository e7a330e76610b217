"""Attacks a training of one's own: planted gradients, each there or not by a coin, are looked for
in what was released. A lower bound on epsilon, to hold the claim against.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from quietgrad import PrivacyConfig
from quietgrad.auditing import GradientCanaries, audit_one_run

sys.path.append(str(Path(__file__).parents[1]))
import digits


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0].flatten(1)), batch[1], reduction="none")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    steps, canaries = (3, 50) if parser.parse_args().smoke else (40, 500)
    torch.manual_seed(0)
    images, labels = digits.load()
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = PrivacyConfig(target_epsilon=8.0, sample_rate=0.2, steps=steps).build(1400 + canaries)

    def batches_of(indices):
        yield images[indices], labels[indices]

    def step(released):
        released.write_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

    report = audit_one_run(
        plan, model, per_example_loss, batches_of, GradientCanaries(canaries), update=step
    )
    print(f"claimed: epsilon {report.claimed:.3f} at delta {plan.delta:.1e}")
    print(f"shown: at least {report.lower_bound:.3f}, with confidence {report.confidence}")
    print(report.verdict)


if __name__ == "__main__":
    main()
