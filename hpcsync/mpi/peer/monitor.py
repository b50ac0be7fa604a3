"""Beside rank 0's own training, where there are no servers: a thread that hears all reports and writes them down.

It is to the run what server 0 is elsewhere, except that nobody waits for it: it tells the workers to stop, looks after
the evaluation, and closes the trace when something fails. It alone touches the trace and the coordinator.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcsync.core.peer_coordinator import PeerCoordinator, StepInfo
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.rank0.checkpointing import Checkpointer, heed
from hpcsync.mpi.rank0.evaluator import Evaluator
from hpcsync.mpi.rank0.run_recorder import CHORES_S
from hpcsync.mpi.transport import cuda, messages, ulfm
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.planning.batch_allocation import Allocated
from hpcsync.system.signals import interrupt
from hpcsync.trace.schema import Change
from hpcsync.trace.writer import TraceWriter


class Monitor:
    """Runs from `start` to the end of the run, or until it fails.

    in_step:  whether rank 0's worker says when to evaluate; otherwise that follows from the reports.
    chores:   called with the time whenever no report waits; must be quick.
    received: gives the number of a signal that has come, or None.
    failed:   called in the thread with what went wrong; it ends the job.
    saver:    of checkpoints; None where the ranks have no folder in common.
    watch:    as `chores`, but not while workers have halted.
    dead:     to it those who have died are added.
    """

    def __init__(
        self,
        link: PeerChannel,
        coordinator: PeerCoordinator,
        evaluator: Evaluator | None,
        in_step: bool,
        chores: Callable[[float], None],
        received: Callable[[], int | None],
        failed: Callable[[BaseException], None],
        saver: Checkpointer | None = None,
        watch: Callable[[float], None] = lambda now_s: None,
        dead: set[int] | None = None,
    ) -> None:
        self._link = link
        self._coordinator = coordinator
        self._evaluator = evaluator
        self._chores = chores
        self._received = received
        self._failed = failed
        self._saver = saver
        self._watch = watch
        self._dead = set() if dead is None else dead
        self._halted: set[int] = set()  # workers that wait for what is to become of a checkpoint
        self._in_step = in_step
        self._infos = link.infos()
        self._commands = link.commands()
        self._backoff = link.patience_of_its_own()
        self._wishes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unsettled = set(coordinator.active)
        self._told = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="monitor")

    def start(self) -> None:
        self._thread.start()

    def evaluate(self, version: int, samples: int) -> None:
        """From rank 0's own worker, in step with all others: they have just published this version."""
        now_s = self._link.clock.now()
        self._wishes.put(lambda: self._begin(now_s, version, samples))

    def allocated(self, iteration: int, allocated: Sequence[Allocated]) -> None:
        """From rank 0's own worker: what all workers have agreed on after this iteration."""
        self._wishes.put(lambda: self._coordinator.allocated(self._link.clock.now(), iteration, allocated))

    def describe(self, trace: TraceWriter, attributes: Mapping[str, Any]) -> None:
        """From rank 0's own worker: what is known of the run when its loop begins."""
        self._wishes.put(lambda: trace.describe(attributes))

    def cannot_halt(self) -> None:
        """From rank 0's own worker, in step with all others: one of them has ended, and could not go on from here."""
        self._wishes.put(self._give_up)

    def join(self) -> None:
        """Until every rank is settled; the trace is then the caller's."""
        self._thread.join()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self, error: BaseException) -> None:
        """Rank 0 itself has failed."""

        def fail() -> None:
            raise error

        self._wishes.put(fail)

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
            while not self._wishes.empty():  # those that led to what is reported are there
                self._wishes.get()()
            now_s = self._link.clock.now()  # not before what is reported
            if record is not None:
                self._hear(now_s, record)
                self._backoff.reset()
            if record is None or now_s - chores_s >= CHORES_S:
                self._look_around(now_s)
                chores_s = now_s
            if record is None:
                self._bury(now_s)
                self._backoff.pause()
        if self._evaluator is not None:
            self._evaluator.close()
            self._take_result()
        self._commands.free()

    def _hear(self, now_s: float, record: tuple[Any, ...]) -> None:
        kind, exchanged = record[0], StepInfo._make(record[1:])
        if exchanged.worker in self._dead:
            return  # it was on its way when nothing of its came any more
        if kind == messages.StepInfoKind.STEPPED:
            self._coordinator.exchanged(now_s, exchanged)
        elif kind == messages.StepInfoKind.ENDED:
            self._left(now_s, exchanged.worker, Change.LEFT)
        elif kind == messages.StepInfoKind.SETTLED:
            self._unsettled.remove(exchanged.worker)
        elif kind == messages.StepInfoKind.HALTED:
            self._halted.add(exchanged.worker)
        elif kind == messages.StepInfoKind.SAVED:
            if self._saver is not None:  # else somebody has died meanwhile
                self._saver.saved(exchanged.worker)
        else:
            raise RankFailed(f"rank {exchanged.worker} failed")

    def _left(self, now_s: float, worker: int, change: int) -> None:
        self._coordinator.left(now_s, worker, change)
        if change == Change.DIED:
            self._tell(messages.PeerCommandKind.REMOVE, worker)
        if not self._coordinator.active:
            self._tell(messages.PeerCommandKind.ALL_ENDED)

    def _bury(self, now_s: float) -> None:
        """Go on without those who have died. What they have reported was heard before, and counts."""
        for worker in self._link.deaths.look():
            if worker in self._unsettled:
                self._unsettled.remove(worker)
                self._dead.add(worker)
                self._left(now_s, worker, Change.DIED)
                ulfm.tell(worker)

    def _look_around(self, now_s: float) -> None:
        if (number := self._received()) is not None:
            heed(self._saver, number, ending=self._coordinator.stopping)
        self._save(now_s)
        self._coordinator.passed(now_s)
        self._take_result()
        self._evaluate_if_due(now_s)
        if self._coordinator.stopping and not self._told:
            self._told = True
            self._tell(messages.PeerCommandKind.STOP)
        self._chores(now_s)
        if not self._halted:
            self._watch(now_s)

    # ---- checkpoints: of a moment at which no worker makes an iteration, and nothing is on its way ----

    def _save(self, now_s: float) -> None:
        """What is to be done next for one that is due."""
        saver, coordinator, n_workers = self._saver, self._coordinator, self._link.comm.size
        if saver is None:
            return
        if len(coordinator.active) < n_workers:
            self._give_up()
        elif not saver.holding:
            if not coordinator.stopping:
                saver.hold_if_due(now_s, coordinator.version)
                if saver.holding:
                    self._tell(messages.PeerCommandKind.HALT)
        elif saver.can_begin(()) and len(self._halted) == n_workers:
            self._tell(messages.PeerCommandKind.SAVE, saver.begin(range(n_workers)))
        elif saver.commit_if_complete():
            self._continue()

    def _continue(self) -> None:
        self._coordinator.continued(self._link.clock.now())
        self._halted.clear()
        self._tell(messages.PeerCommandKind.CONTINUE)

    def _give_up(self) -> None:
        """Somebody has ended: there are no checkpoints any more."""
        saver, self._saver = self._saver, None
        if saver is not None and saver.holding:
            self._continue()
        if saver is not None and saver.suspending and not self._coordinator.stopping:
            interrupt(signal.SIGTERM)

    # ---- evaluations ----

    def _evaluate_if_due(self, now_s: float) -> None:
        coordinator, evaluator = self._coordinator, self._evaluator
        if evaluator is not None and not self._in_step and evaluator.due(coordinator.samples):
            evaluator.begin(now_s, coordinator.version, coordinator.samples)

    def _begin(self, now_s: float, version: int, samples: int) -> None:
        if self._evaluator is not None and not self._evaluator.busy:
            self._evaluator.begin(now_s, version, samples)

    def _take_result(self) -> None:
        if self._evaluator is not None and (judged := self._evaluator.result()) is not None:
            self._coordinator.evaluated(*judged)

    def _tell(self, kind: int, number: int = 0) -> None:
        for rank in range(self._link.comm.size):
            self._commands.send(rank, (kind, number))
