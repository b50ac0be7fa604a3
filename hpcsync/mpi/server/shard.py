"""Shard of a server, and the commands that every server carries out in the same order on its shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpcsync.core.assignments import STOP, Assignment
from hpcsync.core.coordinator import AccumulateCommand, Command, GrantCommand, UpdateCommand
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.messages import CommandRecord, GrantRecord
from hpcsync.training.parameter_store import Store
from hpcsync.training.update_rules import Rule


def encode(commands: Sequence[Command]) -> list[CommandRecord]:
    """Return the records that every server carries out for the coordinator's commands; cancellations need none."""
    records: list[CommandRecord] = []
    contributing: set[int] = set()  # workers whose contribution a later update takes
    for command in reversed(commands):
        if isinstance(command, UpdateCommand):
            *others, (last, weight) = zip(command.workers, command.weights, strict=True)
            records.append(
                CommandRecord(messages.CommandKind.UPDATE, last, lr=command.lr, weight=weight, divisor=command.divisor)
            )
            records += [
                CommandRecord(messages.CommandKind.CONTRIBUTION, worker, weight=w) for worker, w in reversed(others)
            ]
            contributing.update(command.workers)
        elif isinstance(command, AccumulateCommand):
            records.append(CommandRecord(messages.CommandKind.ACCUMULATE, command.worker, weight=command.weight))
        elif isinstance(command, GrantCommand):
            kind = messages.CommandKind.RESERVE if command.worker in contributing else messages.CommandKind.PROMISE
            records.append(CommandRecord(kind, command.worker, command.iteration, command.version, *command.assignment))
    return records[::-1]


class Shard:
    """Store of server `link.comm.rank`, in its window.

    In a new run, every worker may read version 0 at once.

    Parameters
    ----------
    link
        Channel to the workers.
    rule
        Update rule.
    weights
        Initial flat weights of the whole model, shape (size,).
    first
        First assignment of every worker.
    save
        Writes `state` as this server's part of the checkpoint with the given number.
    state
        State to resume from (`state`); None for a new run.

    Attributes
    ----------
    store : Store
        The shard's weights.
    finished : bool
        Whether FINISH has been carried out.
    """

    def __init__(
        self,
        link: ServerChannel,
        rule: Rule,
        weights: torch.Tensor,
        first: Sequence[Assignment],
        save: Callable[[int], None] = lambda number: None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._link = link
        self._server = link.comm.rank
        mine = weights[link.shards[self._server]]
        row_size, slot_size = link.row_size(self._server), link.slot_size(self._server)
        local = link.tensors.local
        buffers, put = link.parts(local, self._server)
        self._buffer_spans = [(begin, begin + len(mine)) for begin in range(0, buffers.numel(), row_size)]
        self._slot_spans = [(begin, begin + slot_size) for begin in range(buffers.numel(), len(local), slot_size)]
        buffers[:, len(mine) :] = 0
        buffers[0, : len(mine)] = mine
        self._put = put.view(torch.uint8)  # contributions as sent, possibly compressed
        self._slots = put if link.compression is None else buffers.new_zeros(len(put), row_size)
        self._slots[:, len(mine) :] = 0
        self.store = Store(buffers, self._slots, link.done.local, rule, len(mine))
        self._save = save
        if state is not None:
            self.store.restore(state["store"])
            self._put.copy_(state["slots"])
            for begin, end in self._slot_spans:
                link.tensors.release(begin, end)
        self._release()
        self._contributors: list[int] = []
        self._weights: list[float] = []  # of the contributors
        self._reserved: dict[int, GrantRecord] = {}  # by worker: grants that the next update sends
        self._dead: set[int] = set()
        self._grants = link.outbox(messages.TAG_GRANT, messages.GRANT)
        self._evaluation = link.outbox(messages.TAG_EVALUATION, messages.GRANT)
        self.finished = False
        for worker, assignment in enumerate(first if state is None else ()):
            self.carry_out(CommandRecord(messages.CommandKind.PROMISE, worker, 1, 0, *assignment))

    def state(self) -> dict[str, Any]:
        """Return the server's state while every worker waits for an answer."""
        for begin, end in self._slot_spans:
            self._link.tensors.acquire(begin, end)
        return {"store": self.store.state(), "slots": self._put.clone()}

    def carry_out(self, command: CommandRecord) -> None:
        """Carry out one command.

        Raises
        ------
        RuntimeError
            If this shard's version is not server 0's.
        """
        if command.kind in (messages.CommandKind.CONTRIBUTION, messages.CommandKind.UPDATE):
            self._contributors.append(command.reader)
            self._weights.append(command.weight)
            if command.kind == messages.CommandKind.UPDATE:
                self._update(command)
        elif command.kind == messages.CommandKind.ACCUMULATE:
            self._acquire(command.reader)
            self.store.accumulate(command.reader, command.weight)
            cuda.ready(self._link.tensors.local)  # the next grant tells the worker that its slot is free
        elif command.kind in (messages.CommandKind.PROMISE, messages.CommandKind.RESERVE):
            if command.version != self.store.version:
                raise RuntimeError(
                    f"server {self._server}: version {self.store.version}: must be server 0's, {command.version}"
                )
            self._promise(command.reader, command)
        elif command.kind == messages.CommandKind.DISCARD:
            self._dead.add(command.reader)
            self._reserved.pop(command.reader, None)
            self.store.discard(command.reader)
        elif command.kind == messages.CommandKind.SAVE:
            self._save(command.version)
        else:
            for worker in set(range(self._link.roles.n_workers)) - self._dead:
                self._promise(worker, command)
            self.finished = True

    def _update(self, command: CommandRecord) -> None:
        for worker in self._contributors:
            self._acquire(worker)
        self._link.done.sync()
        self.store.apply(self._contributors, command.lr, self._weights, command.divisor)
        self._release()  # before any reader is granted this version
        self._contributors.clear()
        self._weights.clear()
        self._send_reserved()

    def _acquire(self, worker: int) -> None:
        """Make the worker's contribution visible to this server, and decode it."""
        link = self._link
        link.tensors.acquire(*self._slot_spans[worker])
        if link.compression is not None:
            shard = link.shards[self._server]
            link.compression.decode(self._put[worker], self._slots[worker, : shard.stop - shard.start], shard)

    def _promise(self, reader: int, command: CommandRecord) -> None:
        reserved = command.kind == messages.CommandKind.RESERVE
        buffer, serial = self.store.pin(reader, contributing=reserved)
        head = (self._server, command.iteration, self.store.version, buffer, serial)
        grant = GrantRecord(*head, *command.assignment)
        if reserved:
            self._reserved[reader] = grant
            return
        outbox = self._evaluation if reader == self._link.roles.evaluator else self._grants
        outbox.send(self._link.roles.rank_of(reader), grant)

    def let_save(self, worker: int, number: int) -> None:
        """Ask a worker that waits for a grant to save its part of the checkpoint."""
        record = GrantRecord(self._server, 0, number, 0, messages.NO_GRANT, *STOP)
        self._grants.send(self._link.roles.rank_of(worker), record)

    def _send_reserved(self) -> None:
        for worker, grant in self._reserved.items():
            self._grants.send(self._link.roles.rank_of(worker), grant)
        self._reserved.clear()

    def _release(self) -> None:
        """Make the current version visible to readers."""
        self._link.tensors.release(*self._buffer_spans[self.store.current])

    def free(self) -> None:
        """Wait until every grant has been sent."""
        self._grants.free()
        self._evaluation.free()


def follow(link: ServerChannel, shard: Shard) -> None:
    """Carry out commands until the last one; the main loop of every server but the first."""
    commands = link.inbox(messages.TAG_COMMAND, messages.COMMAND)
    while not shard.finished:
        shard.carry_out(CommandRecord._make(link.backoff.until(commands.poll)))
