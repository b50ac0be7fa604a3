"""Lightning Fabric: its precision, device and backward pass; hpcsync takes the place of its strategies.

python jobs/scripts/fabric.py        hpcsync launch -n 4 -- python jobs/scripts/fabric.py
"""

import torch
from lightning_fabric import Fabric, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import hpcsync  # hpcsync: new


def train(fabric, model, loader, n_steps, paradigm="bsp", **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=n_steps)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    with hpcsync.connect(model, optimizer, paradigm, clip_norm=0.5, **settings) as sync:  # hpcsync: new
        for batch in sync.shard(loader, epochs=None):  # hpcsync: was for batch in loader:
            x, y = fabric.to_device(batch)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            sync.record(loss)  # hpcsync: was fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == n_steps:
                break
            scheduler.step()
    return losses


if __name__ == "__main__":
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    seed_everything(0, verbose=False)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
    loader = DataLoader(TensorDataset(x.float() / 16, y), 32, shuffle=True)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    losses = train(fabric, model, loader, n_steps=50)
    print("losses:", *(f"{loss:.3f}" for loss in losses[::10]))
