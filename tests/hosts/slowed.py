"""One rank of a run whose server is slow on purpose: python -m mpi4py slowed.py JOB OUT UPDATE_S [deaf]

Every update keeps the server busy for UPDATE_S seconds without an MPI call, as a large model would. A deaf server also
waits without MPI calls, looking for reports twice a second. Rank 0 leaves what it has seen in OUT/seen.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcsync.cli.rank_main import train
from hpcsync.config import job as jobs
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.training.parameter_store import Store

DEAF_S = 0.5


def slow_down(update_s: float) -> list[float]:
    """Make updates take so long; a list that their real durations are put on."""
    apply, took_s = Store.apply, []

    def slowly(self: Store, *arguments: Any) -> float:
        begin_s = time.perf_counter()
        gradient_sq = apply(self, *arguments)
        while time.perf_counter() < begin_s + update_s:
            pass
        took_s.append(time.perf_counter() - begin_s)
        return gradient_sq

    Store.apply = slowly  # type: ignore[method-assign]
    return took_s


def main(path: str, out: str, update_s: str, *deaf: str) -> None:
    comm = MPI.COMM_WORLD
    took_s = slow_down(float(update_s))
    if deaf and comm.rank == 0:
        Backoff.pause = lambda self: time.sleep(DEAF_S)  # type: ignore[method-assign]
    session = train(comm, jobs.load(path), out)
    weights = comm.gather(session.flat.weights.numpy().tobytes())
    if weights is not None:
        seen = {"longest_update_s": max(took_s), "equal_weights": len(set(weights)) == 1}
        (Path(out) / "seen.json").write_text(json.dumps(seen))


main(*sys.argv[1:])
