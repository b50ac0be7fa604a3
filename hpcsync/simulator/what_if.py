"""What-if analysis of a recorded run: its training again in virtual time, with some of the recorded times replaced.

The slowdown S of a run by its stragglers is its duration over that of the same run in which every operation takes the
median of its times; replacing the times of one worker or of one operation gives the slowdown by worker (S_w) or by
operation (S_t).

References
----------
J. Lin, Z. Jiang, Z. Song et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
There S_w and S_t replace the times of all others instead; here, as with S, what is replaced is what is blamed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from hpcsync.config.errors import JobError
from hpcsync.config.job import Job, Script
from hpcsync.core.coordinator import Recorder
from hpcsync.core.device_speed import Device
from hpcsync.core.peer_machine import create_method
from hpcsync.report.explanation import WhatIf
from hpcsync.simulator import cluster, factory, replayed_layers
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.peer_transfers import Links, Workers, replica_bytes
from hpcsync.simulator.replayed_links import timed
from hpcsync.simulator.replayed_times import (
    LOCKSTEP,
    Columns,
    Link,
    RecordedRun,
    RecordedTimes,
    columns_in_step,
    columns_of,
    link_of,
    to_servers,
)
from hpcsync.simulator.server_numerics import Contributed
from hpcsync.simulator.server_run import ServerSimulation
from hpcsync.trace.reader import Trace, TraceFile
from hpcsync.trace.schema import Change, Rows
from hpcsync.workloads.registry import build

ROWS = 10_000  # pushes or exchanges of a simulation, at most (it simulates some 10,000 a second)
WORKERS = 5  # workers whose times are replaced: those that compute longest
OPERATIONS = ("computation", "transfer")
BY_SPEED = {"policy": "equal-finish", "predictor": "smoothing"}
NEARLY = 0.9  # of a run: a worker that leaves later hardly changes its duration
LEAST_INTERVALS = 3  # of allocation: in a shorter run most batches are still the equal ones


class NotReplayed(Exception):
    """The run cannot be simulated with its own times; the message says why."""


class _Recorded(NamedTuple):
    """Beginning of a run: its job in virtual time, and the times and losses of each worker's iterations."""

    job: Job
    samples: int
    real_s: float
    workers: list[Columns]
    losses: list[list[float]]
    link: Link | None = None  # in place of the transfer times


def _under(recorded: _Recorded, paradigm: Mapping[str, Any], link: Link | None) -> _Recorded:
    """Return the same run under another paradigm.

    Its transfers take the same time in all, or are those over the link that the run has measured.
    """
    table = tomllib.loads(recorded.job.to_toml())
    del table["cluster"]["servers"]
    table["optimizer"].pop("async_lr_scale", None)  # which changes no time, and does not suit every paradigm
    job = Job.from_table({**table, "paradigm": dict(paradigm)})
    for each, must in (
        (recorded.job, f"be left out for a run under {recorded.job.paradigm.name}: its transfers serve no other"),
        (job, "have servers, or be allreduce or local-sgd: the recorded transfers serve no other"),
    ):
        if not each.has_servers and create_method(each).transport not in LOCKSTEP:
            raise JobError(f"--paradigm {job.paradigm.name}: must {must}")
    if job.has_servers and not recorded.job.has_servers:
        workers = [to_servers(each) for each in recorded.workers]
        return recorded._replace(job=job, workers=workers, link=link)
    return recorded._replace(job=job)


def _with_batches_by_speed(job: Job) -> Job:
    """Return the same job with batches that are allocated, from equal ones on."""
    return Job.from_table({**tomllib.loads(job.to_toml()), "batches": BY_SPEED})


def study(trace: Trace | TraceFile, paradigms: Sequence[Mapping[str, Any]] = ()) -> WhatIf:
    """Simulate the beginning of a run with its own times, with some of them replaced, and under other paradigms.

    Parameters
    ----------
    trace
        The run.
    paradigms
        Other paradigms, as [paradigm] of a job file has them. They get the recorded times too. With servers instead of
        all-reduce, gradients and weights move over the link that the run has measured; if it has measured none, reading
        and pushing take half the time of an all-reduce each, and so the other way round.

    Raises
    ------
    NotReplayed
        If that is not possible.
    JobError
        If a paradigm is none, or does not suit the run.
    """
    served = trace.job.has_servers
    recorded = _of_pushes(trace) if served else _of_exchanges(trace)
    others = [_under(recorded, paradigm, link_of(trace.attributes)) for paradigm in paradigms]
    times = recorded.workers
    every = range(len(times))
    medians = _medians(recorded)
    slowest = sorted(every, key=lambda worker: -_mean_step_s(times[worker]))[:WORKERS]

    def duration_s(workers: Sequence[int], operations: Sequence[str]) -> float:
        chosen = set(workers)
        replaced = [_replaced(each, medians[i], operations) if i in chosen else each for i, each in enumerate(times)]
        return _duration_s(recorded, replaced)

    replayed_s, even_s = duration_s((), ()), duration_s(every, OPERATIONS)
    by_speed_s = None
    if trace.job.batches.policy == "equal" and trace.job.paradigm.allocates:
        allocated = _with_batches_by_speed(recorded.job)
        total = allocated.batch_total
        assert total is not None  # it is the timing workload's
        if recorded.samples >= LEAST_INTERVALS * allocated.batches.interval * total:
            by_speed_s = _duration_s(recorded._replace(job=allocated), times)
    return WhatIf(
        recorded.samples,
        recorded.real_s,
        replayed_s,
        even_s,
        {worker: duration_s([worker], OPERATIONS) for worker in slowest},
        {operation: duration_s(every, [operation]) for operation in OPERATIONS},
        by_speed_s,
        {other.job.paradigm.label: _duration_s(other, other.workers) for other in others},
        tuple(each.job.paradigm.label for each in others if each.job.has_servers != served and each.link is None),
        _left_early(trace, recorded.real_s),
    )


def _left_early(trace: Trace | TraceFile, real_s: float) -> tuple[int, ...]:
    """Return the workers that had left or died before the simulated part of a run was nearly over.

    Those that an event of the job lets leave do so in the simulations too.
    """
    changes = _first(trace, "membership", ROWS)
    last = {int(row["worker"]): row["change"] for row in changes[changes["now_s"] < NEARLY * real_s]}
    leaving = {event.worker for event in trace.job.cluster.events if event.change == "leave"}
    return tuple(sorted(worker for worker in last.keys() - leaving if last[worker] != Change.JOINED))


# ---- the recorded times ----


def _of_pushes(trace: Trace | TraceFile) -> _Recorded:
    updates = _first(trace, "updates", ROWS)
    n_updates = int(np.searchsorted(np.cumsum(updates["n_contributions"]), ROWS, side="right"))
    if not n_updates:
        raise NotReplayed("it has no update")
    samples, real_s = (updates[name][n_updates - 1].item() for name in ("samples", "now_s"))
    pushes, grants = (_first(trace, table, 2 * ROWS + trace.n_workers) for table in ("pushes", "grants"))
    pushes, grants = pushes[pushes["begin_s"] <= real_s], grants[grants["now_s"] <= real_s]
    batch_size = _batch_size(trace.job, pushes["batch_size"] // pushes["local_steps"])
    each = [pushes[pushes["worker"] == worker] for worker in range(trace.n_workers)]
    workers = [columns_of(own, grants[grants["worker"] == worker], batch_size) for worker, own in enumerate(each)]
    if absent := [worker for worker, columns in enumerate(workers) if not len(columns.compute_s)]:
        raise NotReplayed(f"worker {absent[0]} has no push among the first {ROWS:,}")
    return _Recorded(_in_virtual_time(trace.job, samples, batch_size), samples, real_s, workers, _losses(each))


def _of_exchanges(trace: Trace | TraceFile) -> _Recorded:
    method, separates = create_method(trace.job), trace.job.paradigm.separates_layers
    n_iterations = max(1, ROWS // trace.n_workers)
    together = separates or method.transport in LOCKSTEP
    updates = _first(trace, "updates", n_iterations if together else ROWS)
    rows = _first(trace, "exchanges", 2 * ROWS)
    rows = rows[rows["batch_size"] > 0]
    if not method.synchronous and len(updates) < ROWS:
        updates = updates[: -trace.n_workers]  # at the end each worker completes an iteration while others have left
    if not len(rows) or not len(updates):
        raise NotReplayed("it has no update")
    samples, real_s = (updates[name][-1].item() for name in ("samples", "now_s"))
    rows = rows[rows["iteration"] <= n_iterations] if method.synchronous else rows[rows["begin_s"] <= real_s]
    rows = rows[np.argsort(rows["iteration"], kind="stable")]
    takes = np.isin(rows["worker"], trace.job.takers)
    batch_size = _batch_size(trace.job, rows["batch_size"][takes])
    each = [rows[rows["worker"] == worker] for worker in range(trace.n_workers)]
    if absent := [worker for worker, own in enumerate(each) if not len(own)]:
        raise NotReplayed(f"worker {absent[0]} has no iteration among the first {len(rows):,}")
    job = _in_virtual_time(trace.job, samples, batch_size)
    if separates:
        return _Recorded(job, samples, real_s, replayed_layers.columns(job, rows), _losses(each))
    workers = [columns_in_step(own, batch_size) for own in each]
    return _Recorded(job, samples, real_s, workers, _losses(each))


def _losses(each: Sequence[Rows]) -> list[list[float]]:
    """Return the losses of each worker's rows, in the order of its iterations."""
    return [own["loss"][np.argsort(own["iteration"], kind="stable")].tolist() for own in each]


def _first(trace: Trace | TraceFile, table: str, n_rows: int) -> Rows:
    return trace.read(table, 0, n_rows) if isinstance(trace, TraceFile) else trace.tables[table][:n_rows]


def _batch_size(job: Job, sizes: Rows) -> int:
    """Return the batch size of a job, of which allocated batches divide the sum; that of a script from its batches."""
    return max(1, int(np.median(sizes))) if isinstance(job.workload, Script) else job.workload.batch_size


def _in_virtual_time(job: Job, samples: int, batch_size: int) -> Job:
    """Return the job without arithmetic; its stopping rule is this number of samples."""
    table: dict[str, Any] = tomllib.loads(job.to_toml())
    cluster_table = table["cluster"]
    table |= {
        "workload": {"name": "timing", "batch_size": batch_size},
        "stop": {"samples": samples},
        "evaluation": {"every_samples": 0},
        "cluster": {
            "workers": job.cluster.workers,
            "servers": job.cluster.servers,
            "events": [event for event in cluster_table.get("events", []) if event["change"] in ("leave", "join")],
            "compute": {"model": "constant", "seconds": 1.0},
        },
    }
    if job.paradigm.separates_layers:
        table["workload"] |= {"classifier": 1, "activations": 1}
        table["paradigm"] |= {"cut": "classifier", "fc_share": 0.5}  # the recorded times are scaled by it
    if isinstance(job.workload, Script) or "optimizer" not in table:
        table["optimizer"] = {"name": "sgd", "lr": 0.1}
    for key in ("compression", "checkpoint"):  # the recorded times contain those of compression
        table.pop(key, None)
    try:
        return Job.from_table(table)
    except JobError as error:
        raise NotReplayed(f"a job without arithmetic cannot be made of it: {error}") from None


def _mean_step_s(columns: Columns) -> float:
    return float(columns.compute_s.sum() / columns.local_steps.sum())


def _medians(recorded: _Recorded) -> list[Columns]:
    """Return for each worker the medians of all workers that compute the same part of the model."""
    times, job = recorded.workers, recorded.job
    parts = (job.groups.fc, job.groups.convolution) if job.paradigm.separates_layers else (range(len(times)),)
    found = []
    for part in parts:
        of_part = [times[worker] for worker in part]
        found += [Columns(*(_median(of_part, i) for i in range(len(Columns._fields))))] * len(part)
    return found


def _median(workers: Sequence[Columns], column: int) -> Rows:
    """Return the median of all workers and iterations but the first, as shape (1,).

    It is that of computations for each local step, and of transfers where there was one.
    """
    parts = []
    for columns in workers:
        values = columns.compute_s / columns.local_steps if column == 0 else columns[column]
        chosen = np.arange(len(values)) >= min(1, len(values) - 1)
        if column == Columns._fields.index("comm_s"):
            chosen &= values > 0
        parts.append(values[chosen])
    values = np.concatenate(parts)
    return np.median(values, keepdims=True) if len(values) else np.zeros(1)


def _replaced(times: Columns, medians: Columns, operations: Sequence[str]) -> Columns:
    n = len(times.compute_s)
    if "computation" in operations:
        times = times._replace(compute_s=medians.compute_s * times.local_steps)
    if "transfer" in operations:
        names = ("to_begin_s", "to_server_s")
        comm_s = np.where(times.comm_s > 0, medians.comm_s, 0.0)
        times = times._replace(**{name: np.repeat(getattr(medians, name), n) for name in names}, comm_s=comm_s)
    return times


# ---- the simulations ----


class _NoRecord(Recorder):
    """Recorder that keeps the time of the update with which a number of samples is reached.

    Without waiting, other workers end their iterations after it, which are updates too.
    """

    def __init__(self, samples: int) -> None:
        self.now_s = 0.0
        self._samples = samples
        self._reached = False

    def append(self, table: str, row: tuple[object, ...]) -> None:
        if table == "updates" and not self._reached:
            now_s, samples = row[1], row[4]
            assert isinstance(now_s, float) and isinstance(samples, int)
            self.now_s, self._reached = now_s, samples >= self._samples


class _Servers(ServerSimulation):
    """Simulation with servers in which contributions have given losses; after them a worker keeps its last one."""

    def __init__(self, losses: Sequence[Sequence[float]], *of_every_run: Any) -> None:
        super().__init__(*of_every_run)
        self._losses = [chain(own, repeat(own[-1])) for own in losses]

    def _contribute(self, worker: int) -> Contributed:
        return super()._contribute(worker)._replace(loss=next(self._losses[worker]))


def _duration_s(recorded: _Recorded, workers: Sequence[Columns]) -> float:
    """Return the time of a simulation with these times until it has trained the samples."""
    job, trace = recorded.job, _NoRecord(recorded.samples)
    workload = build(job)
    try:
        if job.has_servers:
            run = RecordedRun([RecordedTimes(columns) for columns in workers], job.cluster.events, recorded.link)
            simulated = cluster.build(job, workload, run)
            _Servers(recorded.losses, job, workload, simulated, trace).run()
        else:
            loop = Loop()
            links: Links
            devices = [
                Device(RecordedTimes(columns).seconds(), cluster.changes_of(job, worker, job.cluster.events))
                for worker, columns in enumerate(workers)
            ]
            if job.paradigm.separates_layers:
                links = replayed_layers.RecordedLinks(loop, job, workers, replica_bytes(workload))
            else:
                links = timed(loop, create_method(job), [columns.comm_s for columns in workers])
            factory.simulation(job, workload, Workers(loop, devices, links), trace).run()
    except JobError as error:
        raise NotReplayed(str(error)) from None
    if not trace.now_s:
        raise NotReplayed("its iterations would take no time")
    return trace.now_s
