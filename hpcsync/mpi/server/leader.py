"""Server 0's loop: hear reports, let the coordinator decide, have every server carry it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcsync.core.coordinator import CancelCommand, Command, Coordinator, PushInfo
from hpcsync.mpi.rank0.checkpointing import Checkpointer, heed
from hpcsync.mpi.rank0.evaluator import Evaluator
from hpcsync.mpi.rank0.run_recorder import CHORES_S
from hpcsync.mpi.server.channel import Reader, ServerChannel
from hpcsync.mpi.server.shard import Shard, encode
from hpcsync.mpi.transport import messages, ulfm
from hpcsync.mpi.transport.messages import CommandRecord
from hpcsync.mpi.transport.ulfm import RankFailed
from hpcsync.system.signals import on_signals
from hpcsync.trace.schema import Change


class Leader:
    """Decides for all servers. `chores` is called with the time whenever no report waits; it must be quick.

    saver: of checkpoints; None where the ranks have no folder in common. watch: as `chores`, but only while reports are
    heard as they come, and not kept back for a checkpoint.
    """

    def __init__(
        self,
        link: ServerChannel,
        shard: Shard,
        coordinator: Coordinator,
        evaluator: Evaluator | None,
        chores: Callable[[float], None],
        saver: Checkpointer | None = None,
        watch: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        self._link = link
        self._shard = shard
        self._coordinator = coordinator
        self._evaluator = evaluator
        self._chores = chores
        self._saver = saver
        self._watch = watch
        self._dead: set[int] = set()  # workers
        self._infos = link.inbox(messages.TAG_INFO, messages.PUSH_INFO)
        self._commands = link.outbox(messages.TAG_COMMAND, messages.COMMAND)
        self._cancellations = link.outbox(messages.TAG_CANCEL, messages.CANCEL)

    def serve(self) -> None:
        """Until every worker has left. Raises Interrupted (Suspended, if it can go on from a checkpoint) or RankFailed
        when the run cannot be finished."""
        backoff = self._link.backoff
        backoff.reset()
        received: list[int] = []
        with on_signals(received.append):
            chores_s = 0.0
            n_present = self._link.comm.size - self._link.roles.n_servers
            for worker in range(n_present, self._link.roles.n_workers):  # they have not come back with the others
                self._lose(self._link.clock.now(), worker)
            while self._coordinator.active:
                if received:
                    heed(self._saver, received.pop(0), ending=self._coordinator.stopping)
                now_s = self._link.clock.now()
                push_info = self._next_info(now_s)
                if push_info is not None:
                    self._hear(now_s, push_info)
                    backoff.reset()
                if push_info is None or now_s - chores_s >= CHORES_S:
                    self._look_around(now_s)
                    chores_s = now_s
                if push_info is None:
                    self._bury(now_s)
                    backoff.pause()

    def read(self, reader: Reader, into: torch.Tensor) -> None:
        """Read the current version, shape (size,), on behalf of the evaluator, which must be idle."""
        self._promise_evaluator()
        reader.read(reader.wait(version=self._coordinator.version), self._link.pieces(into))

    def finish(self) -> None:
        """Tell every rank that the run is over."""
        self._command([CommandRecord(messages.CommandKind.FINISH)])
        self._commands.free()
        self._cancellations.free()

    def _hear(self, now_s: float, record: tuple[Any, ...]) -> None:
        kind, push_info = record[0], PushInfo._make(record[1:])
        if kind == messages.InfoKind.SAVED or (
            kind in (messages.InfoKind.PUSHED, messages.InfoKind.LEFT, messages.InfoKind.JOINED)
            and push_info.worker in self._dead
        ):
            return  # it was on its way when nothing of its came any more
        if kind == messages.InfoKind.JOINED and push_info.worker in self._coordinator.active:
            return  # it has said so before and after a checkpoint
        if kind == messages.InfoKind.PUSHED:
            self._carry_out(self._coordinator.pushed(now_s, push_info))
        elif kind == messages.InfoKind.LEFT:
            self._carry_out(self._coordinator.left(now_s, push_info.worker))
        elif kind == messages.InfoKind.JOINED:
            self._carry_out(self._coordinator.joined(now_s, push_info.worker))
        else:
            raise RankFailed(f"rank {push_info.worker} failed")
        self._evaluate_if_due(now_s)

    def _next_info(self, now_s: float) -> tuple[Any, ...] | None:
        """To be heard now."""
        saver, record = self._saver, self._infos.poll()
        if saver is None:
            return record
        if not (saver.holding or self._coordinator.stopping or self._died()):
            saver.hold_if_due(now_s, self._coordinator.version)
        if saver.holding:
            if record is not None and record[0] == messages.InfoKind.SAVED:
                saver.saved(record[1])
            elif record is not None and not saver.keeps_back(record):
                return record
            self._save(saver)
            return None
        if saver.unheard:
            if record is not None:
                saver.unheard.append(record)
            return saver.unheard.popleft()
        return record

    def _save(self, saver: Checkpointer) -> None:
        if saver.can_begin(self._coordinator.computing):
            roles = self._link.roles
            workers = sorted(set(range(self._link.comm.size - roles.n_servers)) - self._dead)
            number = saver.begin([*range(1, roles.n_servers), *map(roles.rank_of, workers)])
            for worker in workers:
                self._shard.let_save(worker, number)
            self._command([CommandRecord(messages.CommandKind.SAVE, version=number)])
        saver.commit_if_complete()

    def _died(self) -> list[int]:
        """Workers that have died, and still take part."""
        roles = self._link.roles
        return [worker for rank in self._link.deaths.look() if (worker := roles.worker(rank)) not in self._dead]

    def _bury(self, now_s: float) -> None:
        """Go on without those who have died. What they have reported was heard before, and counts."""
        for worker in self._died():
            rank = self._link.roles.rank_of(worker)
            if self._saver is not None and self._saver.holding:
                self._saver.lost(rank)
            else:
                self._lose(now_s, worker)
                ulfm.tell(rank)

    def _lose(self, now_s: float, worker: int) -> None:
        self._dead.add(worker)
        self._command([CommandRecord(messages.CommandKind.DISCARD, worker)])
        if worker in self._coordinator.active:
            self._carry_out(self._coordinator.left(now_s, worker, Change.DIED))
            if not (self._coordinator.active or self._coordinator.stopping):
                raise RankFailed(f"rank {self._link.roles.rank_of(worker)} has died, and no worker is left")

    def _look_around(self, now_s: float) -> None:
        if self._saver is not None and self._saver.holding:
            self._chores(now_s)
            return
        self._carry_out(self._coordinator.passed(now_s))
        if self._evaluator is not None and (judged := self._evaluator.result()) is not None:
            self._carry_out(self._coordinator.evaluated(*judged))
        self._watch(now_s)
        self._chores(now_s)

    def _evaluate_if_due(self, now_s: float) -> None:
        coordinator, evaluator = self._coordinator, self._evaluator
        if evaluator is not None and not coordinator.stopping and evaluator.due(coordinator.samples):
            evaluator.begin(now_s, coordinator.version, coordinator.samples)
            self._promise_evaluator()

    def _promise_evaluator(self) -> None:
        reader = self._link.roles.evaluator
        self._command(
            [CommandRecord(messages.CommandKind.PROMISE, reader, version=self._coordinator.version, local_steps=1)]
        )

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, CancelCommand):
                self._cancellations.send(self._link.roles.rank_of(command.worker), (command.version,))
        if commands:
            self._command(encode(commands))

    def _command(self, records: list[CommandRecord]) -> None:
        for record in records:
            for server in range(1, self._link.roles.n_servers):
                self._commands.send(server, record)
            self._shard.carry_out(record)
