"""How long a worker's iteration takes: the `[cluster.compute]` of a job.

Real ranks are padded up to these times, so that a laptop behaves like an uneven cluster; the simulator takes them as
they are. Every worker draws from a generator of its own, so that its n-th iteration takes the same time in every run
with the same seed, whatever the others do.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcsync.job import Compute, Exponential, LogNormal, Recorded
from hpcsync.job_times import read_times


def iteration_seconds(compute: Compute, seed: int, worker: int, n_workers: int) -> Iterator[float]:
    """Seconds of worker `worker`'s iterations 1, 2, ... at the job's batch size, without end.

    `constant` gives `seconds`; `lognormal` has the median `seconds`, its logarithm the standard deviation `jitter`;
    `exponential` has the mean `seconds`; `table` gives the worker's rows in order and then starts over.
    """
    if isinstance(compute, Recorded):
        times = read_times(compute.table, n_workers)[worker]
        while True:
            yield from times
    seconds = compute.seconds if isinstance(compute.seconds, float) else compute.seconds[worker]
    generator = np.random.default_rng([seed, 2, worker])
    while True:
        if isinstance(compute, LogNormal):
            yield seconds * float(generator.lognormal(0.0, compute.jitter))
        elif isinstance(compute, Exponential):
            yield float(generator.exponential(seconds))
        else:
            yield seconds
