"""Measure the link between two hosts: python -m mpi4py link_speed.py OUT.json [BYTES]

The results are medians: half of the round-trip time of a few bytes, and the bandwidth of large messages, of BYTES, in
Gbit/s, in one direction at a time and in both at once.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from mpi4py import MPI

SMALL, LARGE = 8, 16_000_000  # bytes
SMALL_TIMES, LARGE_TIMES = 500, 5


def one_way_s(comm: MPI.Intracomm, n_bytes: int, times: int) -> float:
    data = np.zeros(n_bytes, np.uint8)
    found = []
    for _ in range(times):
        comm.Barrier()
        begin_s = time.perf_counter()
        if comm.rank == 0:
            comm.Send(data, 1)
            comm.Recv(data, 1)
        else:
            comm.Recv(data, 0)
            comm.Send(data, 0)
        found.append((time.perf_counter() - begin_s) / 2)
    return statistics.median(found)


def both_ways_s(comm: MPI.Intracomm, n_bytes: int, times: int) -> float:
    sent, come = np.zeros(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
    found = []
    for _ in range(times):
        comm.Barrier()
        begin_s = time.perf_counter()
        comm.Sendrecv(sent, 1 - comm.rank, recvbuf=come, source=1 - comm.rank)
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def main(out: Path, size_bytes: Annotated[int, typer.Argument(min=1)] = LARGE) -> None:
    comm = MPI.COMM_WORLD
    latency_s = one_way_s(comm, SMALL, SMALL_TIMES)
    large_s = one_way_s(comm, size_bytes, LARGE_TIMES)
    both_s = both_ways_s(comm, size_bytes, LARGE_TIMES)
    if comm.rank == 0:
        gbit, both_gbit = (8e-9 * size_bytes / (seconds - latency_s) for seconds in (large_s, both_s))
        found = {"latency_us": 1e6 * latency_s, "bandwidth_gbit": gbit, "both_ways_gbit": both_gbit}
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
