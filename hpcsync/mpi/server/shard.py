"""A server's part of an order: the same on every server, so that shards never differ in what they have seen."""

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
    """The coordinator's orders as the records that every server carries out; others are none."""
    records: list[CommandRecord] = []
    contributing: set[int] = set()  # to an update that comes later
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
    """Server `link.comm.rank`'s store in its window. Every worker may at once read version 0, unless the run goes on.

    first: every worker's first assignment.
    save: writes `state` as this server's part of a checkpoint with this number.
    state: where the run goes on: what the server wrote then.
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
        self._put = put.view(torch.uint8)  # as it lies there
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
        self._weights: list[float] = []  # theirs
        self._reserved: dict[int, GrantRecord] = {}  # workers, and grants that wait for an update
        self._dead: set[int] = set()
        self._grants = link.outbox(messages.TAG_GRANT, messages.GRANT)
        self._evaluation = link.outbox(messages.TAG_EVALUATION, messages.GRANT)
        self.finished = False
        for worker, assignment in enumerate(first if state is None else ()):
            self.carry_out(CommandRecord(messages.CommandKind.PROMISE, worker, 1, 0, *assignment))

    def state(self) -> dict[str, Any]:
        """All that this server has, while every worker waits for an answer."""
        for begin, end in self._slot_spans:
            self._link.tensors.acquire(begin, end)
        return {"store": self.store.state(), "slots": self._put.clone()}

    def carry_out(self, command: CommandRecord) -> None:
        """Do what one record says. Raises RuntimeError when this shard has not seen what server 0 has seen."""
        if command.kind in (messages.CommandKind.CONTRIBUTION, messages.CommandKind.UPDATE):
            self._contributors.append(command.reader)
            self._weights.append(command.weight)
            if command.kind == messages.CommandKind.UPDATE:
                self._update(command)
        elif command.kind == messages.CommandKind.ACCUMULATE:
            self._acquire(command.reader)
            self.store.accumulate(command.reader, command.weight)
            cuda.ready(self._link.tensors.local)  # the next that its worker hears is that its slot is free
        elif command.kind in (messages.CommandKind.PROMISE, messages.CommandKind.RESERVE):
            if command.version != self.store.version:
                raise RuntimeError(f"server {self._server} is at {self.store.version}, not at {command.version}")
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
        self._release()  # before any reader hears that it may read
        self._contributors.clear()
        self._weights.clear()
        self._send_reserved()

    def _acquire(self, worker: int) -> None:
        """Let this server see the worker's contribution."""
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
        """Have a worker write its part of the checkpoint; it waits for a grant."""
        record = GrantRecord(self._server, 0, number, 0, messages.NO_GRANT, *STOP)
        self._grants.send(self._link.roles.rank_of(worker), record)

    def _send_reserved(self) -> None:
        for worker, grant in self._reserved.items():
            self._grants.send(self._link.roles.rank_of(worker), grant)
        self._reserved.clear()

    def _release(self) -> None:
        """Let readers see the current version."""
        self._link.tensors.release(*self._buffer_spans[self.store.current])

    def free(self) -> None:
        """Wait until every grant has left; give up the views of the window."""
        self._grants.free()
        self._evaluation.free()


def follow(link: ServerChannel, shard: Shard) -> None:
    """The loop of every server but the first: carry out orders until the last one."""
    commands = link.inbox(messages.TAG_COMMAND, messages.COMMAND)
    while not shard.finished:
        shard.carry_out(CommandRecord._make(link.backoff.until(commands.poll)))
