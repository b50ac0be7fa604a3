"""One of three ranks that add to a word of the last one: python -m mpi4py adding.py OUT.json

The last rank adds too, while another thread of it communicates, as helper threads and rank 0's monitor do. First only
one rank of each host adds, then all do, then all by sums of which the old value is read first and the new one written
then. Rounds end when a sum was lost. Rank 0 leaves in OUT.json how many sums were found and how many were lost.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.window import Window

ROUND_S = 1.0


def communicate(comm: MPI.Intracomm, stop: threading.Event) -> None:
    while not stop.is_set():
        comm.Iprobe()


def read_and_write(window: Window, value: int, rank: int, offset: int) -> int:
    before = int(window.get_word(rank, offset))
    after = np.array([before + value])
    window.put(after, rank, offset)
    window.flush(rank)
    return before


def sums(comm: MPI.Intracomm, rounds: int) -> dict[str, int]:
    target = comm.size - 1
    stop, own = threading.Event(), comm.Dup()
    thread = threading.Thread(target=communicate, args=(own, stop))
    if comm.rank == target:
        thread.start()
    found = lost = 0
    with Window(comm, 1, np.int64) as window:
        window.local[:] = 0
        window.sync()
        for _ in range(rounds):
            comm.Barrier()
            end_s, added = time.monotonic() + ROUND_S, 0
            while time.monotonic() < end_s:
                window.fetch_add(1, target, 0)
                added += 1
            comm.Barrier()
            expected = found + comm.allreduce(added)
            found = int(window.fetch_add(0, target, 0))
            lost = expected - found
            if lost:
                break
        comm.Barrier()
    if comm.rank == target:
        stop.set()
        thread.join()
    return {"found": found, "lost": lost}


def main(out: str) -> None:
    comm, seen = MPI.COMM_WORLD, {}
    backoff, one_of_each = Backoff(comm), comm.Split(comm.rank == 1)
    if comm.rank != 1:
        seen["one of each host"] = sums(one_of_each, 4)
    backoff.barrier()
    seen["all"] = sums(comm, 4)
    Window.fetch_add = read_and_write
    seen["apart"] = sums(comm, 60)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
