"""Computation and transfer times taken from the trace of another run.

The trace holds when each computation began and ended, when the server received the push, and when it granted the next
iteration. Each iteration thus has three durations that do not depend on blocking: grant to begin (delivery of
the grant and reading), begin to end, and end to arrival at the server (the put and the push info). If a push consists
of several local steps, they are taken to be equal. Loading counts as computation. `comm_s` is the part of the first and
the last duration together that was transfer; half of it is attributed to each, as far as each has room. The split only
separates waiting from transfer.

A run without servers whose workers exchange in step, such as a recorded loop of DistributedDataParallel, has a
computation and an all-reduce in each iteration; what follows until the next one begins, such as the step of the
optimizer, counts as computation. With servers the all-reduces are replaced by transfers over the link that the run has
measured (`Link`). If it has measured none, a server is taken to receive a gradient in half the time of the all-reduce,
and to send the weights in the other half.

An iteration that was cancelled early is extrapolated to its full length, and its put is taken to last as long as its
read. An iteration with another batch size than the job's is scaled in proportion, because the part of its time that did
not depend on the batch is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hpcsync.config.cluster import ClusterEvent, Network
from hpcsync.config.compression import DenseOptions
from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, Script
from hpcsync.core.peer_coordinator import ring_bytes
from hpcsync.core.peer_machine import create_method
from hpcsync.paradigms.records import ALL_PEERS
from hpcsync.simulator.server_transfers import Steps
from hpcsync.trace.reader import Trace, TraceError, load
from hpcsync.trace.schema import Rows

NO_TIME_S = 1e-9  # in place of 0, which no bandwidth gives
LOCKSTEP = ("all-reduce", "average")  # transports without servers whose times can be taken


class Columns(NamedTuple):
    """Durations of one worker's iterations, each of shape (n_iterations,) with n_iterations >= 1.

    Attributes
    ----------
    compute_s, to_begin_s, to_server_s, comm_s
        Durations in seconds.
    local_steps
        Local steps of each iteration.
    put
        False where an iteration sent its push info without a gradient.
    """

    compute_s: Rows
    to_begin_s: Rows
    to_server_s: Rows
    comm_s: Rows
    local_steps: Rows
    put: Rows


class RecordedTimes:
    """Recorded iterations of one worker.

    After the last iteration they repeat from the second one; the first is special because it includes the setup.

    Parameters
    ----------
    columns
        Their durations.

    Attributes
    ----------
    total_s
        Total duration of all iterations in seconds, without waiting.
    """

    def __init__(self, columns: Columns) -> None:
        compute_s, to_begin_s, to_server_s, comm_s, steps, put = columns
        self._first_steps = int(steps[0])
        self._compute_s = np.repeat(compute_s / steps, steps).tolist()
        # Clocks of different hosts agree only to microseconds, so a short duration may be negative.
        to_begin_s, to_server_s = np.maximum(to_begin_s, 0.0), np.maximum(to_server_s, 0.0)
        put_s = np.where(put, np.minimum(0.5 * comm_s, to_server_s), 0.0)
        read_s = np.minimum(comm_s - put_s, to_begin_s)
        put_s = np.where(put, np.minimum(comm_s - read_s, to_server_s), 0.0)
        steps_s = (np.where(put, put_s, read_s), to_server_s - put_s, to_begin_s - read_s, read_s)
        self.total_s = float(np.sum(compute_s) + np.sum(to_begin_s) + np.sum(to_server_s))
        self._steps = [Steps(*row) for row in zip(*(step_s.tolist() for step_s in steps_s), strict=True)]

    def seconds(self) -> Iterator[float]:
        """Yield the computation times of local steps 1, 2, ... in seconds, without end."""
        yield from self._compute_s
        while True:
            yield from self._compute_s[self._first_steps :] or self._compute_s

    def steps(self, iteration: int) -> Steps:
        """Return the transfer times of an iteration, counted from 1."""
        n = len(self._steps)
        at = iteration - 1
        if at >= n:
            at = 1 + (at - n) % (n - 1) if n > 1 else 0
        return self._steps[at]


class Link(NamedTuple):
    """Link of a process as a recorded loop has measured it.

    Parameters
    ----------
    message_s
        Time of a message.
    gradient_s
        Time of the bytes of a gradient, or of the weights.
    shared
        Whether a server has such a link too, which its workers share. On one host each copies by itself.
    """

    message_s: float
    gradient_s: float
    shared: bool

    def network(self, model_bytes: int, n_workers: int) -> Network:
        """Return the network with these times for a model of this size."""
        gbit = 8e-9 * model_bytes / max(self.gradient_s, NO_TIME_S)
        return Network(
            bandwidth_gbit=gbit,
            server_bandwidth_gbit=gbit if self.shared else gbit * n_workers,
            latency_us=1e6 * self.message_s,
        )


@dataclass(frozen=True)
class RecordedRun:
    """Recorded times of all workers, the device changes of the recorded job, and a link in place of transfer times."""

    workers: list[RecordedTimes]
    changes: tuple[ClusterEvent, ...]
    link: Link | None


def read(job: Job, wire_bytes: int) -> RecordedRun:
    """Return the recorded times of `read_columns` for a job with servers."""
    workers, changes, link = read_columns(job, wire_bytes)
    return RecordedRun([RecordedTimes(columns) for columns in workers], changes, link)


def link_of(attributes: Mapping[str, Any]) -> Link | None:
    """Return the link that a run has measured, by the root attributes of its trace, or None."""
    times_s = [attributes.get(name, math.nan) for name in ("message_s", "gradient_s")]
    if not all(0.0 <= time_s < math.inf for time_s in times_s):
        return None
    return Link(times_s[0], times_s[1], "," in attributes["hosts"])


def recorded_trace(job: Job) -> tuple[str, Trace]:
    """Return ``cluster.times_from`` in words, and that trace. Raises JobError if it, or its job, cannot be read."""
    assert job.cluster.times_from is not None
    try:
        trace = load(job.cluster.times_from)
        _ = trace.job
    except TraceError as error:
        raise JobError(f"cluster.times_from: {error}") from None
    return f"cluster.times_from = {shown(job.cluster.times_from)}", trace


def read_columns(job: Job, wire_bytes: int) -> tuple[list[Columns], tuple[ClusterEvent, ...], Link | None]:
    """Read the durations of each worker's iterations from the trace ``cluster.times_from``.

    Its device changes and its link are returned too.

    Parameters
    ----------
    job
        Job to be simulated.
    wire_bytes
        Bytes that an iteration of the job transfers with servers; twice the size of the model.

    Raises
    ------
    JobError
        If the trace cannot be read, if its cluster, model or batch size differ from the job's, or if pushes are
        compressed in either run: their duration under another compression is unknown.
    """
    assert not isinstance(job.workload, Script)
    key, trace = recorded_trace(job)
    for preposition, compression in (("with", job.compression), ("of a run with", trace.job.compression)):
        if not isinstance(compression, DenseOptions):
            raise JobError(f'{key}: must not be given {preposition} compression.name = "{compression.name}"')
    pushes, grants, steps = (trace.tables[name] for name in ("pushes", "grants", "exchanges"))
    served = trace.job.has_servers
    if not served and create_method(trace.job).transport not in LOCKSTEP:
        raise JobError(f"{key}: must be of a run with servers, or of one whose workers exchange all together")
    if served and not job.has_servers:
        raise JobError(f"{key}: must be of a run whose workers exchange all together, as under {job.paradigm.name}")
    if served:
        bytes_found = set(pushes["wire_bytes"][pushes["share"] == 1.0].tolist())
    else:
        bytes_found = set(steps["wire_bytes"][steps["peer"] == ALL_PEERS].tolist())
        wire_bytes = ring_bytes(wire_bytes // 2, trace.n_workers)
    for name, needed, found in (
        ("cluster.workers", job.cluster.workers, {trace.n_workers}),
        ("cluster.servers", job.cluster.servers, {trace.job.cluster.servers} if served else set()),
        ("workload.batch_size", job.workload.batch_size, _batch_sizes(trace) if served else set()),
        ("bytes moved an iteration", wire_bytes, bytes_found),
    ):
        if others := sorted(found - {needed}):
            raise JobError(f"{key}: must be of a run with {name} = {needed}, it has {', '.join(map(str, others))}")
    workers = []
    for worker in range(trace.n_workers):
        if served:
            rows = pushes[pushes["worker"] == worker], grants[grants["worker"] == worker]
            columns = columns_of(*rows, job.workload.batch_size)
        else:
            columns = columns_in_step(steps[steps["worker"] == worker], job.workload.batch_size)
            columns = to_servers(columns) if job.has_servers else columns
        if not len(columns.compute_s):
            raise JobError(f"{key}: must have an iteration of every worker; worker {worker} has none")
        workers.append(columns)
    return workers, trace.job.cluster.events, link_of(trace.attributes)


def _batch_sizes(trace: Trace) -> set[int]:
    """Return the batch sizes of a step with equal batches; empty for a script with allocated batches."""
    if trace.job.batches.policy == "equal":
        pushes = trace.tables["pushes"]
        return set((pushes["batch_size"] // pushes["local_steps"]).tolist())
    return set() if isinstance(trace.job.workload, Script) else {trace.job.workload.batch_size}


def columns_in_step(steps: Rows, batch_size: int) -> Columns:
    """Return the durations of one worker's iterations that end with an exchange, from /exchanges.

    Loading and computation are scaled to `batch_size` samples; the exchange is in `comm_s`, and in no other column.
    What a worker did between two iterations, such as the step of its optimizer, is added to the second one as it is.
    """
    steps = steps[steps["batch_size"] > 0]
    steps = steps[np.argsort(steps["iteration"], kind="stable")]
    ones, zeros = np.ones(len(steps), int), np.zeros(len(steps))
    between_s = np.zeros(len(steps))
    if len(steps):
        ended_s = (steps["end_s"] + steps["wait_s"] + steps["comm_s"])[:-1]
        follows = np.diff(steps["iteration"]) == 1
        between_s[1:] = np.where(follows, np.maximum(steps["begin_s"][1:] - ended_s, 0.0), 0.0)
    compute_s = between_s + (steps["load_s"] + steps["compute_s"]) * batch_size / steps["batch_size"]
    return Columns(compute_s, zeros, zeros, steps["comm_s"], ones, ones.astype(bool))


def to_servers(columns: Columns) -> Columns:
    """Return the durations with servers in place of all-reduces: reading and pushing take half of the time each."""
    half_s = 0.5 * columns.comm_s
    return columns._replace(to_begin_s=half_s, to_server_s=half_s)


def columns_of(pushes: Rows, grants: Rows, batch_size: int) -> Columns:
    """Return the durations of one worker's iterations from its pushes and grants.

    Only the leading iterations 1, 2, ... that have both rows are used: a killed run lacks rows at its end. The first
    iteration needs no grant; it counts from the start of the run. Loading and computation are scaled to whole
    iterations of `batch_size` samples.
    """
    pushes = pushes[np.argsort(pushes["iteration"])]
    granted_s = dict(zip(grants["iteration"].tolist(), grants["now_s"].tolist(), strict=True))
    granted_s.setdefault(1, 0.0)
    n = 0
    while n < len(pushes) and pushes["iteration"][n] == n + 1 and n + 1 in granted_s:
        n += 1
    pushes = pushes[:n]
    grant_s = np.array([granted_s[iteration] for iteration in range(1, n + 1)])
    load = pushes["batch_size"] / (batch_size * pushes["local_steps"])
    return Columns(
        pushes["load_s"] / load + pushes["compute_s"] / (pushes["share"] * load),
        pushes["begin_s"] - grant_s,
        pushes["now_s"] - pushes["end_s"],
        pushes["comm_s"],
        pushes["local_steps"],
        pushes["share"] == 1.0,
    )
