"""Digits with a share of the training labels redrawn at every read, so that gradients stay noisy until the end.

On the original digits the network fits every sample long before the learning rate decays, and the decay has no effect.
Here, as on CIFAR-100, accuracy rises when the learning rate decays. Held-out labels are not changed.
"""

import dataclasses

import torch
from torch import nn

from hpcsync.config.job import Job
from hpcsync.workloads.registry import Workload, build, cross_entropy

CLASSES = 10
MEAN, DEVIATION = 0.3, 0.38  # of the pixels


class Standardised(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - MEAN) / DEVIATION


def digits(share: float) -> Workload:
    """The workload `digits` of the same seed, with standardised pixels, this share of the labels drawn at random."""
    stop, paradigm, optimizer = {"updates": 1}, {"name": "bsp"}, {"name": "sgd", "lr": 1.0}
    rest = {"name": "digits", "stop": stop, "paradigm": paradigm, "optimizer": optimizer}
    plain = build(Job.from_table({"seed": torch.initial_seed(), "workload": {"name": "digits"}, **rest}))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        anew = torch.rand(len(y)) < share
        return cross_entropy(model, x, torch.where(anew, torch.randint(CLASSES, y.shape), y))

    return dataclasses.replace(plain, model=nn.Sequential(Standardised(), *plain.model), loss=loss)


def perceptron(share: float) -> Workload:
    """Return the same data with 64 hidden units instead of convolutions: a fourth of the time, for many workers."""
    layers = Standardised(), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    return dataclasses.replace(digits(share), model=nn.Sequential(*layers))
