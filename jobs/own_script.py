"""A PyTorch training loop on handwritten digits, distributed by hpcsync.

hpcsync launch -n 4 -- python jobs/own_script.py    one server and three workers on this machine
mpirun -n 4 python jobs/own_script.py               the same with the launcher of the MPI library
python jobs/own_script.py                           a single process, without MPI
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hpcsync

device = hpcsync.device()  # this rank's GPU, or the CPU
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 16.0, dtype=torch.float32, device=device)
y = torch.tensor(labels, device=device)
order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
criterion = nn.CrossEntropyLoss()


def evaluate(model: nn.Module) -> tuple[float, float]:
    with torch.no_grad():
        logits = model(x[test])
    return criterion(logits, y[test]).item(), (logits.argmax(1) == y[test]).double().mean().item()


with hpcsync.connect(model, optimizer, "dssp", staleness_min=3, staleness_max=15, evaluate=evaluate) as sync:
    for _ in range(40):
        for inputs, targets in sync.shard(TensorDataset(x[train], y[train]), batch_size=32):
            loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            sync.step(loss)  # instead of optimizer.step()

if sync.rank == 0:
    print(f"test accuracy {evaluate(model)[1]:.4f}")
