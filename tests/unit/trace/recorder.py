"""Traces of small runs in virtual time: the product's coordinator and paradigms with invented durations."""

import dataclasses
import heapq
import itertools
import math
import random
import tomllib
from pathlib import Path

import numpy as np

from hpcsync.core.assignments import create_assignments, decision_fields
from hpcsync.core.coordinator import CancelCommand, UpdateCommand, coordinate
from hpcsync.paradigms.records import UNTIL, Grant, PushInfo
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import FORMAT, FORMAT_VERSION, TABLES, Change, decisions_dtype
from hpcsync.training.lr_schedule import EvaluationSchedule
from tests.unit.jobs import make_job
from tests.unit.recorder import Recorder

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
    "merged": 'name = "ssp"\nstaleness = 1\nmerge = true',
    "paper": 'name = "dssp"\nstaleness_min = 1\nstaleness_max = 5\nmode = "paper"',
    "easgd": 'name = "easgd"\nperiod = 1',
    "easgd-sync": 'name = "easgd"\nperiod = 1\nsynchronous = true',
    "k-sync": 'name = "k-sync"\nk = 2',
    "k-batch-sync": 'name = "k-batch-sync"\nk = 2\ncancel = "abort"',
    "k-async": 'name = "k-async"\nk = 2\nstaleness_max = 1\nstaleness_weight = "inverse"',
    "k-batch-async": 'name = "k-batch-async"\nk = 2',
    "adaptive": 'name = "k-async"\nk = "min"',
    "sync-switch": 'name = "sync-switch"\nplateau = 0.5\nwindow = 3',
    "batches": f'name = "bsp"\n{BATCHES}',
    "adsp": 'name = "adsp"\ncheck_period_s = 3\ninterval_min_s = 0.5\nsearch_every_s = 10',
    "ashl": f"{ASHL}\n{TOP_K}",
    "ashl-after-gate": f'{ASHL.replace("staleness = 1", "staleness = 0")}\ncommit = "after-gate"',
    "async-diloco": 'name = "async-diloco"\nsteps = 3\nquorum = 2\ngrace_s = 0.5',
    "k-batches": f'name = "k-sync"\nk = "state"\n{BATCHES}',
}


def job_of(paradigm, workers=3, updates=40, target=""):
    """Return a job of a paradigm by its name above, or of these lines of a job file after [paradigm]."""
    text = PARADIGMS.get(paradigm, paradigm)
    for key in ("k", "quorum"):
        text = text.replace(f"{key} = 2", f"{key} = {min(2, workers)}")
    tables = tomllib.loads(f"[stop]\nupdates = {updates}\n{target}\n[paradigm]\n{text}")
    return make_job(
        name="made-up",
        seed=0,
        workload={"name": "timing", "batch_size": 8},
        cluster={"workers": workers, "on_death": "continue"},
        evaluation={"every_samples": 40},
        **tables,
    )


class Work:
    """Durations of a worker's assignment, given the time of an iteration of 8 samples.

    Reading takes an eighth of that time, putting an eighth if all elements are sent, and computing three quarters.
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
        self.wire_bytes = 2000 + 8 * job.compresses + int(2000 * sent)
        self.took_s = self.pull_s + self.compute_s + self.push_s + self.encode_s


def play(job, trace, seconds, *, jitter=0.0, seed=0, leave=None, changes=(), stop_s=None, die_s=None):
    """Drive the coordinator to the end of a run and return the names of its decision columns.

    Parameters
    ----------
    seconds
        Duration of an iteration, per worker.
    leave
        Maps a worker to the iteration instead of whose push it leaves.
    changes
        Pairs (time, worker). The worker dies then, whatever it is doing; if it has left, it joins.
    stop_s
        Time at which the run is stopped from outside.
    die_s
        Time at which the run fails and closes its trace.
    """
    leave, changes, rng = dict(leave or {}), sorted(changes), random.Random(seed)
    coordinator = coordinate(job, trace)
    queue, order_of_start = [], itertools.count()

    def put(begin_s, work, wait_s, grant, share=1.0):
        end_s = begin_s + share * work.took_s
        heapq.heappush(queue, (end_s, next(order_of_start), begin_s, work, wait_s, grant, share))

    def start(now_s, grant, wait_s=0.0):
        put(now_s, Work(job, grant, seconds[grant.worker] * (1 + jitter * rng.random())), wait_s, grant)

    def cancel(now_s, command):
        """Cancel an iteration, which a worker notices only after half of its samples."""
        for entry in queue:
            _, _, begin_s, work, wait_s, grant, _ = entry
            share = work.n_samples // 2 / work.n_samples
            is_cancelled = grant.worker == command.worker and grant.version <= command.version
            if is_cancelled and share and now_s <= begin_s + share * work.took_s:
                queue.remove(entry)
                heapq.heapify(queue)
                put(begin_s, work, wait_s, grant, share)
                return

    def push_info(now_s, begin_s, work, wait_s, grant, share):
        pull_s, push_s, compute_s = share * work.pull_s, share * work.push_s, share * work.compute_s
        begin_s += pull_s
        end_s = begin_s + compute_s
        info = PushInfo(
            now_s=now_s,
            worker=grant.worker, iteration=grant.iteration, version_read=grant.version,
            begin_s=begin_s, end_s=end_s, compute_s=compute_s, wait_s=wait_s,
            comm_s=pull_s + push_s, batch_size=work.n_samples, local_steps=work.local_steps,
            loss=1.0 / grant.iteration, wire_bytes=work.wire_bytes if share == 1 else 2000, share=share,
            pull_s=pull_s, encode_s=share * work.encode_s,
        )  # fmt: skip
        if job.batches.policy == "equal" or grant.iteration == 1:
            return info
        return info._replace(predicted_fixed_s=0.125, predicted_sample_s=work.took_s / work.n_samples)

    def evaluate(now_s):
        version = coordinator.version
        loss = 1.0 / max(1, version)
        coordinator.evaluated(now_s, version, coordinator.samples, loss, 1.0 - loss)

    evaluations, evaluated = EvaluationSchedule(job.evaluation.every_samples), []
    for grant in create_assignments(job).first:
        start(0.0, grant)
    pushed_s = {}
    while queue:
        changing, due = None, coordinator.due
        is_due = due is not None and due.now_s <= min([queue[0][0], *(change_s for change_s, _ in changes)])
        if is_due:
            now_s = due.now_s
        elif changes and changes[0][0] <= queue[0][0]:
            now_s, changing = changes.pop(0)
        else:
            now_s, _, *begun, grant, share = heapq.heappop(queue)
        if die_s is not None and now_s > die_s:
            break
        commands = []
        if stop_s is not None and now_s > stop_s and not coordinator.stopping:
            commands = [(stop_s, command) for command in coordinator.stop(stop_s)]
        if is_due:
            answer = coordinator.passed(now_s)
        elif changing in coordinator.active:
            queue = [entry for entry in queue if entry[-2].worker != changing]
            heapq.heapify(queue)
            answer = coordinator.left(now_s, changing, Change.DIED)
        elif changing is not None:
            pushed_s[changing] = now_s
            answer = coordinator.joined(now_s, changing)
        elif leave.get(grant.worker) == grant.iteration:
            del leave[grant.worker]
            answer = coordinator.left(now_s, grant.worker)
        else:
            pushed_s[grant.worker] = now_s
            answer = coordinator.pushed(now_s, push_info(now_s, *begun, grant, share))
        commands += [(now_s, command) for command in answer]
        stopped = []
        for command_s, command in commands:
            if isinstance(command, Grant):
                if command.local_steps:
                    start(command_s, command, wait_s=command_s - pushed_s[command.worker])
                else:
                    stopped.append(command.worker)
            elif isinstance(command, CancelCommand) and not job.commits:  # a committing worker notices too late here
                cancel(command_s, command)
            elif isinstance(command, UpdateCommand) and evaluations.begin_if_due(coordinator.samples):
                evaluated.append(coordinator.version)
                evaluate(now_s)
        for worker in stopped:
            coordinator.left(now_s, worker)
    coordinator.close()
    if die_s is None and coordinator.version not in evaluated:
        evaluate(coordinator.updated_s)
    return decision_fields(job)


def record(paradigm, seconds=(1.0, 1.3, 2.1), *, updates=40, target="", stop_s=None, **how):
    """Return a finished trace in memory, of a run that ends by then."""
    ends = "" if stop_s is None else f"seconds = {stop_s}"
    job, rows = job_of(paradigm, len(seconds), updates, f"{target}\n{ends}"), Recorder()
    fields = play(job, rows, seconds, stop_s=stop_s, **how)
    return as_trace(job, rows.rows, fields)


def with_norms(table, row):
    """Return a row with unknown norms of gradients where it was written without them."""
    lacks = len(TABLES[table]) - len(row)
    if table == "pushes" and lacks == 1:
        return (*row[:-2], math.nan, *row[-2:])
    return (*row, *(math.nan,) * lacks) if table in ("updates", "exchanges") else row


def as_trace(job, rows, decision_fields=(), status="finished"):
    rows = [(table, with_norms(table, row)) for table, row in rows]
    dtypes = {**TABLES, "decisions": decisions_dtype(decision_fields)}
    tables = {name: np.array([row for table, row in rows if table == name], dtype) for name, dtype in dtypes.items()}
    tables["pushes"] = np.sort(tables["pushes"], order="seq")
    return Trace(Path("in-memory.h5"), attributes(job, status), tables)


def attributes(job, status=None):
    own = {"status": status, "format": FORMAT, "format_version": FORMAT_VERSION} if status else {}
    if job.has_servers and job.compresses:  # those of `Work`
        own |= {"tensors": "[[500, false, 1]]", "element_bytes": 4}
    return {
        "job": job.to_toml(),
        "paradigm": job.paradigm.name,
        "engine": "simulator",
        "seed": job.seed,
        "n_workers": job.cluster.workers,
        "n_servers": job.cluster.servers,
        **own,
    }


def on_ranks(trace, uncertainty_s=0.0, starts=((0.0, 0),)):
    """Return the trace as if real ranks had made it.

    Parameters
    ----------
    uncertainty_s
        That of all clocks but rank 0's, or one of each rank; for each start if it has a second dimension.
    starts
        Time and `seq` of each start.
    """
    n = trace.job.cluster.ranks
    uncertain = np.where(np.arange(n) == 0, 0.0, np.broadcast_to(uncertainty_s, (len(starts), n)))
    clocks = [(start, rank, b"vm", 0.0, s) for start, own in enumerate(uncertain) for rank, s in enumerate(own)]
    begun = [(start, now_s, seq, b"", b"") for start, (now_s, seq) in enumerate(starts)]
    tables = {"clocks": np.array(clocks, TABLES["clocks"]), "starts": np.array(begun, TABLES["starts"])}
    attributes = {**trace.attributes, "engine": "mpi"}
    return dataclasses.replace(trace, attributes=attributes, tables={**trace.tables, **tables})


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
    job = job_of(paradigm, trace.n_workers)
    return dataclasses.replace(trace, attributes={**trace.attributes, **attributes(job)})


def with_status(trace, status):
    return dataclasses.replace(trace, attributes={**trace.attributes, "status": status})
