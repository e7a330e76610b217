"""What stands out of the noise, and keeps its direction, is trusted more: no privacy is spent."""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.denoising import PersistentAmplification, SpectralAdamW

sys.path.append(str(Path(__file__).parents[1]))
import digits


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0].flatten(1)), batch[1], reduction="none")


def trained(steps, amplified, images, labels):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    if amplified:
        optimizer = SpectralAdamW(model, PersistentAmplification(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    plan = PrivacyConfig(target_epsilon=4.0, expected_batch_size=300, steps=steps).build(1400)
    with plan.start() as run:
        for indices in run.batches():
            released = run.backward(model, per_example_loss, (images[indices], labels[indices]))
            optimizer.step(released) if amplified else optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = (model(images[1400:].flatten(1)).argmax(1) == labels[1400:]).float().mean()
    return float(right), run.epsilon()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    steps = 4 if parser.parse_args().smoke else 100
    images, labels = digits.load()
    for amplified in (False, True):
        accuracy, epsilon = trained(steps, amplified, images, labels)
        name = "amplified" if amplified else "plain"
        print(f"{name}, at a small rate: public accuracy {accuracy:.3f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
