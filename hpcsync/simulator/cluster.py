"""The cluster of a job in virtual time: how fast its workers are, and what lies between them and the servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcsync.config.cluster import Change
from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.config.paradigms import (
    AdspOptions,
    AllReduceOptions,
    BspOptions,
    DsspOptions,
    EasgdOptions,
    GossipOptions,
    KAsyncOptions,
    KSyncOptions,
    LocalSgdOptions,
    SspOptions,
    StanzaOptions,
)
from hpcsync.core.device_speed import Device, device, takes_no_time
from hpcsync.core.roles import Roles
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.replayed_times import RecordedRun, read
from hpcsync.simulator.server_transfers import AT_ONCE, Networked, Timed, Transfers
from hpcsync.training.flat_model import trainable
from hpcsync.workloads.registry import Workload


@dataclass(frozen=True)
class SimulatedCluster:
    """shard_bytes: of the weights on each server. devices: one for each worker."""

    loop: Loop
    shard_bytes: Sequence[int]
    devices: Sequence[Device]
    transfers: Transfers


def build(job: Job, workload: Workload) -> SimulatedCluster:
    """The cluster of this job, at time 0.

    Raises JobError for a job that does not say how long its iterations take, for a trace that does not fit it, and
    where no time would ever pass.
    """
    loop, cluster = Loop(), job.cluster
    roles = Roles(cluster.servers, cluster.workers)
    shard_bytes = _shard_bytes(roles, workload)
    if cluster.times_from is not None:
        recorded = read(job, 2 * sum(shard_bytes))
        refuse_standstill(job, "cluster.times_from", [times.total_s == 0.0 for times in recorded.workers])
        devices = [
            Device(times.seconds(), _changes(job, worker, recorded)) for worker, times in enumerate(recorded.workers)
        ]
        steps = Timed(loop, lambda worker, iteration: recorded.workers[worker].steps(iteration))
        return SimulatedCluster(loop, shard_bytes, devices, steps)
    if cluster.compute is None:
        raise JobError(
            "cluster.compute: missing; a simulation must have it (or --times-from): it says how long iterations take"
        )
    devices = [device(job, worker) for worker in range(cluster.workers)]
    idle = [takes_no_time(cluster.compute, worker, cluster.workers) for worker in range(cluster.workers)]
    if cluster.network is None or isinstance(job.paradigm, AdspOptions):
        refuse_standstill(job, "cluster.compute", idle)
    if cluster.network is not None:
        networked = Networked(loop, cluster.network, roles, shard_bytes)
        return SimulatedCluster(loop, shard_bytes, devices, networked)
    return SimulatedCluster(loop, shard_bytes, devices, Timed(loop, lambda worker, iteration: AT_ONCE))


def _changes(job: Job, worker: int, recorded: RecordedRun) -> list[Change]:
    """What changes the worker's recorded times: what was so already when they were recorded is in them."""
    mine = [change for change in job.cluster.events if change.worker == worker]
    return [change for change in mine if change.change in ("leave", "join") or change not in recorded.changes]


def refuse_standstill(job: Job, key: str, idle: Sequence[bool]) -> None:
    """A worker for which nothing takes any time (idle) would push for ever before any passes, unless others hold it. It
    has no speed either, by which to give it batches.

    Raises JobError.
    """
    stop, paradigm = job.stop, job.paradigm
    if job.batches.policy != "equal" and any(idle):
        raise JobError(
            f'batches.policy = {shown(job.batches.policy)}: must be "equal" where iterations take 0 seconds, as worker '
            f"{list(idle).index(True)}'s do by {key}"
        )
    if isinstance(paradigm, AdspOptions) and any(idle):
        raise JobError(
            f'paradigm.name = "adsp": must not be simulated where iterations take 0 seconds, as worker '
            f"{list(idle).index(True)}'s do by {key}: it is time that ends a worker's local steps"
        )
    bounded = isinstance(paradigm, BspOptions | AllReduceOptions | LocalSgdOptions | StanzaOptions)
    bounded = bounded or (isinstance(paradigm, SspOptions) and paradigm.staleness != math.inf)
    bounded = bounded or (isinstance(paradigm, DsspOptions) and paradigm.mode == "bounded")
    bounded = bounded or (isinstance(paradigm, EasgdOptions) and paradigm.synchronous)
    bounded = bounded or (isinstance(paradigm, GossipOptions) and paradigm.mode == "permutation")
    enough = len(idle) if bounded else 1  # idle workers, to go on for ever without the others
    if isinstance(paradigm, KSyncOptions | KAsyncOptions):
        enough = paradigm.smallest_k
    if stop.samples is None and stop.updates is None and sum(idle) >= enough:
        raise JobError(
            f"{key}: worker {list(idle).index(True)}'s iterations take 0 seconds: to be simulated such a job must have "
            "[cluster.network], stop.samples or stop.updates"
        )


def _shard_bytes(roles: Roles, workload: Workload) -> list[int]:
    parameters = trainable(workload.model)
    size, itemsize = sum(p.numel() for p in parameters), parameters[0].element_size()
    return [(shard.stop - shard.start) * itemsize for shard in roles.shards(size)]
