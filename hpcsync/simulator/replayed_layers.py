"""Layer separation (Stanza) with recorded times.

A trace holds when each iteration of a worker began and ended, how long it computed, and its all-reduce, but no
transfer between the groups. These follow from the times of both sides: a piece (micro-batch) is computed above the cut
once it has arrived from all workers below, and continues below once its gradients have arrived. The shortest transfer
that explains when both sides ended is taken, for all pieces of an iteration alike.

What a worker does between two iterations, such as loading and its optimizer's step, delays what it sends next: it is
part of a convolution worker's transfer, and of a fully-connected worker's all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle
from typing import Any

import numpy as np

from hpcsync.config.cluster import ClusterEvent
from hpcsync.config.errors import JobError, shown
from hpcsync.config.job import Job, Script
from hpcsync.core.stanza_resolution import divided, stanza_options
from hpcsync.simulator.event_loop import Loop
from hpcsync.simulator.peer_transfers import InOrder, Links, Then
from hpcsync.simulator.replayed_times import Columns, recorded_trace
from hpcsync.trace.schema import Rows
from hpcsync.workloads.registry import Workload

CLOCK_S = 1e-6  # to which clocks agree


def columns(job: Job, exchanges: Rows) -> list[Columns]:
    """Return the durations of each worker's iterations, from rows of /exchanges.

    Returns
    -------
    list of Columns
        `compute_s` is the time of the whole model for the batch of a convolution worker, `to_server_s` and `to_begin_s`
        of a convolution worker are the transfers of a piece to the other group and back, `comm_s` is the all-reduce.
    """
    groups, stanza = job.groups, stanza_options(job)
    exchanges = exchanges[exchanges["batch_size"] > 0]
    exchanges = exchanges[np.argsort(exchanges["iteration"], kind="stable")]
    each = [exchanges[exchanges["worker"] == worker] for worker in range(groups.n_workers)]
    n, n_pieces = min(map(len, each)), stanza.micro_batches
    rows = [own[:n] for own in each]
    forward, backward, above = stanza.shares
    done = np.arange(1, n_pieces + 1) / n_pieces  # part of an iteration with each piece, shape (n_pieces,)
    left = 1.0 + 1.0 / n_pieces - done  # from the begin of each piece on
    found: dict[int, Columns] = {}
    for fc in groups.fc:
        own, served = rows[fc], groups.served(fc)
        share = forward / (forward + backward)
        begin_s = {worker: rows[worker]["begin_s"] + rows[worker]["load_s"] for worker in (fc, *served)}
        sent_s = np.max([begin_s[w][:, None] + share * rows[w]["compute_s"][:, None] * done for w in served], axis=0)
        up_s = _transfer_s(own, begin_s[fc], 1.0, left, sent_s)
        ended_s, returned_s = begin_s[fc], np.empty_like(sent_s)
        for piece in range(n_pieces):
            ended_s = np.maximum(ended_s, sent_s[:, piece] + up_s) + own["compute_s"] / n_pieces
            returned_s[:, piece] = ended_s
        zeros, ones = np.zeros(n), np.ones(n, int)
        after_s = np.append(_before_s(own)[1:], 0.0)
        compute_s = own["compute_s"] / (above * len(served))
        found[fc] = Columns(compute_s, zeros, zeros, own["comm_s"] + after_s, ones, ones.astype(bool))
        for worker in served:
            of_worker = rows[worker]
            forward_s = begin_s[worker] + share * of_worker["compute_s"]
            down_s = _transfer_s(of_worker, forward_s, 1.0 - share, left, returned_s)
            compute_s = of_worker["compute_s"] / (forward + backward)
            to_fc_s = _before_s(of_worker) + up_s
            found[worker] = Columns(compute_s, down_s, to_fc_s, of_worker["comm_s"], ones, ones.astype(bool))
    return [found[worker] for worker in range(groups.n_workers)]


def _before_s(rows: Rows) -> Rows:
    """Return the time from the end of the iteration before to the begin of each computation, shape (n_iterations,)."""
    loaded_s = rows["begin_s"] + rows["load_s"]
    within_s = rows["end_s"] - loaded_s - rows["compute_s"]  # waits are part of the computation
    ended_s = rows["end_s"] + rows["comm_s"] + np.maximum(rows["wait_s"] - within_s, 0.0)
    return np.maximum(loaded_s - np.append(0.0, ended_s[:-1]), 0.0)


def _transfer_s(rows: Rows, ready_s: Rows, share: float, left: Rows, sent_s: Rows) -> Rows:
    """Return the shortest transfer time of pieces with which a worker's computation ends when it did.

    Parameters
    ----------
    rows
        Iterations of the worker.
    ready_s
        When the worker could begin, shape (n_iterations,).
    share
        Part of its computation that needs the pieces.
    left
        Part of this from each piece on, shape (n_pieces,).
    sent_s
        When each piece was sent, shape (n_iterations, n_pieces).
    """
    end_s, compute_s = rows["end_s"], share * rows["compute_s"]
    longest_s = np.min(end_s[:, None] - compute_s[:, None] * left - sent_s, axis=1)
    waited = end_s - ready_s - compute_s > CLOCK_S
    return np.where(waited, np.maximum(longest_s, 0.0), 0.0)


def read(job: Job, workload: Workload) -> tuple[list[Columns], tuple[ClusterEvent, ...]]:
    """Return the durations of each worker's iterations, and device changes, from the trace ``cluster.times_from``.

    Raises
    ------
    JobError
        If the trace cannot be read, or is not of a run of this job's layers and workers.
    """
    assert not isinstance(job.workload, Script)
    key, trace = recorded_trace(job)
    sizes = divided(job, workload).shape.attributes()
    steps = trace.tables["exchanges"]
    steps = steps[steps["batch_size"] > 0]
    batch_sizes = np.unique(steps["batch_size"][steps["worker"] >= job.groups.n_fc]).tolist()
    its_options = asdict(trace.job.paradigm)
    for name, needed, found in (
        *((f"paradigm.{name}", value, its_options.get(name)) for name, value in asdict(job.paradigm).items()),
        ("cluster.workers", job.cluster.workers, trace.n_workers),
        ("layers of these bytes", sizes, {name: trace.attributes.get(name) for name in sizes}),
        ("workload.batch_size", job.workload.batch_size, batch_sizes[0] if len(batch_sizes) == 1 else batch_sizes),
    ):
        if needed != found:
            raise JobError(f"{key}: must be of a run with {name} = {shown(needed)}, it has {shown(found)}")
    n_iterations = np.bincount(steps["worker"], minlength=trace.n_workers)
    if not n_iterations.all():
        raise JobError(f"{key}: must be of a run with an iteration of worker {n_iterations.argmin()}, it has none")
    if not 0.0 < stanza_options(job).shares[2] < 1.0:
        raise JobError(f"{key}: must come with paradigm.fc_share between 0 and 1")
    return columns(job, steps), trace.job.cluster.events


class RecordedLinks(Links):
    """Links between the groups, and within each, on which transfers take recorded times.

    Parameters
    ----------
    loop
        Event loop.
    job
        Job with separated layers.
    times
        Durations of each worker's iterations, as `columns` returns them. They repeat after the last one.
    size_bytes
        Size of the model, for the records.
    """

    def __init__(self, loop: Loop, job: Job, times: Sequence[Columns], size_bytes: int) -> None:
        super().__init__(loop, None, len(times), size_bytes)
        self._times, self._groups = times, job.groups
        self._n_pieces = stanza_options(job).micro_batches
        self._all_reduces_s = {
            group[0]: cycle(np.min([times[worker].comm_s for worker in group], axis=0).tolist())
            for group in (job.groups.fc, job.groups.convolution)
        }

    def all_reduce_among(self, workers: Sequence[int], size_bytes: int, then: Then, *args: Any) -> None:
        """Take the recorded time of the group's all-reduce."""
        self._loop.after(next(self._all_reduces_s[workers[0]]), then, *args)

    def in_order(self, source: int, target: int) -> InOrder:
        """Return a channel on which pieces take the recorded times."""
        is_up = self._groups.is_fc(target)
        seconds = self._times[source].to_server_s if is_up else self._times[target].to_begin_s
        return _Channel(self._loop, cycle(np.repeat(seconds, self._n_pieces).tolist()))


class _Channel(InOrder):
    """Channel whose messages take given times."""

    def __init__(self, loop: Loop, seconds: Iterator[float]) -> None:
        self._loop, self._seconds = loop, seconds

    def send(self, size_bytes: int, then: Then, *args: Any) -> None:
        self._loop.after(next(self._seconds), then, *args)
