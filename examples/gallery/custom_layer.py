"""A layer of one's own, with a rule for its gradients that autograd has confirmed."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from quietgrad import PrivacyConfig
from quietgrad.clipping import DenseFactors, DirectGradients, add_layer_rule

sys.path.append(str(Path(__file__).parents[1]))
import digits


class Cosine(nn.Module):  # W x / (1 + |x|), scaled by one number an output
    def __init__(self, inputs, outputs):
        super().__init__()
        self.w = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x):
        return (x / (1 + x.norm(dim=-1, keepdim=True))) @ self.w.T * self.scale


def cosine_rule(module, x, grad, wanted):  # x [examples, inputs], grad [examples, outputs]
    short, found = x / (1 + x.norm(dim=-1, keepdim=True)), {}
    if "w" in wanted:  # the outer product of two vectors: never made
        found["w"] = DenseFactors((grad * module.scale)[:, None, None], short[:, None, None])
    if "scale" in wanted:
        found["scale"] = DirectGradients(grad * (short @ module.w.T))
    return found


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main():
    steps = 3 if "--smoke" in sys.argv else 150
    images, labels = digits.load()
    images = images.flatten(1)
    add_layer_rule(cosine_rule, Cosine(5, 3), torch.randn(4, 5))  # tried on what is not private
    model = nn.Sequential(Cosine(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = PrivacyConfig(target_epsilon=4.0, expected_batch_size=300, steps=steps).build(1400)
    with plan.start() as run:
        for indices in run.batches():
            run.backward(model, per_example_loss, (images[indices], labels[indices]))
            optimizer.step()
            optimizer.zero_grad()
    right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    print(f"public accuracy {right:.3f}")
    print(f"epsilon {run.epsilon():.3f} at delta {plan.delta:.1e}")


if __name__ == "__main__":
    main()
