"""A GAN: a generator and a discriminator, each with an optimizer of its own, on points of a ring.

python jobs/scripts/gan.py        hpcsync launch -n 4 -- python jobs/scripts/gan.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpcsync  # hpcsync: new


def perceptron(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_out))


def train(generator, discriminator, loader, epochs=1, paradigm="bsp", **settings):
    models = generator, discriminator
    optimizers = of_generator, of_discriminator = [torch.optim.Adam(m.parameters(), 1e-3, (0.5, 0.9)) for m in models]
    ones, zeros = torch.ones_like, torch.zeros_like
    losses = []
    with hpcsync.connect(models, optimizers, paradigm, **settings) as sync:  # hpcsync: new
        for _ in range(epochs):
            for real, noise in sync.shard(loader):  # hpcsync: was for real, noise in loader:
                fake = generator(noise)
                of_real, of_fake = discriminator(real), discriminator(fake.detach())
                loss = F.binary_cross_entropy_with_logits(of_real, ones(of_real))
                loss = loss + F.binary_cross_entropy_with_logits(of_fake, zeros(of_fake))
                of_discriminator.zero_grad()
                loss.backward()
                sync.record(loss)  # hpcsync: new
                of_discriminator.step()
                losses.append(loss.item())

                of_fake = discriminator(fake)
                loss = F.binary_cross_entropy_with_logits(of_fake, ones(of_fake))
                of_generator.zero_grad()
                loss.backward()
                sync.record(loss)  # hpcsync: new
                of_generator.step()
                losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    angles = 6.2832 * torch.rand(2048)
    points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(2048, 2)
    loader = DataLoader(TensorDataset(points, torch.randn(2048, 4)), 32, shuffle=True)
    losses = train(perceptron(4, 2), perceptron(2, 1), loader)
    print("losses of discriminator and generator:", *(f"{loss:.3f}" for loss in losses[-2:]))
