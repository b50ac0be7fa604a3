"""The digits with a share of the training labels drawn anew at every read, so that gradients stay noisy to the end.

On the digits as they are the network fits every sample long before a learning rate decays, and the decay changes
nothing. Here, as on CIFAR-100, accuracy rises when it decays. Held-out labels are the true ones.
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
    """The same with 64 hidden units in place of convolutions, for runs of a hundred workers: a fourth of the time."""
    layers = Standardised(), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
    return dataclasses.replace(digits(share), model=nn.Sequential(*layers))
