"""Main loop of server 0: handle push infos, let the coordinator decide, command all servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hpcsync.core.coordinator import CancelCommand, Command, Coordinator
from hpcsync.mpi.rank0.checkpointing import Checkpointer, heed
from hpcsync.mpi.rank0.run_recorder import CHORES_S, RunRecorder
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.server.shard import Shard, encode, to
from hpcsync.mpi.transport import messages, ulfm
from hpcsync.mpi.transport.messages import CommandRecord, Inbox
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.paradigms.records import Grant, PushInfo
from hpcsync.system.signals import on_signals
from hpcsync.trace.schema import Change


class Leader:
    """Server 0, which decides for all servers.

    Parameters
    ----------
    link
        Channel to servers and workers.
    shard
        Server 0's own shard.
    recorder
        Records of the run, with its coordinator and its evaluator.
    saver
        Coordination of checkpoints; None if the ranks share no folder.
    about_to_evaluate
        Called before an evaluation of the current version begins. None: what is evaluated does not change between
        updates. Otherwise an evaluation begins only right after an update, or where the paradigm wants it.
    """

    def __init__(
        self,
        link: ServerChannel,
        shard: Shard,
        recorder: RunRecorder[Coordinator],
        saver: Checkpointer | None = None,
        about_to_evaluate: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._shard = shard
        self._recorder = recorder
        self._coordinator, self._evaluator = recorder.coordinator, recorder.evaluator
        self._saver = saver
        self._about_to_evaluate = about_to_evaluate
        self._seen = self._coordinator.version  # when an evaluation was last considered
        self._dead = shard.dead
        self._infos = link.inbox(messages.TAG_INFO, messages.PUSH_INFO)
        self._wanted = link.inbox(messages.TAG_SLOT, messages.SLOT) if link.lends else None
        self._norms = link.inbox(messages.TAG_NORM, messages.NORM) if link.roles.n_servers > 1 else None
        self._norm_parts: dict[int, dict[int, float]] = {}  # of updates: version -> server -> its part
        self._commands = link.outbox(messages.TAG_COMMAND, messages.COMMAND)
        self._cancellations = link.outbox(messages.TAG_CANCEL, messages.CANCEL)

    def serve(self) -> None:
        """Serve until every worker has left.

        Raises
        ------
        Interrupted
            If a signal ends the run; Suspended, if it can be resumed from a checkpoint.
        RankFailed
            If the run cannot be finished.
        """
        backoff = self._link.backoff
        backoff.reset()
        received: list[int] = []
        with on_signals(received.append):
            chores_s = 0.0
            n_present = self._link.comm.size - self._link.roles.n_servers
            for worker in range(n_present, self._link.roles.n_workers):  # absent since this start
                self._remove(worker)
            if self._coordinator.wants_evaluation:  # before the first push is handled
                self._evaluate_if_due(self._link.clock.now())
            while self._coordinator.active or self._shard.is_hiding:
                self._shard.poll()
                self._receive_norms()
                if self._wanted is not None and self._lend_slots(self._wanted):
                    backoff.reset()
                if received:
                    heed(self._saver, received.pop(0), ending=self._coordinator.stopping)
                now_s = self._link.clock.now()
                push_info = self._next_info(now_s)
                if push_info is not None:
                    now_s = self._link.clock.now()  # not earlier than it was sent: a worker waits at least `held_s`
                    self._handle(now_s, push_info)
                    backoff.reset()
                if push_info is None or now_s - chores_s >= CHORES_S:
                    self._do_chores(now_s)
                    chores_s = now_s
                if push_info is None:
                    self._remove_dead()
                    backoff.pause()
            while self._norm_parts:
                self._receive_norms()
                backoff.pause()

    def read(self, reader: Reader, into: torch.Tensor) -> None:
        """Read the current version into `into`, shape (size,), on behalf of the evaluator, which must be idle."""
        self._promise_evaluator()
        pieces = self._link.pieces(into)
        reader.wait(version=self._coordinator.version, into=pieces)
        reader.read(pieces)

    def finish(self) -> None:
        """Notify every rank that the run is over."""
        self._command([CommandRecord(messages.CommandKind.FINISH, to(0))])

    def _handle(self, now_s: float, record: tuple[Any, ...]) -> None:
        kind, push_info = record[0], PushInfo(now_s, *record[1:])
        if kind == messages.InfoKind.SAVED or (
            push_info.worker in self._dead
            and kind in (messages.InfoKind.PUSHED, messages.InfoKind.LEFT, messages.InfoKind.JOINED)
        ):
            return  # sent before the worker's death or the abandoned checkpoint was handled
        if kind == messages.InfoKind.PUSHED:
            self._carry_out(self._coordinator.pushed(now_s, push_info))
            if self._link.lends and self._coordinator.is_pending(push_info.worker):
                self._command([CommandRecord(messages.CommandKind.ARRIVED, to(push_info.worker))])
            if push_info.problem:
                self._recorder.look_at(push_info)
        elif kind == messages.InfoKind.RATE:
            self._recorder.rate_changed(now_s, push_info)
        elif kind == messages.InfoKind.LEFT:
            self._carry_out(self._coordinator.left(now_s, push_info.worker))
        elif kind == messages.InfoKind.JOINED:
            if push_info.worker in self._coordinator.active:
                return  # sent both before and after a checkpoint
            self._carry_out(self._coordinator.joined(now_s, push_info.worker))
        else:
            raise RankFailed(f"rank {push_info.worker} failed")
        self._evaluate_if_due(now_s)

    def _next_info(self, now_s: float) -> tuple[Any, ...] | None:
        """Return the next push info to handle now, if any.

        Those that a checkpoint deferred come first; later ones remain in the mailbox meanwhile.
        """
        saver = self._saver
        if saver is None:
            return self._infos.poll()
        if not (saver.holding or self._coordinator.stopping or self._newly_dead()):
            saver.hold_if_due(now_s, self._coordinator.version)
        if saver.holding:
            record = self._infos.poll()
            if record is not None and record[0] == messages.InfoKind.SAVED:
                saver.saved(record[1])
            elif record is not None and not saver.keeps_back(record):
                return record
            elif record is not None and self._link.lends and record[0] == messages.InfoKind.PUSHED:
                self._command([CommandRecord(messages.CommandKind.ARRIVED, to(record[1]))])
            self._save(saver)
            return None
        return saver.unheard.popleft() if saver.unheard else self._infos.poll()

    def _lend_slots(self, wanted: Inbox) -> bool:
        """Lend slots to workers that wait for them; return whether there were any."""
        pool, lent = self._shard.pool, False
        assert pool is not None
        while (request := wanted.poll()) is not None:
            if request[0] not in self._dead:
                pool.ask(*request)
        while (loan := pool.loan()) is not None:
            worker, slot = loan
            self._command([CommandRecord(messages.CommandKind.LEND, to(worker), buffer=slot)])
            lent = True
        return lent

    def _save(self, saver: Checkpointer) -> None:
        if saver.can_begin(self._coordinator.computing):
            roles = self._link.roles
            workers = sorted(set(range(self._link.comm.size - roles.n_servers)) - self._dead)
            number = saver.begin([*range(1, roles.n_servers), *map(roles.rank_of, workers)])
            for worker in workers:
                self._shard.let_save(worker, number)
            deferred = saver.deferred() - self._dead
            for worker in range(roles.n_workers):
                if worker in deferred or self._coordinator.is_pending(worker):
                    self._command([CommandRecord(messages.CommandKind.KEEP, to(worker))])
            self._command([CommandRecord(messages.CommandKind.SAVE, to(0, number))])
        if not self._norm_parts:  # the trace has the norms of all updates of the checkpoint
            saver.commit_if_complete()

    def _newly_dead(self) -> list[int]:
        """Return the workers that have died but still take part."""
        roles = self._link.roles
        return [worker for rank in self._link.deaths.look() if (worker := roles.worker(rank)) not in self._dead]

    def _remove_dead(self) -> None:
        """Continue without the workers that died. Their earlier push infos count, unless a checkpoint deferred them."""
        for worker in self._newly_dead():
            rank = self._link.roles.rank_of(worker)
            if self._saver is not None and self._saver.holding:
                self._saver.lost(rank)
            else:
                self._remove(worker)
                ulfm.tell(rank)

    def _remove(self, worker: int) -> None:
        self._command([CommandRecord(messages.CommandKind.DISCARD, to(worker))])
        if worker in self._coordinator.active:
            self._carry_out(self._coordinator.left(self._link.clock.now(), worker, Change.DIED))
            if not (self._coordinator.active or self._coordinator.stopping):
                raise RankFailed(f"rank {self._link.roles.rank_of(worker)} died, and no worker is left")

    def _do_chores(self, now_s: float) -> None:
        if self._saver is not None and self._saver.holding:
            self._recorder.chores(now_s, halted=True)
            return
        if commands := self._coordinator.passed(now_s):
            self._carry_out(commands)
            self._evaluate_if_due(now_s)
        if self._evaluator is not None and (judged := self._evaluator.result()) is not None:
            self._carry_out(self._coordinator.evaluated(*judged, known_s=self._link.clock.now()))
        if self._coordinator.wants_evaluation:
            self._evaluate_if_due(self._link.clock.now())
        self._recorder.chores(now_s, halted=False)

    def _evaluate_if_due(self, now_s: float) -> None:
        coordinator, evaluator = self._coordinator, self._evaluator
        updated, self._seen = coordinator.version > self._seen, coordinator.version
        wanted = coordinator.wants_evaluation
        if self._about_to_evaluate is not None and not (updated or wanted):
            return
        if evaluator is None or evaluator.busy or coordinator.stopping:
            return
        if wanted or evaluator.due(coordinator.samples):
            if self._about_to_evaluate is not None:
                self._about_to_evaluate()
            evaluator.begin(now_s, coordinator.version, coordinator.samples)
            self._promise_evaluator()

    def _promise_evaluator(self) -> None:
        grant = Grant(self._link.roles.evaluator, 0, self._coordinator.version)
        self._command([CommandRecord(messages.CommandKind.PROMISE, grant)])

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, CancelCommand):
                self._cancellations.send(self._link.roles.rank_of(command.worker), (command.version,))
        self._command(encode(commands))

    def _command(self, records: list[CommandRecord]) -> None:
        for record in records:
            for server in range(1, self._link.roles.n_servers):
                self._commands.send(server, record.fields())
            self._shard.carry_out(record)
            if record.kind == messages.CommandKind.UPDATE and not math.isnan(self._shard.gradient_sq):
                self._add_norm(self._shard.store.version, 0, self._shard.gradient_sq)

    def _receive_norms(self) -> None:
        while self._norms is not None and (record := self._norms.poll()) is not None:
            self._add_norm(*record)

    def _add_norm(self, version: int, server: int, gradient_sq: float) -> None:
        """Add a server's part of the squared norm of an update's gradient; record the sum once every part is there."""
        if self._norms is None:
            self._coordinator.updated(version, gradient_sq)
            return
        parts = self._norm_parts.setdefault(version, {})
        parts[server] = gradient_sq
        if len(parts) == self._link.roles.n_servers:
            self._coordinator.updated(version, sum(parts[server] for server in sorted(parts)))
            del self._norm_parts[version]
