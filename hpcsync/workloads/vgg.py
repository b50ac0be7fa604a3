"""A small network like VGG (Simonyan and Zisserman 2015) for small images: convolutions of 3 x 3 in three blocks, and
three fully-connected layers, which hold most of the parameters. It can be cut at "classifier"."""

from __future__ import annotations

import torch
from torch import nn


class Standardise(nn.Module):
    """(x - mean) / std of each channel; x: (B, channels, height, width), of bytes too."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.std: torch.Tensor
        self.register_buffer("mean", mean.view(-1, 1, 1))
        self.register_buffer("std", std.view(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


class Vgg(nn.Module):
    """Logits of images of size x size pixels, a multiple of 8: (B, channels, size, size) to (B, classes).

    mean, std: of the images' channels. width: channels of the first block, the others have twice and four times as
    many. hidden: width of the fully-connected layers. dropout: share of their activations that is left out.
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
        nn.init.normal_(last.weight, std=0.01)  # at first it expects every class alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))
