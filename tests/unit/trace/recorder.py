"""Traces of small runs in virtual time: hpcsync's coordinator and paradigms with made-up durations."""

import dataclasses
import heapq
import itertools
import math
import random
from pathlib import Path

import numpy as np

from hpcsync.config.job import Job
from hpcsync.core.assignments import create_assignments, create_paradigm, decision_fields
from hpcsync.core.coordinator import CancelCommand, GrantCommand, PushInfo, UpdateCommand, coordinate
from hpcsync.paradigms.events import UNTIL
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import FORMAT, FORMAT_VERSION, TABLES, Change, decisions_dtype

JOB = """
name = "made-up"
[workload]
name = "timing"
batch_size = 8
[optimizer]
name = "sgd"
lr = 0.1
[stop]
updates = {updates}
{target}
[paradigm]
{paradigm}
[cluster]
workers = {workers}
"""

BATCHES = """[batches]
policy = "equal-finish"
predictor = "last"
interval = 2
gain = 0.01"""

ASHL = """name = "ashl"
steps_coarse = 4
steps_fine = 2
staleness = 1
loss_preset = 0.12
warmup = 1
profiled = 4"""

TOP_K = '[compression]\nname = "top-k"'

PARADIGMS = {
    "bsp": 'name = "bsp"',
    "asp": 'name = "asp"',
    "ssp": 'name = "ssp"\nstaleness = 2',
    "dssp": 'name = "dssp"\nstaleness_min = 1\nstaleness_max = 5',
    "paper": 'name = "dssp"\nstaleness_min = 1\nstaleness_max = 5\nmode = "paper"',
    "easgd": 'name = "easgd"\nperiod = 1',
    "easgd-sync": 'name = "easgd"\nperiod = 1\nsynchronous = true',
    "k-sync": 'name = "k-sync"\nk = 2',
    "k-batch-sync": 'name = "k-batch-sync"\nk = 2\ncancel = "abort"',
    "k-async": 'name = "k-async"\nk = 2\nstaleness_max = 1\nstaleness_weight = "inverse"',
    "k-batch-async": 'name = "k-batch-async"\nk = 2',
    "adaptive": 'name = "k-async"\nk = "min"',
    "batches": f'name = "bsp"\n{BATCHES}',
    "adsp": 'name = "adsp"\ncheck_period_s = 3\ninterval_min_s = 0.5\nsearch_every_s = 10',
    "ashl": f"{ASHL}\n{TOP_K}",
    "k-batches": f'name = "k-sync"\nk = "state"\n{BATCHES}',
}


def make_job(paradigm, workers=3, updates=40, target=""):
    text = PARADIGMS.get(paradigm, paradigm).replace("k = 2", f"k = {min(2, workers)}")
    return Job.from_toml(JOB.format(paradigm=text, workers=workers, updates=updates, target=target))


class Rows:
    """Rows that the coordinator appends, in order: a trace that can be cut after any row."""

    def __init__(self):
        self.rows = []

    def append(self, table, row):
        self.rows.append((table, row))


class Work:
    """Durations of an assignment, if an iteration of 8 samples takes `iteration_s`.

    An eighth of it is for reading, an eighth for an uncompressed push, and three quarters for computing.
    """

    def __init__(self, job, assignment, iteration_s):
        n_steps, of_push = max(1, assignment.local_steps), assignment.batch_size or 8 * max(1, assignment.local_steps)
        step_s = 0.75 * iteration_s * (of_push // n_steps) / 8
        if assignment.local_steps == UNTIL:
            n_steps = max(1, math.ceil(assignment.commit_s / step_s))
        load, sent = of_push // max(1, assignment.local_steps) / 8, 1.0
        if job.compresses:
            sent = 0.25 if math.isnan(assignment.ratio) else assignment.ratio
        self.local_steps, self.n_samples = n_steps, of_push // max(1, assignment.local_steps) * n_steps
        self.pull_s, self.compute_s = 0.125 * load * iteration_s, n_steps * step_s
        self.push_s, self.encode_s = 0.125 * sent * load * iteration_s, (sent < 1) * 0.05 * load * iteration_s
        self.wire_bytes = 2000 + int(2000 * sent)
        self.took_s = self.pull_s + self.compute_s + self.push_s + self.encode_s


def play(job, trace, seconds, *, jitter=0.0, seed=0, leave=None, changes=(), stop_s=None, die_s=None, evaluate_every=5):
    """Drive the coordinator to the end of a run. Returns the columns of its decisions.

    seconds: duration of one iteration, per worker. leave: worker -> iteration instead of whose push it leaves.
    changes: times, and the workers that die then, whatever they are doing, or join if they have left.
    stop_s: when the run is stopped from outside; die_s: when it fails, and closes its trace.
    """
    leave, changes, rng = dict(leave or {}), sorted(changes), random.Random(seed)
    paradigm = create_paradigm(job)
    coordinator = coordinate(job, paradigm, trace)
    queue, order_of_start = [], itertools.count()

    def put(begin_s, work, wait_s, reply, share=1.0):
        end_s = begin_s + share * work.took_s
        heapq.heappush(queue, (end_s, next(order_of_start), begin_s, work, wait_s, reply, share))

    def start(now_s, reply, wait_s=0.0):
        put(now_s, Work(job, reply.assignment, seconds[reply.worker] * (1 + jitter * rng.random())), wait_s, reply)

    def cancel(now_s, order):
        """Cancel the worker's iteration; it checks after half of its samples only."""
        for entry in queue:
            _, _, begin_s, work, wait_s, reply, _ = entry
            share = work.n_samples // 2 / work.n_samples
            concerned = reply.worker == order.worker and reply.version <= order.version
            if concerned and share and now_s <= begin_s + share * work.took_s:
                queue.remove(entry)
                heapq.heapify(queue)
                put(begin_s, work, wait_s, reply, share)
                return

    def report(now_s, begin_s, work, wait_s, reply, share):
        pull_s, push_s, compute_s = share * work.pull_s, share * work.push_s, share * work.compute_s
        end_s = now_s
        if job.commits:  # the time of its own computation matters
            begin_s += pull_s
            end_s = begin_s + compute_s
        info = PushInfo(
            worker=reply.worker, iteration=reply.iteration, version_read=reply.version,
            begin_s=begin_s, end_s=end_s, compute_s=compute_s, wait_s=wait_s,
            comm_s=pull_s + push_s, batch_size=work.n_samples, local_steps=work.local_steps,
            loss=1.0 / reply.iteration, wire_bytes=work.wire_bytes if share == 1 else 2000, share=share,
            pull_s=pull_s, encode_s=share * work.encode_s,
        )  # fmt: skip
        if job.batches.policy == "equal" or reply.iteration == 1:
            return info
        return info._replace(predicted_fixed_s=0.125, predicted_sample_s=work.took_s / work.n_samples)

    for worker, assignment in enumerate(create_assignments(job).first):
        start(0.0, GrantCommand(worker, 1, 0, assignment))
    pushed_s = {}
    while queue:
        changing = None
        if changes and changes[0][0] <= queue[0][0]:
            now_s, changing = changes.pop(0)
        else:
            now_s, _, *begun, reply, share = heapq.heappop(queue)
        if die_s is not None and now_s > die_s:
            break
        orders = []
        if stop_s is not None and now_s > stop_s and not coordinator.stopping:
            orders = [(stop_s, order) for order in coordinator.stop(stop_s)]
        if changing in coordinator.active:
            queue = [entry for entry in queue if entry[-2].worker != changing]
            heapq.heapify(queue)
            answer = coordinator.left(now_s, changing, Change.DIED)
        elif changing is not None:
            pushed_s[changing] = now_s
            answer = coordinator.joined(now_s, changing)
        elif leave.get(reply.worker) == reply.iteration:
            del leave[reply.worker]
            answer = coordinator.left(now_s, reply.worker)
        else:
            pushed_s[reply.worker] = now_s
            answer = coordinator.pushed(now_s, report(now_s, *begun, reply, share))
        orders += [(now_s, order) for order in answer]
        for order_s, order in orders:
            if isinstance(order, GrantCommand):
                if order.assignment.local_steps:
                    start(order_s, order, wait_s=order_s - pushed_s[order.worker])
            elif isinstance(order, CancelCommand) and not job.commits:  # whose workers learn of the end too late here
                cancel(order_s, order)
            elif isinstance(order, UpdateCommand) and coordinator.version % evaluate_every == 0:
                version, samples = coordinator.version, coordinator.samples
                coordinator.evaluated(now_s, version, samples, 1.0 / version, 1.0 - 1.0 / version)
    coordinator.close()
    return decision_fields(job)


def record(paradigm, seconds=(1.0, 1.3, 2.1), *, updates=40, target="", **how):
    """Return a finished trace in memory."""
    job, rows = make_job(paradigm, len(seconds), updates, target), Rows()
    fields = play(job, rows, seconds, **how)
    return as_trace(job, rows.rows, fields)


def as_trace(job, rows, decision_fields=(), status="finished"):
    dtypes = {**TABLES, "decisions": decisions_dtype(decision_fields)}
    tables = {name: np.array([row for table, row in rows if table == name], dtype) for name, dtype in dtypes.items()}
    tables["pushes"] = np.sort(tables["pushes"], order="seq")
    return Trace(Path("in-memory.h5"), attributes(job, status), tables)


def attributes(job, status=None):
    own = {"status": status, "format": FORMAT, "format_version": FORMAT_VERSION} if status else {}
    return {
        "job": job.to_toml(),
        "paradigm": job.paradigm.name,
        "engine": "simulator",
        "n_workers": job.cluster.workers,
        "n_servers": job.cluster.servers,
        **own,
    }


def edit(trace, table, row, **values):
    """Return the trace with some values of one row changed."""
    rows = trace.tables[table].copy()
    for column, value in values.items():
        rows[column][row] = value
    return with_rows(trace, table, rows)


def remove(trace, table, row):
    return with_rows(trace, table, np.delete(trace.tables[table], row))


def with_rows(trace, table, rows):
    if table == "pushes":
        rows = rows[np.argsort(rows["seq"], kind="stable")]
    return dataclasses.replace(trace, tables={**trace.tables, table: rows})


def with_job(trace, paradigm):
    job = make_job(paradigm, trace.n_workers)
    return dataclasses.replace(trace, attributes={**trace.attributes, **attributes(job)})


def with_status(trace, status):
    return dataclasses.replace(trace, attributes={**trace.attributes, "status": status})
