"""Run records on rank 0: trace, evaluations, checkpoints, and the outputs at the end of the run."""

from __future__ import annotations

import contextlib
import copy
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.config.errors import JobError, below
from hpcsync.config.job import Job, Script
from hpcsync.config.user_code import of_user
from hpcsync.core.assignments import decision_fields
from hpcsync.core.coordinator import Coordinator
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.core.step_problems import ProblemReport, unequal_steps
from hpcsync.mpi.rank0.checkpointing import Checkpointer
from hpcsync.mpi.rank0.evaluator import Evaluator, Read
from hpcsync.mpi.rank0.straggler_report import StragglerReport
from hpcsync.mpi.session_base import Given
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.mpi.transport.worker_state import WorkerStates
from hpcsync.paradigms.records import PushInfo, StepInfo
from hpcsync.run_dir import layout, lock, unfinished
from hpcsync.run_dir.progress_line import Progress, console, say
from hpcsync.run_dir.scalar_log import ScalarLog
from hpcsync.run_dir.status_file import StatusWriter
from hpcsync.system import rank_environment
from hpcsync.system.atomic_files import NotWritten
from hpcsync.system.launch_output import print_at_once
from hpcsync.system.signals import Interrupted, Suspended, tell_listening
from hpcsync.trace.provenance import provenance
from hpcsync.trace.writer import TraceWriter
from hpcsync.training.flat_model import FlatModel
from hpcsync.workloads.registry import aimed, evaluated

C = TypeVar("C", Coordinator, PeerCoordinator)
Clocks = list[tuple[int, str, float, float]]

CHORES_S = 0.1  # while messages keep arriving, rank 0 postpones all other work for at most this long


class RunRecorder(Generic[C]):
    """Records of one run, from its beginning or from a checkpoint on.

    Parameters
    ----------
    given
        The rank's model, job and outputs.
    resumed
        State at the checkpoint from which the run is resumed (`state`); None for a new run.
    clocks
        Rows of the trace's /clocks for all ranks.
    phases
        Activities of the workers.
    measured
        Root attributes of the trace that were determined on these ranks.
    decides
        Creates the coordinator, which writes into the trace.
    read
        As for `Evaluator`.
    """

    def __init__(
        self,
        given: Given,
        resumed: Mapping[str, Any] | None,
        clocks: Clocks,
        phases: WorkerStates,
        measured: Mapping[str, Any],
        decides: Callable[[TraceWriter], C],
        read: Read,
    ) -> None:
        job = given.job
        self._given = given
        self.trace = _begin_trace(job, given.checkpoints.folder / layout.TRACE, clocks, measured, resumed)
        self.coordinator: C = decides(self.trace)
        self.evaluator = (
            Evaluator(
                read,
                _copy_of(given),
                aimed(
                    given.evaluate,
                    job.stop.target_accuracy,
                    has_accuracy=resumed is not None and resumed["trace_rows"]["evaluations"] > 0,
                ),
                job.evaluation.every_samples,
                job.evaluation.buffers,
                given.calibrate,
            )
            if given.evaluate is not None and (job.evaluation.every_samples or job.paradigm.requests_evaluations)
            else None
        )
        self.look_at = ProblemReport(job.stop.on_nan).see  # for an info with a problem; may end the run
        self._console = console()
        self._progress = None if rank_environment.is_viewed() else Progress(self._console, job.stop)
        places = [(rank, host) for rank, host, *_ in clocks[job.cluster.servers :]]
        self._stragglers = StragglerReport(self.coordinator, phases, self.trace, places, job.paradigm.bound)
        hosts = [host for _, host in places]
        folder = given.checkpoints.folder
        self._status = StatusWriter(folder, job, self.coordinator, hosts, lambda: self._stragglers.seen()[1])
        self._log = None if given.log is None else ScalarLog(given.log, folder, job)
        self.trace.observer = self._observe
        if resumed is not None:
            with contextlib.suppress(ValueError, IndexError):  # of a damaged row, which the audit finds
                for table, rows in self.trace.written():
                    self._status.tally.add(table, rows)
            self.coordinator.restore(resumed["coordinator"])
            if self.evaluator is not None and resumed["evaluated"] is not None:
                self.evaluator.resume(resumed["evaluated"], self.coordinator.samples)

    def _observe(self, table: str, rows: np.ndarray) -> None:
        self._status.tally.add(table, rows)
        if self._log is not None:
            self._log.add(table, rows)

    def _close(self, status: str, watched: str | None = None) -> None:
        """Close the log, and the status that is watched, which is the same unless given."""
        self._status.close(watched or status)
        if self._log is not None:
            self._log.close(status)

    def saver(
        self, state: Callable[[], Mapping[str, Any]], unheard: Iterable[Any], now_s: float, dead: Collection[int]
    ) -> Checkpointer | None:
        """Return the coordination of checkpoints from now on; None if the ranks share no folder."""
        checkpoints, settings = self._given.checkpoints, self._given.job.checkpoint
        if not checkpoints.shared:
            return None
        return Checkpointer(checkpoints, settings, state, unheard, now_s, self.coordinator.version, dead)

    def state(self, now_s: float, *, evaluated: bool = True) -> dict[str, Any]:
        """Return rank 0's state of the run for a checkpoint.

        Parameters
        ----------
        now_s
            Time of the checkpoint, in seconds.
        evaluated
            Whether to include when the next evaluation is due.
        """
        self.trace.sync()
        flushed = self.trace.flushed()
        return {
            "job": self._given.job.to_toml(),
            "now_s": now_s,
            "starts": flushed["starts"],
            "trace_rows": flushed,
            "coordinator": self.coordinator.state(),
            "evaluated": self.evaluator.state() if self.evaluator is not None and evaluated else None,
        }

    def begin(self) -> None:
        """Announce that training begins and that rank 0 handles signals from now on."""
        say("training")
        tell_listening(self._given.checkpoints.folder)

    def chores(self, now_s: float, *, halted: bool) -> None:
        """Do quick work between decisions: report stragglers, flush the trace and show the progress.

        While workers are `halted` for a checkpoint, none is a straggler.
        """
        if not halted:
            self._stragglers.look(now_s)
        self.trace.flush_if_due(now_s)
        self._status.offer(now_s)
        if self._progress is not None:
            self._progress.show(now_s, self.coordinator)

    def rate_changed(self, now_s: float, info: PushInfo | StepInfo) -> None:
        """Record that a parameter group has another learning rate (`messages.rate_change`)."""
        self.trace.append("rates", (now_s, info.worker, info.iteration, info.batch_size, info.lr))

    def stop_showing(self) -> None:
        """Close the progress line at the end of training."""
        if self._progress is not None:
            self._progress.close()

    def judge(self, model: torch.nn.Module, distance: float) -> None:
        """Save and evaluate the final model, if there is an evaluation, while other ranks still wait.

        Its statistics are recomputed first, if the job wants that.

        Parameters
        ----------
        model
            Model with the final weights and the workers' buffers.
        distance
            Consensus distance of the replicas.
        """
        if self._given.calibrate is not None:
            self._given.calibrate(model)
        if self._given.evaluate is None:
            return
        self._save(model)
        loss, accuracy = evaluated(self._given.evaluate, model)
        coordinator = self.coordinator
        coordinator.evaluated(coordinator.updated_s, coordinator.version, coordinator.samples, loss, accuracy, distance)

    def conclude(self, model: torch.nn.Module) -> None:
        """Close the trace and finish the outputs. Without an evaluation the weights are saved only now."""
        if self._given.evaluate is None:
            self._save(model)
        coordinator = self.coordinator
        if not coordinator.stopping and (line := unequal_steps(self._given.job, coordinator.done)):
            print(f"hpcsync: {line}", file=sys.stderr, flush=True)
        self._given.checkpoints.abandon()  # a worker may have died during the last one
        self.trace.close("finished")
        layout.conclude(self._given.checkpoints.folder, self._console)
        self._close("finished")
        lock.release(self._given.checkpoints.folder)

    def fail(self, error: BaseException) -> None:
        """Close the records of a run that cannot be finished, and print why."""
        self._given.checkpoints.abandon()
        error = of_user(self._given.job, error)
        status = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError, RuntimeError):
            self.trace.close(status)
        may_restart = self._given.job.cluster.on_death == "restart" and not isinstance(error, Suspended)
        self._close(status, "running" if may_restart else status)  # `hpcsync run` knows whether a death was the cause
        if isinstance(error, Suspended):
            is_script = isinstance(self._given.job.workload, Script)
            how = unfinished.resumption(self._given.checkpoints.folder, is_script=is_script)
            print_at_once(f"hpcsync: interrupted; use {how} to resume from {error}")
        elif isinstance(error, Interrupted | RankFailed | NotWritten | JobError):
            trace = layout.shown(self.trace.path)
            print_at_once(f"hpcsync: {status}: {error}; the trace so far is {trace}{below(error)}")
        elif not isinstance(error, KeyboardInterrupt):
            print_at_once("".join(traceback.format_exception(error)))
        sys.stdout.flush()
        lock.release(self._given.checkpoints.folder)

    def _save(self, model: torch.nn.Module) -> None:
        layout.save_weights(self._given.checkpoints.folder, model)


def _copy_of(given: Given) -> FlatModel:
    # Attributes that the forward pass computes anew, as `torch.nn.utils.prune` has them, cannot be copied otherwise.
    attributes = [value for module in given.model.modules() for value in vars(module).values()]
    computed = [value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf]
    model = copy.deepcopy(given.model, {id(value): value.detach().clone() for value in computed})
    return FlatModel(model, given.parameters(model))


def _begin_trace(
    job: Job, path: Path, clocks: Clocks, measured: Mapping[str, Any], resumed: Mapping[str, Any] | None
) -> TraceWriter:
    library = MPI.Get_library_version().strip("\0 \n")
    attributes = provenance(job, engine="mpi", mpi_library=library, hosts=[host for _, host, _, _ in clocks])
    n_rows, start, now_s, seq = None, 0, 0.0, 0
    if resumed is not None:
        n_rows, start, now_s = resumed["trace_rows"], resumed["starts"], resumed["now_s"]
        seq = resumed["coordinator"]["seq"]
    trace = TraceWriter(path, {**attributes, **measured}, decision_fields(job), n_rows)
    trace.append("starts", (start, now_s, seq, attributes["created"], rank_environment.batch_job()))
    for row in clocks:
        trace.append("clocks", (start, *row))
    trace.flush()
    return trace
