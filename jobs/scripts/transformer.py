"""A language model: AdamW with two groups, warm-up and cosine, accumulated and clipped gradients, bf16 autocast.

python jobs/scripts/transformer.py        hpcsync launch -n 4 -- python jobs/scripts/transformer.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

import hpcsync  # hpcsync: new

ACCUMULATED, CONTEXT = 4, 32  # batches of a step; characters of a sample


class Model(nn.Module):
    def __init__(self, n_characters, width=64):
        super().__init__()
        self.embed, self.place = nn.Embedding(n_characters, width), nn.Parameter(torch.zeros(CONTEXT, width))
        nn.init.normal_(self.embed.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(width)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.place.dtype)
        hidden = self.body(self.embed(x) + self.place[: x.shape[1]], mask, is_causal=True)
        return self.norm(hidden) @ self.embed.weight.T  # tied weights


def train(model, loader, n_steps, autocast=True, paradigm="bsp", **settings):
    matrices, others = [[p for p in model.parameters() if (p.ndim > 1) == big] for big in (True, False)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 6e-3}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    warm_up, cosine = LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, n_steps - 5)
    scheduler = SequentialLR(optimizer, [warm_up, cosine], milestones=[5])
    losses, parts = [], []
    with hpcsync.connect(model, optimizer, paradigm, clip_norm=0.1, **settings) as sync:  # hpcsync: new
        for tokens in sync.shard(loader, epochs=None, accumulate=ACCUMULATED):  # hpcsync: was for tokens in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / ACCUMULATED).backward()
            sync.record(loss)  # hpcsync: new
            parts.append(loss.item())
            if len(parts) == ACCUMULATED:
                # hpcsync: was nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(sum(parts) / ACCUMULATED)
                parts.clear()
                if len(losses) == n_steps:
                    break
    return losses


if __name__ == "__main__":
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()[:49500])).clamp(max=127)
    torch.manual_seed(0)
    loader = DataLoader(text.view(-1, CONTEXT + 1), 8, shuffle=True, drop_last=True)
    losses = train(Model(128), loader, n_steps=20)
    print("losses:", *(f"{loss:.3f}" for loss in losses[::10]))
