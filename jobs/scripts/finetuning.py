"""Fine-tuning: a body with loaded weights is frozen, a new head is trained, and later the body thaws layer by layer.

python jobs/scripts/finetuning.py        hpcsync launch -n 4 -- python jobs/scripts/finetuning.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hpcsync  # hpcsync: new


class Model(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, n_classes)

    def forward(self, x):
        for layer in self.body:
            x = torch.tanh(layer(x)) + x
        return self.head(x)


def train(model, loader, thaws, paradigm="bsp", **settings):
    """Thaw a layer of the body, from the last to the first, before each of the iterations `thaws`."""
    frozen = [*model.body]
    for layer in frozen:
        layer.requires_grad_(False)
    groups = [{"params": model.body.parameters(), "lr": 0.01}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)
    losses = []
    with hpcsync.connect(model, optimizer, paradigm, **settings) as sync:  # hpcsync: new
        for i, (x, y) in enumerate(sync.shard(loader)):  # hpcsync: was for i, (x, y) in enumerate(loader):
            if i in thaws:
                frozen.pop().requires_grad_(True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)  # hpcsync: was optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    torch.manual_seed(0)
    old, new = Model(2), Model(10)
    new.body.load_state_dict(old.body.state_dict())  # weights of an earlier training
    losses = train(new, DataLoader(TensorDataset(x.float() / 16, y), 32, shuffle=True), thaws=(5, 10))
    print("losses:", *(f"{loss:.3f}" for loss in losses[::10]))
