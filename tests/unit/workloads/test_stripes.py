"""Synthetic images: a convolutional network learns them, a linear model does not."""

import numpy as np
import pytest
import torch
from torch import nn

from hpcsync.training.sampler import batch_indices, fetch
from hpcsync.workloads import stripes
from hpcsync.workloads.registry import Workload, build, cross_entropy
from tests.unit.jobs import make_job

SMALL = {"name": "images", "samples": 1500, "size": 8, "width": 4, "hidden": 64}


def test_images_are_bytes_of_every_class():
    x, y = stripes.draw(500, 16, 1)
    assert (x.shape, x.dtype) == ((500, 3, 16, 16), torch.uint8)
    assert (y.shape, y.dtype) == ((500,), torch.int64)
    assert y.unique().tolist() == list(range(stripes.CLASSES))
    assert all(torch.equal(a, b) for a, b in zip(stripes.draw(500, 16, 1), (x, y), strict=True))
    assert not torch.equal(stripes.draw(500, 16, 2)[0], x)


def test_noise_has_the_asked_strength():
    quiet, usual, loud = (stripes.draw(500, 16, 1, noise=noise)[0].double() for noise in (0.0, 25.0, 40.0))
    assert torch.equal(usual, stripes.draw(500, 16, 1)[0].double())
    assert (usual - quiet).std() == pytest.approx(25.0, rel=0.01)
    assert (loud - quiet).std() == pytest.approx(40.0, rel=0.03)  # a little is clipped


def test_stripes_run_as_the_class_says():
    x, y = stripes.draw(2000, 16, 1)
    grey = x.double().mean(1)
    down = (grey[:, 1:] - grey[:, :-1]).square().mean((1, 2))
    along = (grey[:, :, 1:] - grey[:, :, :-1]).square().mean((1, 2))
    share = torch.stack([(down / (down + along))[y == k].mean() for k in range(stripes.CLASSES)])
    assert share.argmax() == 0  # class 0 changes from row to row, class 5 from column to column
    assert share.argmin() == 5


def test_mean_and_std_are_those_of_numpy():
    x = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (1234, 3, 4, 4)).astype(np.uint8))
    mean, std = stripes.mean_and_std(x)
    assert mean.dtype == std.dtype == torch.float32
    assert mean.numpy() == pytest.approx(x.numpy().mean((0, 2, 3)), rel=1e-6)
    assert std.numpy() == pytest.approx(x.numpy().std((0, 2, 3)), rel=1e-6)


def accuracy_after_training(workload: Workload, model: nn.Module, lr: float, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        x, y = fetch(workload.train, batch_indices(1, step, batch_size=50, size=1500))
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    return workload.evaluate(model)[1]


def test_a_small_vgg_learns_them_and_a_linear_model_does_not():
    workload = build(make_job(workload=SMALL))
    linear = nn.Sequential(workload.model.features[0], nn.Flatten(), nn.Linear(192, 10))
    assert accuracy_after_training(workload, linear, 0.01, 150) < 0.25
    assert accuracy_after_training(workload, workload.model, 0.01, 300) > 0.8


def test_held_out_images_are_not_trained_on():
    judged = []

    class Spy(nn.Module):
        def forward(self, x):
            judged.append(x)
            return torch.zeros(len(x), 10)

    workload = build(make_job(workload=SMALL))
    workload.evaluate(Spy())
    held_out = torch.cat(judged)
    assert len(held_out) == 500
    together = torch.cat([workload.train.tensors[0], held_out]).flatten(1)
    assert len(together.unique(dim=0)) == 2000
