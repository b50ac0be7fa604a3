"""A ResNet with BatchNorm and augmentation, fed by a DataLoader with workers, on handwritten digits.

python jobs/scripts/resnet.py        hpcsync launch -n 4 -- python jobs/scripts/resnet.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import hpcsync  # hpcsync: new


class Block(nn.Module):
    def __init__(self, n_in, n_out, stride):
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.two, self.norm_two = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.short = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x):
        return F.relu(self.norm_two(self.two(F.relu(self.norm_one(self.one(x))))) + self.short(x))


class Augmented(Dataset):
    """Images shifted by up to a pixel each way."""

    def __init__(self, images, labels):
        self.images, self.labels = F.pad(images, (1, 1, 1, 1)), labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        down, right = torch.randint(3, (2,)).tolist()
        return self.images[index][:, down : down + 8, right : right + 8], self.labels[index]


def train(model, loader, device="cpu", epochs=1, paradigm="bsp", **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    losses = []
    with hpcsync.connect(model, optimizer, paradigm, **settings) as sync:  # hpcsync: new
        for _ in range(epochs):
            for x, y in sync.shard(loader):  # hpcsync: was for x, y in loader:
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                sync.step(loss)  # hpcsync: was optimizer.step()
                losses.append(loss.item())
    return losses


if __name__ == "__main__":
    device = hpcsync.device()  # hpcsync: was device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = map(torch.tensor, load_digits(return_X_y=True))
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 16, 3, 1, 1), Block(16, 16, 1), Block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*body, nn.Linear(32, 10)).to(device)
    loader = DataLoader(Augmented(x.float().view(-1, 1, 8, 8) / 16, y), 32, shuffle=True, num_workers=2)
    losses = train(model, loader, device, epochs=2, buffers="mean")
    print("losses:", *(f"{loss:.3f}" for loss in losses[::10]))
