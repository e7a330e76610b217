"""A generator of digits and a private discriminator. The discriminator steps twice a batch, on
images that were made and on real ones; the generator learns through it, and is as private as it.

An Opacus script; with ``opacus`` in place of ``quietgrad.integrations.opacus`` it runs there
(Opacus counts the two steps as two batches).
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.integrations.opacus import PrivacyEngine

sys.path.append(str(Path(__file__).parents[1]))
import digits

REAL, FAKE = 1.0, 0.0


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2),
            nn.Conv2d(ndf, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image):
        return self.main(image).view(-1, 1).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--nz", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    images = 2 * digits.load()[0] - 1
    if args.smoke:
        args.epochs, images = 1, images[:400]
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True)
    netG, netD = Generator(args.nz, 32), Discriminator(32)
    criterion = nn.BCELoss()
    optimizerD = optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    privacy_engine = PrivacyEngine()
    netD, optimizerD, loader = privacy_engine.make_private(
        module=netD,
        optimizer=optimizerD,
        data_loader=loader,
        noise_multiplier=args.sigma,
        max_grad_norm=1.0,
    )
    for epoch in range(args.epochs):
        for (real,) in loader:
            # Discriminator, on as many made images as there are real ones; two more are made, since
            # the generator's BatchNorm needs two.
            optimizerD.zero_grad(set_to_none=True)
            batch_size = real.size(0)
            fake = netG(torch.randn(batch_size + 2, args.nz, 1, 1))[:batch_size]
            label_fake = torch.full((batch_size,), FAKE)
            errD_fake = criterion(netD(fake.detach()), label_fake)
            errD_fake.backward()
            optimizerD.step()
            optimizerD.zero_grad(set_to_none=True)

            label_real = torch.full((batch_size,), REAL)
            errD_real = criterion(netD(real), label_real)
            errD_real.backward()
            optimizerD.step()
            optimizerD.zero_grad(set_to_none=True)

            # Generator: a number of images that does not depend on the batch, which is private.
            netG.zero_grad()
            made = netG(torch.randn(args.batch_size, args.nz, 1, 1))
            errG = criterion(netD(made), torch.full((args.batch_size,), REAL))
            errG.backward()
            optimizerG.step()
        epsilon = privacy_engine.get_epsilon(args.delta)
        print(f"epoch {epoch}: epsilon {epsilon} at delta {args.delta}")


if __name__ == "__main__":
    main()
