"""A script that compiles its model: hpcsync keeps torch from loading its compiler until then, which takes seconds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpcsync
from hpcsync.training.sampler import batches

BATCH, STEPS = 4, 5


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(forward, optimizer, loader) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x), y).backward()
        optimizer.step()


@pytest.mark.once
@pytest.mark.parametrize("paradigm", ["bsp", "allreduce"])
def test_a_compiled_model_trains_as_the_plain_one(comm, only, folder, paradigm):
    only(3)
    n_workers = comm.size - (paradigm == "bsp")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * n_workers * STEPS, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = make()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with hpcsync.connect(model, optimizer, paradigm, out=folder / "run", comm=comm) as sync:
        train(compiled, optimizer, sync.shard(data, BATCH))
    plain = make()
    of_workers = [
        batches(data, 0, worker, n_workers=n_workers, batch_size=BATCH, epochs=range(1)) for worker in range(n_workers)
    ]
    together = (tuple(map(torch.cat, zip(*each, strict=True))) for each in zip(*of_workers, strict=True))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), together)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-10)
