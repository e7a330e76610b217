"""One run on several processes; each clips its share of every batch, and one draws the noise.

    torchrun --nproc-per-node 2 examples/gallery/many_processes.py

Started alone it is the same run on one process.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from quietgrad import PrivacyConfig

sys.path.append(str(Path(__file__).parents[1]))
import digits


def per_example_loss(model, batch):
    return F.cross_entropy(model(batch[0].flatten(1)), batch[1], reduction="none")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true")
    steps = 3 if parser.parse_args().smoke else 100
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # or nccl, a GPU each
    torch.manual_seed(0)  # the same weights on every process
    images, labels = digits.load()
    train = TensorDataset(images[:1400], labels[:1400])  # all of it, on every process
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = PrivacyConfig(target_epsilon=4.0, expected_batch_size=200, steps=steps).build(len(train))
    with plan.start() as run:
        for batch in run.loader(train, physical_batch_size=50, steps=plan.steps):
            run.backward(model, per_example_loss, batch)
            optimizer.step()
            optimizer.zero_grad()
    if not dist.is_initialized() or dist.get_rank() == 0:
        with torch.no_grad():
            right = (model(images[1400:].flatten(1)).argmax(1) == labels[1400:]).float().mean()
        print(f"public accuracy {right:.3f}")
        print(f"epsilon {run.epsilon():.3f} at delta {plan.delta:.1e}")
    if dist.is_initialized():
        dist.barrier()  # all leave together
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
