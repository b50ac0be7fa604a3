"""Synthetic images of stripes, and pixel statistics of any images."""

from __future__ import annotations

import numpy as np
import torch

CLASSES = 10


def draw(n: int, size: int, seed: int, noise: float = 25.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw images of coloured stripes with noise; the class is the direction of the stripes.

    A linear model learns nothing from them: stripes and their negatives are equally likely, so that each pixel has the
    same mean in every class.

    Parameters
    ----------
    n
        Number of images.
    size
        Width and height in pixels.
    seed
        Random seed.
    noise
        Standard deviation of the noise; stripes have an amplitude of 10 to 50.

    Returns
    -------
    x : torch.Tensor
        Images, uint8, shape (n, 3, size, size).
    y : torch.Tensor
        Classes, int64, shape (n,).
    """
    generator = np.random.default_rng([seed, 1])
    y = generator.integers(CLASSES, size=n)
    # Each of shape (n, 1, 1, 1).
    angle = (np.pi / CLASSES * y).reshape(-1, 1, 1, 1)
    phase = generator.uniform(0.0, 2.0 * np.pi, angle.shape)
    per_pixel = 2.0 * np.pi * generator.uniform(0.15, 0.25, angle.shape)
    rows, columns = np.arange(size).reshape(-1, 1), np.arange(size)
    stripes = np.sin(per_pixel * (np.cos(angle) * rows + np.sin(angle) * columns) + phase)
    colour = generator.uniform(0.2, 1.0, (n, 3, 1, 1))
    x = 127.5 + 50.0 * colour * stripes + noise * generator.standard_normal((n, 3, size, size))
    return torch.from_numpy(x.clip(0.0, 255.0).astype(np.uint8)), torch.from_numpy(y)


def mean_and_std(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of each channel, float32, shape (channels,) each, of images (n, c, h, w)."""
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in x.split(1000):  # in parts: in float64 the images are eight times as large
        total += part.double().sum((0, 2, 3))
        squares += part.double().square().sum((0, 2, 3))
    n = x[:, 0].numel()
    mean = total / n
    return mean.float(), (squares / n - mean.square()).sqrt().float()
