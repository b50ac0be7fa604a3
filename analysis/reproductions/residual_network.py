"""A thin residual network with BatchNorm, and drawn images that are hard enough for it."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpcsync.workloads import stripes
from hpcsync.workloads.registry import Workload, classification, cross_entropy
from hpcsync.workloads.vgg import Standardise

SIZE = 12  # pixels
NOISE = 80.0  # of a pixel; that of the workload `images` is 25, at which this network makes next to no errors
VALIDATION, VALIDATION_SEED = 4_000, 10**6  # pictures, the same ones of every run
TESTED, TEST_SEED, PART = 200_000, 2 * 10**6, 10_000  # likewise; drawn in parts with seeds from the first one on


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters (He et al., 2016, option A); (B, n_in, s, s) to (B, n, ...).

    A block with more channels than its input halves the size.
    """

    def __init__(self, n_in: int, n: int) -> None:
        super().__init__()
        self._added, self._stride = n - n_in, 1 if n == n_in else 2
        self.convolutions = nn.Sequential(
            *_convolution(n_in, n, self._stride), nn.ReLU(inplace=True), *_convolution(n, n)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        shortcut = functional.pad(x[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._added))
        return functional.relu(self.convolutions(x) + shortcut)


def _convolution(n_in: int, n: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(n_in, n, 3, stride, 1, bias=False), nn.BatchNorm2d(n)


def network(width: int, mean: torch.Tensor, std: torch.Tensor) -> nn.Module:
    """Return the network of 6 n + 2 layers of He et al. (2016, section 4.2) with n = 1; they have a width of 16."""
    return nn.Sequential(
        Standardise(mean, std),
        *_convolution(3, width),
        nn.ReLU(inplace=True),
        Block(width, width),
        Block(width, 2 * width),
        Block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, stripes.CLASSES),
    )


def pictures(samples: int, width: int) -> Workload:
    """Return drawn images and the network.

    Parameters
    ----------
    samples
        Number of training images, which the job's seed determines.
    width
        Channels of the first layers.
    """
    x, y = stripes.draw(samples, SIZE, torch.initial_seed(), NOISE)
    held_out = stripes.draw(VALIDATION, SIZE, VALIDATION_SEED, NOISE)
    return Workload(
        network(width, *stripes.mean_and_std(x)), cross_entropy, TensorDataset(x, y), classification(*held_out)
    )


def test_images(n: int = TESTED) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield images that no run has seen, and their classes, in parts."""
    for begin in range(0, n, PART):
        yield stripes.draw(min(PART, n - begin), SIZE, TEST_SEED + begin, NOISE)


@functools.cache
def all_test_images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return all of them, drawn once in a process: 87 MB."""
    return list(test_images())
