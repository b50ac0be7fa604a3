"""A small network like VGG (Simonyan and Zisserman 2015) for small images.

It has convolutions of 3 x 3 in three blocks, and three fully-connected layers, which hold most of the parameters. It
can be split at "classifier".
"""

from __future__ import annotations

import torch
from torch import nn


class Standardise(nn.Module):
    """Standardisation of each channel: (x - mean) / std."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the standardised images, shape (B, channels, height, width); x may be uint8."""
        return (x - self.mean) / self.std


class Vgg(nn.Module):
    """A small VGG with standardisation of its input.

    Parameters
    ----------
    size
        Width and height of the images in pixels, a multiple of 8.
    classes
        Number of classes.
    mean, std
        Mean and standard deviation of the images' channels, shape (channels,).
    width
        Channels of the first block; the others have twice and four times as many.
    hidden
        Width of the fully-connected layers.
    dropout
        Dropout probability of their activations.
    """

    def __init__(
        self, size: int, classes: int, *, mean: torch.Tensor, std: torch.Tensor, width: int, hidden: int, dropout: float
    ) -> None:
        super().__init__()
        features: list[nn.Module] = [Standardise(mean, std)]
        channels = len(mean)
        for block in ((width,), (2 * width, 2 * width), (4 * width, 4 * width)):
            for wider in block:
                features += [nn.Conv2d(channels, wider, 3, padding=1), nn.ReLU()]
                channels = wider
            features.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*features)
        classifier: list[nn.Module] = []
        for n_in in (channels * (size // 8) ** 2, hidden):
            classifier += [nn.Linear(n_in, hidden), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.classifier = nn.Sequential(*classifier, last := nn.Linear(hidden, classes))
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)
        nn.init.normal_(last.weight, std=0.01)  # initially all classes are about equally likely

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (B, classes), for images x, shape (B, channels, size, size)."""
        return self.classifier(torch.flatten(self.features(x), 1))
