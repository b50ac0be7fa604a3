"""An iterable data set: numbers that can only be read one after the other, and batches that are dictionaries.

python jobs/scripts/iterable.py        hpcsync launch -n 4 -- python jobs/scripts/iterable.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

import hpcsync  # hpcsync: new


class Walk(IterableDataset):
    """Windows of a random walk, with the step that follows each."""

    def __init__(self, n_samples, length=16, dtype=torch.float32):
        self.n_samples, self.length, self.dtype = n_samples, length, dtype

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        past, momentum = torch.zeros(self.length, dtype=self.dtype), torch.zeros((), dtype=self.dtype)
        for _ in range(self.n_samples):
            momentum = 0.9 * momentum + torch.randn((), generator=generator, dtype=self.dtype)
            yield {"past": past - past.mean(), "next": momentum}
            past = torch.cat([past[1:], (past[-1] + momentum).unsqueeze(0)])


def train(model, loader, paradigm="bsp", **settings):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.003)
    scheduler = StepLR(optimizer, step_size=5, gamma=0.7)
    losses = []
    with hpcsync.connect(model, optimizer, paradigm, **settings) as sync:  # hpcsync: new
        for batch in sync.shard(loader):  # hpcsync: was for batch in loader:
            loss = F.mse_loss(model(batch["past"]).squeeze(1), batch["next"])
            optimizer.zero_grad()
            loss.backward()
            sync.record(loss)  # hpcsync: new
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    losses = train(model, DataLoader(Walk(2400), 16))
    print("losses:", *(f"{loss:.3f}" for loss in losses[::10]))
