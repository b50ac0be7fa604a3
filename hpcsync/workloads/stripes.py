"""Images that every machine can draw, and what there is to know of the pixels of any."""

from __future__ import annotations

import numpy as np
import torch

CLASSES = 10


def draw(n: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n images of size x size pixels and their classes: (x, y), x of bytes, shape (n, 3, size, size), y int64.

    Stripes in some colour, anywhere and in noise; the class is their direction. A linear model can learn nothing, for
    stripes and those that are their negative are as likely, so that each pixel has the same mean in every class.
    """
    generator = np.random.default_rng([seed, 1])
    y = generator.integers(CLASSES, size=n)
    # Each with the shape (n, 1, 1, 1).
    angle = (np.pi / CLASSES * y).reshape(-1, 1, 1, 1)
    phase = generator.uniform(0.0, 2.0 * np.pi, angle.shape)
    per_pixel = 2.0 * np.pi * generator.uniform(0.15, 0.25, angle.shape)
    rows, columns = np.arange(size).reshape(-1, 1), np.arange(size)
    stripes = np.sin(per_pixel * (np.cos(angle) * rows + np.sin(angle) * columns) + phase)
    colour = generator.uniform(0.2, 1.0, (n, 3, 1, 1))
    x = 127.5 + 50.0 * colour * stripes + 25.0 * generator.standard_normal((n, 3, size, size))
    return torch.from_numpy(x.clip(0.0, 255.0).astype(np.uint8)), torch.from_numpy(y)


def mean_and_std(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each channel, float32, shape (channels,); x: images of bytes, shape (n, channels, height, width)."""
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for part in x.split(1000):  # not all at once, for in this type they are eight times as large
        total += part.double().sum((0, 2, 3))
        squares += part.double().square().sum((0, 2, 3))
    n = x[:, 0].numel()
    mean = total / n
    return mean.float(), (squares / n - mean.square()).sqrt().float()
