"""Rank 0's part in a run without servers: a worker's, and the books, which a thread beside its training keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.mpi.collectives.model_parts import Read
from hpcsync.mpi.peer.monitor import Monitor
from hpcsync.mpi.peer.session import PeerSession
from hpcsync.mpi.rank0.run_recorder import RunRecorder
from hpcsync.mpi.session_base import FAREWELL_S, Given, end_all
from hpcsync.planning.batch_allocation import Allocated
from hpcsync.run_dir.checkpoint import RUN
from hpcsync.system.signals import SignalListener, interrupt, on_signals
from hpcsync.trace.schema import Change


class Rank0Session(PeerSession):
    """Rank 0: a worker as all others; its monitor writes everything down, evaluates, and says when to stop."""

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
            for worker in sorted(w for w in recorder.coordinator.active if w >= given.comm.size):
                recorder.coordinator.left(resumed["now_s"], worker, Change.DIED)
        self._monitor = Monitor(
            self._link,
            recorder.coordinator,
            recorder.evaluator,
            self._in_step,
            recorder.chores,
            self._signals.received,
            self._end_job,
            recorder.saver(self._run_state, (), now_s),
            recorder.watch.look,
            self._layers.dead,
        )
        self._monitor.start()
        recorder.begin()

    def _run_state(self) -> dict[str, Any]:
        """Those in step know themselves when an evaluation is due, unless one is under way."""
        evaluator = self._recorder.evaluator
        evaluated = evaluator is not None and (evaluator.busy or not self._exchange.in_step)
        return self._recorder.state(self._link.clock.now(), evaluated=evaluated)

    def _cannot_halt(self) -> None:
        self._monitor.cannot_halt()

    def _describe(self, attributes: Mapping[str, int]) -> None:
        self._monitor.describe(self._recorder.trace, attributes)

    def _shown(self) -> None:
        self._monitor.evaluate(self._lockstep.updates, self._lockstep.samples)

    def _allocated(self, allocated: Sequence[Allocated]) -> None:
        self._monitor.allocated(self._iteration, allocated)

    def _read(self, version: int, into: torch.Tensor) -> float | None:
        """For the evaluator: the mean of what all workers show; in step, of this version."""
        serial = 2 + version if self._exchange.in_step else None
        return self._layers.read(into, self._reading(self._link.comm.size, serial))

    def _reading(self, reader: int, serial: int | None = None) -> Read:
        """How this reader sees what a worker shows; it cannot where that is a later one than `serial`."""

        def read(worker: int, into: torch.Tensor, weight: torch.Tensor | None) -> bool:
            while (found := self._link.published.read(worker, into, reader, weight)) != (serial or found):
                if found > (serial or 0):
                    return False
                time.sleep(1e-3)  # it is about to come there; at the end, if not before, it shows a later one
            return True

        return read

    def _finish_training(self) -> None:
        """While the others wait patiently: evaluate the mean of the final weights."""
        self._monitor.join()
        self._signals.close()
        self._recorder.stop_showing()
        with on_signals(interrupt):
            self._recorder.trace.flush()
            distance = self._layers.complete(self.flat, self._reading(self.rank))
            self._recorder.judge(self._model, distance)

    def _conclude(self) -> None:
        self._recorder.conclude(self._model)

    def _end_job(self, error: BaseException) -> None:
        """The monitor has failed: its thread ends everything."""
        self._recorder.fail(error)
        end_all(self._comm, error)

    def _fail(self, error: BaseException) -> None:
        if self._monitor.running:
            self._monitor.end(error)  # it has the trace, and ends the job
            time.sleep(FAREWELL_S)
        else:
            self._recorder.fail(error)
