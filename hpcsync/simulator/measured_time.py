"""How long updates take in virtual time, without arithmetic, and how fast this machine compresses."""

from __future__ import annotations

import time
import tomllib
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Recorder
from hpcsync.core.job_validation import check
from hpcsync.core.stanza_resolution import resolved
from hpcsync.simulator.peer_transfers import replica_bytes
from hpcsync.simulator.simulate import prepare
from hpcsync.training import compressor
from hpcsync.training.flat_model import trainable

REPEATS = 5  # of a compression, the fastest of which counts


class _Times(Recorder):
    """Recorder that keeps the time and the number of the last update."""

    now_s = 0.0
    version = 0

    def append(self, table: str, row: tuple[Any, ...]) -> None:
        if table == "updates":
            self.version, self.now_s = row[:2]


def updates_s(job: Job, n_updates: int) -> float:
    """Return the mean seconds from one update of a job to the next, over its first updates.

    Raises
    ------
    JobError
        If the job cannot be simulated.
    """
    assert not isinstance(job.workload, Script)
    size = replica_bytes(check(job)) // 4  # the timing workload is float32
    table: dict[str, Any] = tomllib.loads(job.to_toml())
    table["workload"] = {"name": "timing", "parameters": size, "batch_size": job.workload.batch_size}
    table |= {"stop": {"updates": n_updates}, "evaluation": {"every_samples": 0}}
    timed = Job.from_table(table)
    workload = check(timed)
    trace = _Times()
    prepare(resolved(timed, workload), workload)(trace).run()
    return trace.now_s / trace.version


def encoding_gbytes_per_s(job: Job) -> float:
    """Return the throughput of a job's codec on one core of this machine, in 10^9 bytes of the vector per second.

    Raises
    ------
    JobError
        If the job cannot be compressed.
    """
    compression = compressor.of_job(job, trainable(check(job).model))
    assert compression is not None
    encoder, vector = compression.compressor(0), torch.randn(compression.whole.stop, dtype=compression.dtype)
    shortest_s = float("inf")
    with threadpool_limits(1):  # as many threads as a rank has
        for _ in range(REPEATS):
            begin_s = time.perf_counter()
            encoder.encode(vector, [compression.whole])
            shortest_s = min(shortest_s, time.perf_counter() - begin_s)
    return vector.nbytes / 1e9 / shortest_s
