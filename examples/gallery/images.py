"""Handwritten digits; every image and its shifted copies are averaged before clipping."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from quietgrad import PrivacyConfig

sys.path.append(str(Path(__file__).parents[1]))
import digits


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def views(images):
    """[records, 3, 1, 8, 8]: as it is, and a pixel to the left and to the right."""
    return torch.stack([images, images.roll(1, -1), images.roll(-1, -1)], 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    steps = 3 if parser.parse_args().smoke else 150
    torch.manual_seed(0)
    images, labels = digits.load()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = PrivacyConfig(
        target_epsilon=4.0, expected_batch_size=300, steps=steps, augmentation_multiplicity=3
    ).build(dataset_size=1400)
    with plan.start() as run:
        for indices in run.batches():
            batch = views(images[indices]), labels[indices, None].expand(-1, 3)
            run.backward(model, per_example_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    print(f"public accuracy {right:.3f}")
    print(f"epsilon {run.epsilon():.3f} at delta {plan.delta:.1e}")


if __name__ == "__main__":
    main()
