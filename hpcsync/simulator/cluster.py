"""The cluster of a job in virtual time: how fast its workers are, and what lies between them and the servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsync.devices import Device, device, devices
from hpcsync.job import Job
from hpcsync.job_errors import JobError, shown
from hpcsync.learning.flat import trainable
from hpcsync.learning.workloads import Workload
from hpcsync.roles import Roles
from hpcsync.simulator.loop import Loop
from hpcsync.simulator.recorded import recorded_times
from hpcsync.simulator.transfers import AT_ONCE, Networked, Timed, Transfers


@dataclass(frozen=True)
class Cluster:
    """shard_bytes: of the weights on each server. devices: one for each worker."""

    loop: Loop
    shard_bytes: Sequence[int]
    devices: Sequence[Device]
    transfers: Transfers


def build(job: Job, workload: Workload) -> Cluster:
    """The cluster of this job, at time 0. Raises JobError for a job that does not say how long its iterations take."""
    loop, cluster, shard_bytes = Loop(), job.cluster, _shard_bytes(job, workload)
    transfers: Transfers
    if cluster.times_from is not None:
        times = recorded_times(job)
        as_recorded = [device(job, worker, times[worker].seconds()) for worker in range(cluster.workers)]
        transfers = Timed(loop, lambda worker, iteration: times[worker].steps(iteration))
        return Cluster(loop, shard_bytes, as_recorded, transfers)
    if cluster.compute is None:
        raise JobError(
            "cluster.compute: missing; a simulation must have it (or --times-from): it says how long iterations take"
        )
    _refuse_standstill(job)
    if cluster.network is None:
        transfers = Timed(loop, lambda worker, iteration: AT_ONCE)
    else:
        transfers = Networked(loop, cluster.network, Roles(cluster.servers, cluster.workers), shard_bytes)
    return Cluster(loop, shard_bytes, devices(job), transfers)


def _refuse_standstill(job: Job) -> None:
    """A worker for which nothing takes any time would push for ever before any time has passed."""
    seconds = getattr(job.cluster.compute, "seconds", None)
    timed = job.stop.samples is None and job.stop.updates is None
    if timed and job.cluster.network is None and 0.0 in (seconds if isinstance(seconds, tuple) else (seconds,)):
        raise JobError(
            f"cluster.compute.seconds = {shown(seconds)}: must be greater than 0 to simulate without [cluster.network] "
            "and with neither stop.samples nor stop.updates: no time would ever pass"
        )


def _shard_bytes(job: Job, workload: Workload) -> list[int]:
    parameters = trainable(workload.model)
    size, itemsize = sum(p.numel() for p in parameters), parameters[0].element_size()
    roles = Roles(job.cluster.servers, job.cluster.workers)
    shards = [roles.shard(server, size) for server in range(roles.n_servers)]
    return [(shard.stop - shard.start) * itemsize for shard in shards]
