"""Rank 0 of a run without servers: a worker, and the monitor thread that keeps the run's records."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch

from hpcsync.config.job import Job
from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.mpi.collectives.model_parts import Read
from hpcsync.mpi.peer.monitor import Monitor
from hpcsync.mpi.peer.session import PeerSession
from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.session_base import FAREWELL_S, Given, end_all
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.system.signals import SignalListener, interrupt, on_signals
from hpcsync.trace.schema import Change
from hpcsync.training.buffers import Buffers


class Rank0Session(PeerSession):
    """A worker whose monitor records the run, evaluates, and decides when to stop."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        assert self._clocks is not None
        resumed = given.checkpoints.state(RUN)
        progressing = {} if self._progression is None else self._progression.attributes()
        self._recorder = recorder = RunRecorder(
            given,
            resumed,
            self._clocks,
            self._link.phases,
            {**given.placement.attributes(), **progressing},
            partial(PeerCoordinator, given.job),
            self._read,
        )
        self._signals = SignalListener()
        now_s = self._link.clock.now()
        if resumed is not None:
            recorder.coordinator.continued(now_s)
            if Job.from_toml(resumed["job"]).stop != given.job.stop:
                recorder.coordinator.reconsider(now_s)
            for worker in sorted(w for w in recorder.coordinator.active if w >= given.comm.size):
                recorder.coordinator.left(resumed["now_s"], worker, Change.DIED)
        self._monitor = monitor = Monitor(
            self._link,
            recorder,
            self._machine.method.synchronous,
            self._signals.received,
            self._end_job,
            recorder.saver(self._run_state, (), now_s, self._layers.dead),
            self._layers.dead,
        )
        lockstep = self._machine.lockstep
        self._exchange.on_published = lambda: monitor.evaluate(lockstep.updates, lockstep.samples)
        monitor.start()
        recorder.begin()

    def _run_state(self) -> dict[str, Any]:
        """Return the run's state for a checkpoint.

        Synchronous workers know themselves when an evaluation is due, unless one is in progress.
        """
        evaluator = self._recorder.evaluator
        evaluated = evaluator is not None and (evaluator.busy or not self._machine.method.synchronous)
        return self._recorder.state(self._link.clock.now(), evaluated=evaluated)

    def _read(self, version: int, into: torch.Tensor, buffers: Buffers) -> float | None:
        """Read the mean of all workers' published replicas for the evaluator; of this version if synchronous."""
        serial = 2 + version if self._machine.method.synchronous else None
        return self._layers.read(into, self._reading(self._link.comm.size, serial), buffers)

    def _reading(self, reader: int, serial: int | None = None) -> Read:
        """Return a function that reads a worker's published replica for this reader.

        It returns False, without waiting, if the replica is newer than `serial`.
        """
        published = self._link.published

        def read(worker: int, into: torch.Tensor, weight: torch.Tensor | None, buffers: torch.Tensor | None) -> bool:
            extra = None if buffers is None else buffers.view(into.dtype)
            while serial is not None and published.serial_of(worker, reader) < serial:
                time.sleep(1e-3)  # about to be published; at the end, if not before, a later one is published
            found = published.read(worker, into, reader, weight, extra)
            return serial is None or found == serial

        return read

    def _finish_training(self) -> None:
        """Evaluate the mean of the final weights while the other ranks wait."""
        assert self._monitor is not None
        self._monitor.join()
        self._signals.close()
        self._recorder.stop_showing()
        with on_signals(interrupt):
            self._recorder.trace.flush()
            distance = self._layers.complete(self.flat, self._reading(self.rank), self._buffers)
            if self._job.paradigm.one_model and distance > 0:
                print(
                    f"hpcsync: the workers' weights are {distance:.3g} apart at the end; where they train one model, a "
                    "script that changes it must do so alike on every worker",
                    file=sys.stderr,
                    flush=True,
                )
            self.flat.spread()
            self._recorder.judge(self._model, distance)

    def _conclude(self) -> None:
        self._recorder.conclude(self._model)

    def _end_job(self, error: BaseException) -> None:
        """End the job after a failure of the monitor; called in its thread."""
        self._recorder.fail(error)
        end_all(self._comm, error)

    def _fail(self, error: BaseException) -> None:
        if self._monitor is not None and self._monitor.running:
            self._monitor.end(error)  # it owns the trace and ends the job
            time.sleep(FAREWELL_S)
        else:
            self._recorder.fail(error)
