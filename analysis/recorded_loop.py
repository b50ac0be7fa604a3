"""The loop of `beside_recording.py`: under DistributedDataParallel with a recording, or under `hpcsync.connect`.

torchrun --nproc-per-node 3 analysis/recorded_loop.py record '{"out": ..., ...}'
hpcsync launch -n 4 -- python analysis/recorded_loop.py connect '{"out": ..., "paradigm": {"name": "asp"}, ...}'
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import arguments
import hpcsync

BATCH = 32


def main(how: Literal["record", "connect"], given: Annotated[str, typer.Argument(metavar="SETTINGS")]) -> None:
    """Train as `how` says, with the settings in JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = json.loads(given)
    width = settings["width"]
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    n = settings["samples"]
    data = TensorDataset(torch.randn(n, 64), torch.randint(0, 10, (n,)))
    {"record": _recorded, "connect": _connected}[how](settings, net, optimizer, data)


def _recorded(settings: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset) -> None:
    dist.init_process_group("gloo")
    pad_s = settings["pad_s"][dist.get_rank()]
    model = nn.parallel.DistributedDataParallel(net)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    with hpcsync.record(settings["out"]) as recorder:
        for inputs, targets in recorder.loading(_slowly(loader, settings["load_s"])):
            _loss(model, inputs, targets, pad_s).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def _connected(settings: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset) -> None:
    run = {"out": settings["out"], "stop": {"samples": len(data)}, "batches": settings.get("batches")}
    with hpcsync.connect(net, optimizer, settings["paradigm"].pop("name"), **run, **settings["paradigm"]) as sync:
        pad_s = 0.0 if sync.worker is None else settings["pad_s"][sync.worker]
        for inputs, targets in _slowly(sync.shard(data, batch_size=BATCH, epochs=3), settings["load_s"]):
            loss = _loss(net, inputs, targets, pad_s)
            loss.backward()
            sync.record(loss)
            optimizer.step()
            optimizer.zero_grad()


def _slowly(batches: Iterable[Any], load_s: float) -> Iterator[Any]:
    """Yield batches; a whole one takes `load_s` longer to come."""
    for inputs, targets in batches:
        time.sleep(load_s * len(inputs) / BATCH)
        yield inputs, targets


def _loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, pad_s: float) -> torch.Tensor:
    """Return the loss; for a whole batch, `pad_s` after the call."""
    until_s = time.perf_counter() + pad_s * len(inputs) / BATCH
    loss = nn.functional.cross_entropy(model(inputs), targets)
    time.sleep(max(0.0, until_s - time.perf_counter()))
    return loss


if __name__ == "__main__":
    arguments.run(main)
