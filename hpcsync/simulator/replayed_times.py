"""Times from the trace of another run: what did each worker's computations and transfers take?

The trace says when a computation began and ended, when the server heard of it, and when it granted the next. So each
iteration has three durations that do not depend on who waited for whom: grant to begin (the grant's way, and reading),
begin to end, and end to the server's hearing of it (putting, and the report's way). Where a push was of several local
steps, these are taken to have been equal. `comm_s` says how much of the first and the last duration, together, was
transfer. It is taken to be half each, as far as there is room for it; that only tells waiting from transfer.

An iteration that was cancelled early is taken to have gone on as it began, and to have put for as long as it read. One
of another batch size than the job's is taken to have needed its time in proportion: what share of it did not depend on
the batch, nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpcsync.config.cluster import Change
from hpcsync.config.compression import DenseOptions
from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, Script
from hpcsync.simulator.server_transfers import Steps
from hpcsync.trace.reader import Trace, TraceError, load


class RecordedTimes:
    """One worker's iterations as they were. After the last come those from the second on again: the first is special,
    because it begins when everything is being set up.

    compute_s, to_begin_s, to_server_s, comm_s: seconds, shape (n_iterations,), n_iterations >= 1. local_steps: on the
    worker, of the same shape, if an iteration was of more than one. put: whether its gradient was, or else it only
    reported; absent, all were.
    total_s: of all iterations together, waiting not counted.
    """

    def __init__(
        self,
        compute_s: np.ndarray,
        to_begin_s: np.ndarray,
        to_server_s: np.ndarray,
        comm_s: np.ndarray,
        local_steps: np.ndarray | None = None,
        put: np.ndarray | None = None,
    ) -> None:
        steps = np.ones(len(compute_s), int) if local_steps is None else local_steps
        put = np.ones(len(compute_s), bool) if put is None else put
        self._first_steps = int(steps[0])
        self._compute_s = np.repeat(compute_s / steps, steps).tolist()
        # Clocks of different hosts agree to microseconds only, so that a short way may seem to take less than none.
        to_begin_s, to_server_s = np.maximum(to_begin_s, 0.0), np.maximum(to_server_s, 0.0)
        put_s = np.where(put, np.minimum(0.5 * comm_s, to_server_s), 0.0)
        read_s = np.minimum(comm_s - put_s, to_begin_s)
        put_s = np.where(put, np.minimum(comm_s - read_s, to_server_s), 0.0)
        columns = (np.where(put, put_s, read_s), to_server_s - put_s, to_begin_s - read_s, read_s)
        self.total_s = float(np.sum(compute_s) + np.sum(to_begin_s) + np.sum(to_server_s))
        self._steps = [Steps(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]

    def seconds(self) -> Iterator[float]:
        """The computations of local steps 1, 2, ..., without end."""
        yield from self._compute_s
        while True:
            yield from self._compute_s[self._first_steps :] or self._compute_s

    def steps(self, iteration: int) -> Steps:
        """The transfers of iteration 1, 2, ..."""
        n = len(self._steps)
        at = iteration - 1
        if at >= n:
            at = 1 + (at - n) % (n - 1) if n > 1 else 0
        return self._steps[at]


@dataclass(frozen=True)
class RecordedRun:
    """workers: each worker's times. changes: what the recorded run's own job did to its devices."""

    workers: list[RecordedTimes]
    changes: tuple[Change, ...]


def read(job: Job, wire_bytes: int) -> RecordedRun:
    """What the trace `cluster.times_from` recorded. Raises JobError for one of another cluster, model or batch size,
    and where pushes are compressed, in one or the other: what they would take otherwise nobody knows.

    wire_bytes: what an iteration of the job moves.
    """
    key = f"cluster.times_from = {shown(job.cluster.times_from)}"
    assert job.cluster.times_from is not None and not isinstance(job.workload, Script)
    try:
        trace = load(job.cluster.times_from)
        changes = trace.job.cluster.events
    except TraceError as error:
        raise JobError(f"cluster.times_from: {error}") from None
    for what, compression in (("with", job.compression), ("of a run with", trace.job.compression)):
        if not isinstance(compression, DenseOptions):
            raise JobError(f'{key}: must not be given {what} compression.name = "{compression.name}"')
    pushes, grants = trace.tables["pushes"], trace.tables["grants"]
    for name, needed, found in (
        ("cluster.workers", job.cluster.workers, {trace.n_workers}),
        ("cluster.servers", job.cluster.servers, {trace.job.cluster.servers}),
        ("workload.batch_size", job.workload.batch_size, _batch_sizes(trace)),
        ("bytes moved an iteration", wire_bytes, set(pushes["wire_bytes"][pushes["share"] == 1.0].tolist())),
    ):
        if others := sorted(found - {needed}):
            raise JobError(f"{key}: must be of a run with {name} = {needed}, it has {', '.join(map(str, others))}")
    workers = []
    for worker in range(trace.n_workers):
        rows = pushes[pushes["worker"] == worker], grants[grants["worker"] == worker]
        columns = _joined(*rows, job.workload.batch_size)
        if not len(columns[0]):
            raise JobError(f"{key}: must have a push of every worker; worker {worker} has none")
        workers.append(RecordedTimes(*columns))
    return RecordedRun(workers, changes)


def _batch_sizes(trace: Trace) -> set[int]:
    """What an iteration was of, or would have been with equal batches; a script without these does not say it."""
    if trace.job.batches.policy == "equal":
        pushes = trace.tables["pushes"]
        return set((pushes["batch_size"] // pushes["local_steps"]).tolist())
    return set() if isinstance(trace.job.workload, Script) else {trace.job.workload.batch_size}


def _joined(pushes: np.ndarray, grants: np.ndarray, batch_size: int) -> Sequence[np.ndarray]:
    """The columns of RecordedTimes, of one worker's pushes and grants: iterations 1, 2, ... as far as both are there.

    Computations are those of whole iterations of batch_size samples.

    The first iteration needs no grant: it counts from the start of the run. (A killed run lacks rows at its end.)
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
    return (
        pushes["compute_s"] / (pushes["share"] * load),
        pushes["begin_s"] - grant_s,
        pushes["now_s"] - pushes["end_s"],
        pushes["comm_s"],
        pushes["local_steps"],
        pushes["share"] == 1.0,
    )
