"""Simulated cluster of a job with servers: device speeds and transfer times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcsync.config.cluster import ClusterEvent, Compute
from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job
from hpcsync.core.device_speed import Device, device, takes_no_time
from hpcsync.core.roles import Roles
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.replayed_times import RecordedRun, read
from hpcsync.simulator.server_transfers import AT_ONCE, Networked, Timed, Transfers
from hpcsync.training.flat_model import trainable
from hpcsync.workloads.registry import Workload


@dataclass(frozen=True)
class SimulatedCluster:
    """Event loop, devices and transfers of a simulated run with servers.

    Parameters
    ----------
    loop
        Event loop of the run.
    shard_bytes
        Size of the weights on each server, in bytes; shape (n_servers,).
    devices
        One device per worker.
    transfers
        Durations of the transfers between workers and servers.
    """

    loop: Loop
    shard_bytes: Sequence[int]
    devices: Sequence[Device]
    transfers: Transfers


def build(job: Job, workload: Workload, recorded: RecordedRun | None = None) -> SimulatedCluster:
    """Build the cluster of a job at virtual time 0.

    Parameters
    ----------
    job
        Job with servers. Computation times come from ``cluster.times_from`` (a recorded trace) or
        ``cluster.compute``; transfer times from the trace, ``cluster.network``, or they are zero.
    workload
        Workload of the job; only the size of its model is used.
    recorded
        Times of all computations and transfers, in place of those that the job names.

    Raises
    ------
    JobError
        If the job does not define how long iterations take, if the recorded trace does not fit the job, or if
        virtual time could never advance.
    """
    loop, cluster = Loop(), job.cluster
    roles = Roles(cluster.servers, cluster.workers)
    shard_bytes = _shard_bytes(roles, workload)
    if recorded is None and cluster.times_from is not None:
        recorded = read(job, 2 * sum(shard_bytes))
    if recorded is not None:
        times = recorded.workers
        refuse_standstill(job, "cluster.times_from", [each.total_s == 0.0 for each in times])
        devices = [
            Device(each.seconds(), changes_of(job, worker, recorded.changes)) for worker, each in enumerate(times)
        ]
        transfers: Transfers = Timed(loop, lambda worker, iteration: times[worker].steps(iteration))
        if (link := recorded.link) is not None:
            network = link.network(sum(shard_bytes), len(times))
            colocated = cluster.colocated and link.shared  # on one host no link is shared
            transfers = Networked(loop, network, roles, shard_bytes, colocated=colocated)
        return SimulatedCluster(loop, shard_bytes, devices, transfers)
    compute = compute_of(job)
    devices = [device(job, worker) for worker in range(cluster.workers)]
    idle = [takes_no_time(compute, worker, cluster.workers) for worker in range(cluster.workers)]
    local = cluster.colocated and cluster.servers == 1  # then worker 0 has all servers on its node
    measured = job.paradigm.timed_steps or job.batches.policy != "equal"  # computations, not transfers
    if cluster.network is None or measured or (local and cluster.network.latency_us == 0.0):
        refuse_standstill(job, "cluster.compute", idle)
    if cluster.network is not None:
        networked = Networked(loop, cluster.network, roles, shard_bytes, colocated=cluster.colocated)
        return SimulatedCluster(loop, shard_bytes, devices, networked)
    return SimulatedCluster(loop, shard_bytes, devices, Timed(loop, lambda worker, iteration: AT_ONCE))


def compute_of(job: Job) -> Compute:
    """Return the times of a job's iterations. Raises JobError if it does not define them."""
    if job.cluster.compute is None:
        raise JobError(
            "cluster.compute: missing; a simulation must have it (or --times-from): it defines how long iterations take"
        )
    return job.cluster.compute


def changes_of(job: Job, worker: int, recorded: Sequence[ClusterEvent]) -> list[ClusterEvent]:
    """Return the events that change a worker's recorded times.

    Events that were already in force when the times were recorded are contained in them, and are left out.
    """
    mine = [change for change in job.cluster.events if change.worker == worker]
    return [change for change in mine if change.change in ("leave", "join") or change not in recorded]


def refuse_standstill(job: Job, key: str, idle: Sequence[bool]) -> None:
    """Reject jobs in which virtual time would never advance.

    A worker whose iterations take 0 seconds pushes forever at the same virtual time, unless another worker blocks
    it, which must not leave before. It also has no speed from which its batch size could be computed.

    Parameters
    ----------
    job
        Job to be simulated.
    key
        Job key that causes the zero durations, for the error message.
    idle
        For each worker, True if nothing in its iterations takes time.

    Raises
    ------
    JobError
        If the paradigm and the stopping rule do not bound the number of events at one virtual time.
    """
    stop, paradigm = job.stop, job.paradigm
    if job.batches.policy != "equal" and any(idle):
        raise JobError(
            f'batches.policy = {shown(job.batches.policy)}: must be "equal" where iterations take 0 seconds, as worker '
            f"{list(idle).index(True)}'s do by {key}"
        )
    if paradigm.timed_steps and any(idle):
        raise JobError(
            f'paradigm.name = "{paradigm.name}": must not be simulated where iterations take 0 seconds, as worker '
            f"{list(idle).index(True)}'s do by {key}: a worker's local steps end after a given time"
        )
    absent = {event.worker for event in job.cluster.events if event.change in ("leave", "join")}
    n_active = sum(is_idle or worker not in absent for worker, is_idle in enumerate(idle))  # at the least
    endless = any(idle) and sum(idle) >= min(paradigm.zero_time_workers(len(idle)), n_active)
    if stop.samples is None and stop.updates is None and endless:
        remedies = "stop.samples or stop.updates"
        if job.cluster.network is None:
            remedies = f"[cluster.network], {remedies}"
        raise JobError(
            f"{key}: worker {list(idle).index(True)}'s iterations take 0 seconds: to be simulated such a job must have "
            f"{remedies}"
        )


def _shard_bytes(roles: Roles, workload: Workload) -> list[int]:
    parameters = trainable(workload.model)
    size, itemsize = sum(p.numel() for p in parameters), parameters[0].element_size()
    return [(shard.stop - shard.start) * itemsize for shard in roles.shards(size)]
