"""One rank of a pair that gossips: python -m mpi4py reading.py OUT.json KIND...

With each kind of progression, rank 1 publishes 4 MB and computes for two seconds without an MPI call, except those of
the progression. Rank 0 reads meanwhile, and sends as much; it leaves what it has seen in OUT.json. At the end there is
a thread that nobody stops.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from pathlib import Path

import torch
from mpi4py import MPI

from hpcsync.mpi.transport.progress_engine import ProgressEngine, choose
from hpcsync.mpi.transport.published_replica import PublishedReplica
from hpcsync.mpi.transport.push_inbox import PushInbox

SIZE = 1_000_000
COMPUTE_S = 2.0
POLL_S = 0.005


def compute(progression: ProgressEngine) -> None:
    """Train on and on; call `poll` as the hooks of a model's layers would."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    batch = torch.ones(32, 256)
    begin_s = polled_s = time.perf_counter()
    while (now_s := time.perf_counter()) < begin_s + COMPUTE_S:
        model(batch).sum().backward()
        if now_s > polled_s + POLL_S:
            progression.poll()
            polled_s = now_s


def with_help(comm: MPI.Intracomm, kind: str) -> dict:
    """What rank 0 has seen with this kind of progression."""
    comm.Barrier()
    begin_s = time.perf_counter()
    progression = choose(comm, kind)
    seen = {"kind": progression.kind, "choosing_s": time.perf_counter() - begin_s, "cost": progression.cost}
    seen |= {"get_s_without": progression.get_s_without, "get_s_with": progression.get_s_with}
    into = torch.zeros(SIZE)
    with (
        closing(progression),
        PublishedReplica(comm, SIZE, torch.float32) as published,
        PushInbox(comm, SIZE, torch.float32) as parcels,
    ):
        if comm.rank == 0:
            published.read(1, into)  # the first transfer sets up what later ones use
            parcels.send(1, into)
        comm.Barrier()
        parcels.collect()
        if comm.rank == 1:
            published.publish(torch.full((SIZE,), 7.0))
        comm.Barrier()
        if comm.rank == 1:
            compute(progression)
        else:
            time.sleep(COMPUTE_S / 10)
            begin_s = time.perf_counter()
            seen["serial"] = published.read(1, into)
            seen["read_s"] = time.perf_counter() - begin_s
            seen["intact"] = bool((into == 7).all())
            begin_s = time.perf_counter()
            parcels.send(1, into, 2.0)
            seen["send_s"] = time.perf_counter() - begin_s
        comm.Barrier()
        parcel = parcels.collect()
        arrived = parcel and (parcel.count, parcel.weight, bool((parcel.total == 7).all()))
        seen["arrived"] = comm.bcast(arrived, 1)
        comm.Barrier()
    return seen


def main(out: str, *kinds: str) -> None:
    comm = MPI.COMM_WORLD
    seen = {kind: with_help(comm, kind) for kind in kinds}
    if comm.rank == 0:
        Path(out).write_text(json.dumps(seen))
    choose(comm, "thread")


main(*sys.argv[1:])
