"""Recomputation of a recorded run: its losses, evaluations and final weights follow from its trace.

With servers the trace holds the order of all pushes and updates, and which version each worker read. The same pushes
are handed to a new coordinator in that order, and its commands carried out with the arithmetic of the run
(`server_numerics`), so no time needs to be simulated. Workers that exchange in step make the same steps whatever their
times, so their job is simulated again. Other runs without servers depend on the order in which models were merged,
which the trace does not hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hpcsync.audit.check import Check, Part, check_all
from hpcsync.audit.server_recount import Recount
from hpcsync.config.job import Job, Script
from hpcsync.core.assignments import create_assignments
from hpcsync.core.coordinator import AccumulateCommand, Command, NoRecorder, Recorder, UpdateCommand, coordinate
from hpcsync.core.job_validation import check
from hpcsync.core.stanza_resolution import resolved
from hpcsync.paradigms.records import Grant, PushInfo
from hpcsync.run_dir import layout
from hpcsync.simulator import factory, peer_transfers
from hpcsync.simulator.gradients import Work
from hpcsync.simulator.server_numerics import Numerics
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ELAPSED, EVALUATED, TABLES, Change, Outcome, Release, Rows
from hpcsync.training.flat_model import trainable
from hpcsync.workloads.registry import Workload

SAME = 1e-4  # largest relative difference of a loss: other processors and libraries round differently
LOSSES, EVALUATIONS, WEIGHTS = (
    f"recomputed {name} are the recorded ones" for name in ("losses", "evaluations", "weights")
)


class NotRecomputed(Exception):
    """The trace does not determine the arithmetic of its run; the message is one line."""


def recompute(trace: Trace, say: Callable[[str], None] = lambda line: None) -> list[Check]:
    """Train again as the trace says, on one core, and compare losses, evaluations and final weights.

    Parameters
    ----------
    trace
        Trace of a run on CPUs, or of a simulation. Its rows must have passed the audit.
    say
        Called with remarks, each of one line.

    Returns
    -------
    list of Check
        Losses and evaluations are the same if they differ by at most `SAME`, weights if they differ by at most that
        share of their largest magnitude. The details say whether all bits are equal.

    Raises
    ------
    NotRecomputed
        If the arithmetic does not follow from the trace.
    JobError
        If the workload cannot be built here.
    """
    job = recorded_job(trace)
    check_determined(trace)
    torch.set_num_threads(1)
    workload = check(job)
    if workload.loss is None:
        raise NotRecomputed("its workload has no arithmetic")
    job = resolved(job, workload)
    buffers = any(True for _ in workload.model.buffers())
    try:
        losses, evaluations = (
            _Served(trace, job, workload).run if job.has_servers else partial(_in_step, trace, job, workload)
        )()
    except (ValueError, KeyError, IndexError, StopIteration) as error:
        return [Check(LOSSES, False, 0, f"the trace cannot be followed: {type(error).__name__}: {error}")]
    checks = [_compared(LOSSES, losses)]
    if buffers:
        say("evaluations are not recomputed: the trace does not hold from which workers the model's buffers were")
    elif len(evaluations.recorded):
        checks.append(_compared(EVALUATIONS, evaluations))
    weights = trace.path.parent / layout.WEIGHTS
    if trace.finished and weights.is_file():
        checks.append(compared_weights(workload, weights))
    return checks


def recorded_job(trace: Trace) -> Job:
    """Return the job of a trace, without a target accuracy if no evaluation has one: now such a job is refused."""
    job, evaluations = trace.job, trace.tables["evaluations"]
    if job.stop.target_accuracy is None or np.isfinite(evaluations["accuracy"]).any():
        return job
    return job.model_copy(update={"stop": job.stop.model_copy(update={"target_accuracy": None})})


def check_determined(trace: Trace) -> None:
    """Raise NotRecomputed unless the arithmetic of the run follows from the trace."""
    job = trace.job
    if isinstance(job.workload, Script):
        raise NotRecomputed("it was a training script; only its own code has model and data")
    if job.cluster.device == "cuda":
        raise NotRecomputed('cluster.device = "cuda": a CPU computes other bits')
    if len(trace.tables["starts"]) > 1:
        raise NotRecomputed("it was resumed, and what workers had computed by then is not in the trace")
    if (trace.tables["membership"]["change"] == Change.JOINED).any():
        raise NotRecomputed("workers joined it, whose iterations may have been computed twice")
    if job.has_servers:
        return
    if job.paradigm.lead_bound == np.inf:
        raise NotRecomputed(f"under {job.paradigm.label} it depends on when models arrived, which is not in the trace")
    if job.batches.policy != "equal":
        raise NotRecomputed("batches are allocated by measured times")
    if not len(trace.tables["exchanges"]):
        raise NotRecomputed("it has no iteration")
    steps = np.bincount(trace.tables["exchanges"]["worker"], minlength=trace.n_workers)
    if len(np.unique(steps)) > 1:
        raise NotRecomputed("workers left before its end")


class Values(NamedTuple):
    """Recorded and recomputed values, each of shape (n_values,), and what each of them is, in words."""

    recorded: Rows
    again: Rows
    what: Callable[[int], str]


class _Served:
    """A run with servers: its events in their order, and the arithmetic that follows from them."""

    def __init__(self, trace: Trace, job: Job, workload: Workload) -> None:
        self._recount = Recount(trace)
        self._job = job
        self._coordinator = coordinate(job, NoRecorder())
        self._numerics = Numerics(job, workload)
        self._grants = list(create_assignments(job).first)
        self._version = 0
        rows = self._recount.evaluations
        self._evaluated = set(rows["version"].tolist())
        self._judged: dict[int, tuple[float, float]] = {}

    def run(self) -> tuple[Values, Values]:
        """Follow all events; return losses and evaluations."""
        recount, coordinator = self._recount, self._coordinator
        losses = np.full(len(recount.pushes), np.nan)
        for worker in range(len(self._grants)):
            self._numerics.grant(worker)
        self._judge()
        for kind, index, row in self._events():
            now_s = float(row["now_s"])
            if self._ended_before(kind, index, row):
                self._carry_out(coordinator.stop(now_s))
            if kind == "push":
                losses[index] = self._contribute(row)
                self._numerics.delivered(int(row["worker"]))
                self._carry_out(coordinator.pushed(now_s, _push_info(row)))
            elif kind == "change":
                self._carry_out(coordinator.left(now_s, int(row["worker"]), int(row["change"])))
            elif kind == "time":
                self._carry_out(coordinator.passed(now_s))
            else:
                made = recount.evaluations[index]  # the paradigm is given every evaluation until the run stops
                current_s, version, samples = made[["now_s", "version", "samples"]].item()
                loss = float(row["chosen"])
                self._carry_out(coordinator.evaluated(current_s, version, samples, loss, math.nan, known_s=now_s))
        coordinator.close()
        self._numerics.finish(coordinator.trained_by)
        return _losses(recount.pushes, losses), _evaluations(recount.evaluations, self._judged)

    def _events(self) -> list[tuple[str, int, np.void]]:
        """Return the events in the order of `seq`, as kind, index and row."""
        recount = self._recount
        controller = recount.decisions["controller"]
        elapsed, evaluated = (recount.decisions[controller == name.encode()] for name in (ELAPSED, EVALUATED))
        kinds = (
            ("push", recount.pushes),
            ("change", recount.membership),
            ("time", elapsed),
            ("evaluation", evaluated),
        )
        events = [(kind, index, row) for kind, rows in kinds for index, row in enumerate(rows)]
        return sorted(events, key=lambda event: int(event[2]["seq"]))

    def _ended_before(self, kind: str, index: int, row: np.void) -> bool:
        """Return True if the run was ended from outside before this event, by a target or its time limit.

        A stop grant precedes the event; or, if no worker was blocked then, the event is a push that was dropped and
        answered by a stop grant at once.
        """
        recount = self._recount
        if self._coordinator.stopping:
            return False
        if row["seq"] > recount.stop_seq:
            return True
        if kind != "push" or row["outcome"] != Outcome.DROPPED:
            return False
        answer = recount.push_grant[index]
        return bool(answer >= 0 and recount.is_stop[answer] and recount.grants["released_by"][answer] == Release.OWN)

    def _contribute(self, push: np.void) -> float:
        grant = self._grants[push["worker"]]
        work = Work(
            grant.first_sample,
            int(push["batch_size"]),
            self._job.n_pieces_of(int(push["worker"])),
            float(push["share"]),
            int(push["local_steps"]),
            grant.ratio,
        )
        return self._numerics.contribute(int(push["worker"]), work).loss

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Grant):
                self._grants[command.worker] = command
                if command.local_steps:
                    self._numerics.grant(command.worker)
            elif isinstance(command, UpdateCommand):
                self._numerics.apply(command)
                self._version += 1
                self._judge()
            elif isinstance(command, AccumulateCommand):
                self._numerics.accumulate(command)

    def _judge(self) -> None:
        if self._version in self._evaluated:
            self._judged[self._version] = self._numerics.evaluate(self._coordinator.trained_by)


def _in_step(trace: Trace, job: Job, workload: Workload) -> tuple[Values, Values]:
    """Simulate a job whose workers exchange in step, in equal times, until it has as many samples as the run.

    Return losses and evaluations.
    """
    table: dict[str, Any] = job.model_dump(exclude_none=True)
    updates, n_workers = trace.tables["updates"], job.cluster.workers
    n_samples, n_iterations = (
        int(rows.max(initial=0)) for rows in (updates["samples"], trace.tables["exchanges"]["iteration"])
    )
    times = {"model": "constant", "seconds": 1.0}
    table["cluster"] = {"workers": n_workers, "servers": 0, "compute": times}
    table["stop"] = {"samples": max(1, n_samples)}
    if n_iterations % job.paradigm.exchange_every and not job.stop.reached(samples=n_samples, updates=len(updates)):
        # All have left between two exchanges, and have exchanged once more.
        leave = {"change": "leave", "at_iteration": n_iterations + 1}
        table["cluster"]["events"] = [{"worker": worker, **leave} for worker in range(n_workers)]
        table["stop"] = {"samples": n_samples + 1}
    table["evaluation"].pop("seconds", None)  # so that every evaluation that may have been made is made
    again, rows = Job.from_table(table), KeptRows()
    factory.simulation(again, workload, peer_transfers.build(again, workload), rows).run()
    recorded, made = (
        steps[np.lexsort((steps["iteration"], steps["worker"]))]
        for steps in (trace.tables["exchanges"], np.array(rows.of["exchanges"], TABLES["exchanges"]))
    )
    if len(recorded) != len(made):
        raise ValueError(f"{len(recorded)} iterations are recorded, {len(made)} follow from the job")
    judged = {int(row[1]): (float(row[3]), float(row[4])) for row in rows.of["evaluations"]}
    return _losses(recorded, made["loss"]), _evaluations(trace.tables["evaluations"], judged)


class KeptRows(Recorder):
    """Recorder of all rows, by table."""

    def __init__(self) -> None:
        self.of = defaultdict[str, list[tuple[Any, ...]]](list)

    def append(self, table: str, row: tuple[Any, ...]) -> None:
        """Keep a row."""
        self.of[table].append(row)

    def amend(self, table: str, back: int, column: str, value: float) -> None:
        """Change a row."""
        rows, place = self.of[table], (TABLES[table].names or ()).index(column)
        row = rows[-1 - back]
        rows[-1 - back] = (*row[:place], value, *row[place + 1 :])


def _push_info(push: np.void) -> PushInfo:
    return PushInfo(*(push[name].item() for name in PushInfo._fields))


def _losses(rows: Rows, again: Rows) -> Values:
    return Values(
        rows["loss"], again, lambda i: f"loss of worker {rows['worker'][i]}, iteration {rows['iteration'][i]}"
    )


def _evaluations(rows: Rows, judged: dict[int, tuple[float, float]]) -> Values:
    """Return recorded and recomputed losses and accuracies, one after the other for each evaluation."""
    rows = rows[[version in judged for version in rows["version"].tolist()]]
    recorded = np.column_stack([rows["loss"], rows["accuracy"]]).ravel()
    again = np.array([judged[version] for version in rows["version"].tolist()]).reshape(-1)
    return Values(recorded, again, lambda i: f"{('loss', 'accuracy')[i % 2]} of version {rows['version'][i // 2]}")


def differing(recorded: Rows, again: Rows) -> tuple[Rows, Rows]:
    """Return which values differ, and which of them by more than rounding (`SAME`); NaN is equal to NaN."""
    differ = recorded != again
    if recorded.dtype.kind != "f":
        return differ, differ
    differ &= ~(np.isnan(recorded) & np.isnan(again))
    with np.errstate(all="ignore"):
        near = np.abs(recorded - again) <= SAME * np.maximum(np.abs(recorded), np.abs(again))
    return differ, differ & ~near


def _compared(name: str, values: Values) -> Check:
    recorded, again, what = values
    differ, far = differing(recorded, again)
    wrong: Part = (far, lambda i: f"{what(i)} is {recorded[i]}, recomputed {again[i]}")
    found = check_all(name, wrong)
    if not found.passed:
        return found
    detail = f"{int(differ.sum())} of {len(differ)} differ by rounding" if differ.any() else "bit by bit"
    return Check(name, True, found.n_checked, detail)


def compared_weights(workload: Workload, path: Path) -> Check:
    """Return the check of a file of weights against those of the workload's model."""
    try:
        saved = load_file(path)
    except SafetensorError as error:
        return Check(WEIGHTS, False, 0, f"{path.name}: {error}")
    own = {id(parameter) for parameter in trainable(workload.model)}
    named = [(name, each) for name, each in workload.model.named_parameters(remove_duplicate=True) if id(each) in own]
    lost = [name for name, _ in named if name not in saved]
    if lost:
        return Check(WEIGHTS, False, 0, f"{path.name}: {lost[0]}: missing")
    n, n_differ = 0, 0
    for name, parameter in named:
        again, recorded = parameter.detach(), saved[name]
        if again.shape != recorded.shape:
            return Check(WEIGHTS, False, n, f"{name}: shape {tuple(recorded.shape)}, recomputed {tuple(again.shape)}")
        differ = (again != recorded) & ~(again.isnan() & recorded.isnan())
        n, n_differ = n + again.numel(), n_differ + int(differ.sum())
        largest = float(torch.where(recorded.isfinite(), recorded, 0).abs().max())
        furthest = float((again - recorded)[differ].abs().max()) if differ.any() else 0.0
        if not furthest <= SAME * largest:
            return Check(WEIGHTS, False, n, f"{name}: differs by up to {furthest:.3g}, its largest is {largest:.3g}")
    return Check(WEIGHTS, True, n, f"{n_differ:,} of {n:,} differ by rounding" if n_differ else "bit by bit")
