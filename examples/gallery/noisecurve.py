"""Noise that is shaped by how the loss curves: public digits say how, private ones are learnt."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from quietgrad import PrivacyConfig
from quietgrad.curvature import CurvatureOperator, top_eigenvalues
from quietgrad.noise import BandedNoise, Curvature, IndependentNoise

sys.path.append(str(Path(__file__).parents[1]))
import digits

RATE = 1.0


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def trained(noise, steps, train, test, start):
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    config = PrivacyConfig(target_epsilon=1.0, expected_batch_size=100, steps=steps, noise=noise)
    with config.build(len(train[0])).start() as run:
        for indices in run.batches():
            run.backward(model, per_example_loss, (train[0][indices], train[1][indices]))
            optimizer.step()
            optimizer.zero_grad()
    right = (model(test[0]).argmax(1) == test[1]).float().mean()
    return float(right), run.epsilon()


def main():
    steps, count = (8, 5) if "--smoke" in sys.argv else (100, 60)
    torch.manual_seed(0)
    images, labels = digits.load()
    images = images.flatten(1)
    public, private = (images[:300], labels[:300]), (images[300:1500], labels[300:1500])
    test = images[1500:], labels[1500:]
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(20):  # a start from public digits, where curvature is like that of the run
        optimizer.zero_grad()
        per_example_loss(model, public).mean().backward()
        optimizer.step()
    found = top_eigenvalues(CurvatureOperator(model, per_example_loss, [public]), count, 1e-3)
    load = Curvature(tuple(found.values), RATE, steps, floor=1e-3, horizon="both", clamp=1.0)
    kinds = {"independent": IndependentNoise(), "shaped": BandedNoise(4, workload=load)}
    for name, noise in kinds.items():
        accuracy, epsilon = trained(noise, steps, private, test, model.state_dict())
        print(f"{name} noise: test accuracy {accuracy:.3f} at epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
