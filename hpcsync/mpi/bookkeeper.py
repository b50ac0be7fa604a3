"""Rank 0's part in a run without servers: a worker's, and the books, which a thread beside its training keeps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcsync import outputs
from hpcsync.checkpoints import RUN
from hpcsync.mpi.evaluator import Evaluator
from hpcsync.mpi.layers import Read
from hpcsync.mpi.monitor import Monitor
from hpcsync.mpi.peer_session import PeerSession
from hpcsync.mpi.rank_session import FAREWELL_S, Given, begin_trace, close_failed, end_all, run_state
from hpcsync.mpi.saver import Saver
from hpcsync.mpi.watch import Watch
from hpcsync.peers import PeerCoordinator
from hpcsync.planning.batches import Allocated
from hpcsync.progress import Progress, console
from hpcsync.signals import SignalListener, interrupt, on_signals
from hpcsync.traces.schema import DIED


class BookkeeperSession(PeerSession):
    """Rank 0: a worker as all others; its monitor writes everything down, evaluates, and says when to stop."""

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        job, checkpoints, evaluate = given.job, given.checkpoints, given.evaluate
        assert self._clocks is not None
        self._evaluate = evaluate
        progressing = {} if self._progression is None else self._progression.attributes()
        measured, resumed = {**given.placement.attributes(), **progressing}, checkpoints.state(RUN)
        self._trace = begin_trace(job, checkpoints.folder, self._clocks, measured, resumed)
        self._coordinator = PeerCoordinator(job, self._trace)
        self._console = console()
        self._progress = Progress(self._console)
        places = [(rank, host) for rank, host, *_ in self._clocks]
        self._watch = Watch(self._coordinator, self._link.phases, self._trace, places, job.paradigm.bound)
        self._signals = SignalListener()
        self._evaluator = (
            Evaluator(self._read, given.model, evaluate, job.evaluation.every_samples) if evaluate else None
        )
        now_s = self._link.clock.now()
        if resumed is not None:
            self._coordinator.restore(resumed["coordinator"])
            self._coordinator.goes_on(now_s)
            for worker in sorted(w for w in self._coordinator.active if w >= given.comm.size):
                self._coordinator.left(resumed["now_s"], worker, DIED)
            if self._evaluator is not None and resumed["evaluated"] is not None:
                self._evaluator.go_on(resumed["evaluated"])
        saver = None
        if checkpoints.shared:
            saver = Saver(checkpoints, job.checkpoint, self._run_state, (), now_s, self._coordinator.version)
        self._monitor = Monitor(
            self._link, self._coordinator, self._evaluator, self._in_step, self._chores, self._signals.received,
            self._end_job, saver, self._watch.look, self._layers.dead,
        )  # fmt: skip
        self._monitor.start()

    def _run_state(self) -> dict[str, Any]:
        """What rank 0 knows of the run. evaluated: when an evaluation is due, were the one under way never judged; None
        where those in step know it."""
        evaluated = None
        if self._evaluator is not None and (self._evaluator.busy or not self._exchange.in_step):
            evaluated = self._evaluator.state()
        return run_state(self._job, self._trace, self._link.clock.now(), self._coordinator, evaluated=evaluated)

    def _cannot_halt(self) -> None:
        self._monitor.cannot_halt()

    def _chores(self, now_s: float) -> None:
        self._trace.flush_if_due(now_s)
        self._progress.show(now_s, self._coordinator)

    def _describe(self, attributes: Mapping[str, int]) -> None:
        self._monitor.describe(self._trace, attributes)

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
            while (found := self._link.exposure.read(worker, into, reader, weight)) != (serial or found):
                if found > (serial or 0):
                    return False
                time.sleep(1e-3)  # it is about to come there; at the end, if not before, it shows a later one
            return True

        return read

    def _finish_training(self) -> None:
        """While the others wait patiently: evaluate the mean of the final weights, which is safe before that."""
        self._monitor.join()
        self._signals.close()
        self._progress.close()
        with on_signals(interrupt):
            self._trace.flush()
            distance = self._layers.complete(self.flat, self._reading(self.rank))
            if self._evaluate is not None:
                outputs.save_weights(self._checkpoints.folder, self._model)
                coordinator = self._coordinator
                judged = (*self._evaluate(self._model), distance)
                coordinator.evaluated(coordinator.updated_s, coordinator.version, coordinator.samples, *judged)

    def _conclude(self) -> None:
        if self._evaluate is None:
            outputs.save_weights(self._checkpoints.folder, self._model)
        self._trace.close("finished")
        outputs.conclude(self._checkpoints.folder, self._console)

    def _end_job(self, error: BaseException) -> None:
        """The monitor has failed: its thread ends everything."""
        self._checkpoints.abandon()
        close_failed(self._trace, error)
        end_all(self._comm, error)

    def _fail(self, error: BaseException) -> None:
        if self._monitor.running:
            self._monitor.end(error)  # it has the trace, and ends the job
            time.sleep(FAREWELL_S)
        else:
            close_failed(self._trace, error)
