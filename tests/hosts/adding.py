"""One of several ranks that add to a word of the last one: python -m mpi4py adding.py KIND ROUNDS OUT.json

The last rank adds too, while another thread of it communicates, as helper threads and rank 0's monitor do. KIND is
"atomic", or "apart" for sums of which the old value is read first and the new one written then. Rounds end when a sum
was lost.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np
from mpi4py import MPI

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


def main(kind: str, rounds: int, out: str) -> None:
    comm = MPI.COMM_WORLD
    if kind == "apart":
        Window.fetch_add = read_and_write
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
    if comm.rank == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"found": found, "lost": lost}, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
