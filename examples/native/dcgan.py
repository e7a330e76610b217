"""A generator of digits and a discriminator. The generator learns through the discriminator alone,
and never sees an image. What the discriminator tells an image from is made of noise of its own.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from quietgrad import PrivacyConfig
from torch import nn, optim
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1]))
import digits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--nz", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    images = 2 * digits.load()[0] - 1
    args.epochs, images = (1, images[:400]) if args.smoke else (args.epochs, images)
    train_set = TensorDataset(images, torch.randn(len(images), args.nz, 1, 1))
    netG = nn.Sequential(
        nn.ConvTranspose2d(args.nz, 32, 4, 1, 0),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1),
        nn.Tanh(),
    )
    netD = nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4, 1, 0),
        nn.Flatten(0),
    )
    optimizerD = optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))

    def discriminator_loss(netD, batch):
        real, noise = batch
        return F.softplus(-netD(real)) + F.softplus(netD(netG(noise).detach()))

    dp = PrivacyConfig(target_epsilon=8.0, expected_batch_size=args.batch_size, epochs=args.epochs)
    run = dp.build(len(train_set)).start()
    train_loader = run.loader(train_set)
    for epoch in range(args.epochs):
        for batch in train_loader:
            optimizerD.zero_grad()
            run.backward(netD, discriminator_loss, batch)
            optimizerD.step()

            optimizerG.zero_grad()
            made = netG(torch.randn(args.batch_size, args.nz, 1, 1))
            F.softplus(-netD(made)).mean().backward()
            optimizerG.step()
        print(f"epoch {epoch}: a made image has mean {made[0].mean():.2f}")
        print(f"epoch {epoch}: epsilon {run.epsilon()}")


if __name__ == "__main__":
    main()
