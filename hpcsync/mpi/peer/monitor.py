"""Monitor of a run without servers: a thread beside rank 0's training that receives and records all step infos.

It has the role of server 0, except that no worker blocks on it: it sends the stop, schedules evaluations and
checkpoints, and closes the trace on a failure. It alone uses the trace and the coordinator.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.rank0.checkpointing import Checkpointer, heed
from hpcsync.mpi.rank0.run_recorder import CHORES_S, RunRecorder
from hpcsync.mpi.transport import cuda, messages, ulfm
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.paradigms.records import StepInfo
from hpcsync.planning.batch_allocation import Allocated
from hpcsync.system.signals import interrupt
from hpcsync.trace.schema import Change


class Monitor:
    """Thread that runs from `start` to the end of the run, or until it fails.

    Parameters
    ----------
    link
        Channel of the run.
    recorder
        Records of the run, with its coordinator and its evaluator.
    in_step
        True if rank 0's worker requests evaluations (synchronous); otherwise they follow from the step infos.
    received
        Returns the number of a received signal, or None.
    failed
        Called in the thread with the exception on a failure; it ends the job.
    saver
        Checkpointer; None if the ranks share no folder.
    dead
        Set to which workers that have died are added.
    """

    def __init__(
        self,
        link: PeerChannel,
        recorder: RunRecorder[PeerCoordinator],
        in_step: bool,
        received: Callable[[], int | None],
        failed: Callable[[BaseException], None],
        saver: Checkpointer | None,
        dead: set[int],
    ) -> None:
        self._link = link
        self._recorder = recorder
        self._coordinator, self._evaluator = recorder.coordinator, recorder.evaluator
        self._received = received
        self._failed = failed
        self._saver = saver
        self._dead = dead
        self._halted: set[int] = set()  # workers that wait for the checkpoint to be written or abandoned
        self._in_step = in_step
        self._infos = link.infos()
        self._commands = link.commands()
        self._backoff = link.own_backoff()
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unsettled = set(self._coordinator.active)
        self._stop_sent = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="monitor")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def evaluate(self, version: int, samples: int) -> None:
        """Request an evaluation; called by rank 0's synchronous worker right after all have published this version."""
        now_s = self._link.clock.now()
        self._requests.put(lambda: self._begin(now_s, version, samples))

    def allocated(self, iteration: int, allocated: Sequence[Allocated]) -> None:
        """Record batch sizes that all workers agreed on after this iteration; called by rank 0's worker."""
        self._requests.put(lambda: self._coordinator.allocated(self._link.clock.now(), iteration, allocated))

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the trace; called by rank 0's worker when its loop begins."""
        self._requests.put(lambda: self._recorder.trace.describe(attributes))

    def cannot_halt(self) -> None:
        """Disable checkpoints; called by rank 0's synchronous worker if a worker has ended and cannot halt."""
        self._requests.put(self._disable_checkpoints)

    def join(self) -> None:
        """Wait until every rank has settled; afterwards the caller owns the trace."""
        self._thread.join()

    @property
    def running(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def end(self, error: BaseException) -> None:
        """End the run because rank 0 has failed with `error`."""

        def fail() -> None:
            raise error

        self._requests.put(fail)

    def _run(self) -> None:
        cuda.enter(self._link.transport.device)
        try:
            self._serve()
        except BaseException as error:
            self._failed(error)

    def _serve(self) -> None:
        chores_s = 0.0
        while self._unsettled:
            record = self._infos.poll()
            while not self._requests.empty():  # requests that precede this step info have already been queued
                self._requests.get()()
            now_s = self._link.clock.now()  # read after the step info, so not earlier than it
            if record is not None:
                self._handle_info(now_s, record)
                self._backoff.reset()
            if record is None or now_s - chores_s >= CHORES_S:
                self._periodic_tasks(now_s)
                chores_s = now_s
            if record is None:
                self._remove_dead()
                self._backoff.pause()
        if self._evaluator is not None:
            self._evaluator.close()
            self._take_result()

    def _handle_info(self, now_s: float, record: tuple[Any, ...]) -> None:
        kind, exchanged = record[0], StepInfo._make(record[1:])
        if exchanged.worker in self._dead:
            return  # its message was in transit when the worker was removed
        if kind == messages.StepInfoKind.STEPPED:
            self._coordinator.exchanged(now_s, exchanged)
            if exchanged.problem:
                self._recorder.look_at(exchanged)
        elif kind == messages.StepInfoKind.RATE:
            self._recorder.rate_changed(now_s, exchanged)
        elif kind == messages.StepInfoKind.ENDED:
            self._left(now_s, exchanged.worker, Change.LEFT)
        elif kind == messages.StepInfoKind.SETTLED:
            self._unsettled.remove(exchanged.worker)
        elif kind == messages.StepInfoKind.HALTED:
            self._halted.add(exchanged.worker)
        elif kind == messages.StepInfoKind.SAVED:
            if self._saver is not None:  # otherwise a worker has died in the meantime
                self._saver.saved(exchanged.worker)
        else:
            raise RankFailed(f"rank {exchanged.worker} failed")

    def _left(self, now_s: float, worker: int, change: int) -> None:
        self._coordinator.left(now_s, worker, change)
        if change == Change.DIED:
            self._broadcast(messages.PeerCommandKind.REMOVE, worker)
        if not self._coordinator.active:
            self._broadcast(messages.PeerCommandKind.ALL_ENDED)

    def _remove_dead(self) -> None:
        """Continue without workers that have died; the step infos that they sent count."""
        died = [worker for worker in self._link.deaths.look() if worker in self._unsettled]
        while died and (record := self._infos.poll()) is not None:  # they may have arrived since the last look
            self._handle_info(self._link.clock.now(), record)
        for worker in sorted(self._unsettled.intersection(died)):
            self._unsettled.remove(worker)
            self._dead.add(worker)
            self._left(self._link.clock.now(), worker, Change.DIED)
            ulfm.tell(worker)

    def _periodic_tasks(self, now_s: float) -> None:
        if (number := self._received()) is not None:
            heed(self._saver, number, ending=self._coordinator.stopping)
        self._save(now_s)
        self._coordinator.passed(now_s)
        self._take_result()
        self._evaluate_if_due(now_s)
        if self._coordinator.stopping and not self._stop_sent:
            self._stop_sent = True
            self._broadcast(messages.PeerCommandKind.STOP)
        self._recorder.chores(now_s, halted=bool(self._halted))

    # ---- checkpoints: taken while no worker iterates and nothing is in transit ----

    def _save(self, now_s: float) -> None:
        """Carry out the next step of a checkpoint that is due."""
        saver, coordinator, n_workers = self._saver, self._coordinator, self._link.comm.size
        if saver is None:
            return
        if len(coordinator.active) < n_workers:
            self._disable_checkpoints()
        elif not saver.holding:
            if not coordinator.stopping:
                saver.hold_if_due(now_s, coordinator.version)
                if saver.holding:
                    self._broadcast(messages.PeerCommandKind.HALT)
        elif saver.can_begin(()) and len(self._halted) == n_workers:
            self._broadcast(messages.PeerCommandKind.SAVE, saver.begin(range(n_workers)))
        elif saver.commit_if_complete():
            self._continue()

    def _continue(self) -> None:
        self._coordinator.continued(self._link.clock.now())
        self._halted.clear()
        self._broadcast(messages.PeerCommandKind.CONTINUE)

    def _disable_checkpoints(self) -> None:
        """Disable checkpoints because a worker has ended."""
        saver, self._saver = self._saver, None
        if saver is not None and saver.holding:
            self._continue()
        if saver is not None and saver.suspending and not self._coordinator.stopping:
            interrupt(signal.SIGTERM)

    # ---- evaluations ----

    def _evaluate_if_due(self, now_s: float) -> None:
        coordinator, evaluator = self._coordinator, self._evaluator
        if evaluator is None or self._in_step or coordinator.stopping:
            return
        if evaluator.due(coordinator.samples):
            evaluator.begin(now_s, coordinator.version, coordinator.samples)

    def _begin(self, now_s: float, version: int, samples: int) -> None:
        if self._evaluator is not None and not self._evaluator.busy and not self._coordinator.stopping:
            self._evaluator.begin(now_s, version, samples)

    def _take_result(self) -> None:
        if self._evaluator is not None and (evaluation := self._evaluator.result()) is not None:
            self._coordinator.evaluated(*evaluation)

    def _broadcast(self, kind: int, number: int = 0) -> None:
        for rank in range(self._link.comm.size):
            self._commands.send(rank, (kind, number))
