"""One rank of a run with each number of servers that counts its cable: python -m mpi4py counted.py OUT.json SERVERS...

The model has 4 MB. In iteration t worker w of n pushes n t (w + 1) for every parameter, so that all weights are
known after every update, and none are those of another update. Each worker counts what its host's
cable brings and takes, in sizes of the model, and the seconds of an iteration, the first ones left out. Rank 0 leaves
in OUT.json, for each run, how many weights were wrong on each rank, and the counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

import hpcsync

SIDE = 1000
FIRST, COUNTED = 3, 12  # iterations


def cable() -> tuple[int, int]:
    """Bytes that this host has received and sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[0]), int(counts.split()[8])
    raise LookupError("no eth0")


def seen(comm: MPI.Intracomm, servers: int, folder: Path) -> list | None:
    model = torch.nn.Linear(SIDE, SIDE, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrong, expected, counts = 0, 0, []
    n = comm.size - servers
    with hpcsync.connect(model, optimizer, "bsp", servers=servers, out=folder) as sync:
        samples = torch.utils.data.TensorDataset(torch.zeros(n * (FIRST + COUNTED)))
        for t, _ in enumerate(sync.shard(samples, batch_size=1), 1):
            optimizer.zero_grad()
            (model.weight * (n * t * (sync.worker + 1))).sum().backward()
            sync.step()
            expected -= t * n * (n + 1) // 2
            wrong += not (model.weight == expected).all()
            if t in (FIRST, FIRST + COUNTED):
                counts.append((*cable(), time.perf_counter()))
    each = 4 * SIDE**2 * COUNTED, 4 * SIDE**2 * COUNTED, COUNTED
    return comm.gather(
        (wrong, [(end - begin) / n for begin, end, n in zip(*counts, each, strict=True)] if counts else None)
    )


def main(out: str, *numbers: str) -> None:
    comm = MPI.COMM_WORLD
    found = [seen(comm, int(servers), Path(out).with_name(f"servers-{servers}")) for servers in numbers]
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
