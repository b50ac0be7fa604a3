"""Shard of a server, and the commands that every server carries out in the same order on its shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpcsync.core.coordinator import AccumulateCommand, Command, UpdateCommand
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.messages import CommandRecord
from hpcsync.paradigms import Grant
from hpcsync.state import restore_arrays
from hpcsync.training.parameter_store import Store
from hpcsync.training.update_rules import Rule


def encode(commands: Sequence[Command]) -> list[CommandRecord]:
    """Return the records that every server carries out for the coordinator's commands; cancellations need none."""
    records: list[CommandRecord] = []
    contributing: set[int] = set()  # workers whose contribution a later update takes
    for command in reversed(commands):
        if isinstance(command, UpdateCommand):
            *others, (last, weight) = zip(command.workers, command.weights, strict=True)
            update = (command.lr, weight, command.divisor, command.momentum)
            records.append(CommandRecord(messages.CommandKind.UPDATE, to(last), *update))
            records += [
                CommandRecord(messages.CommandKind.CONTRIBUTION, to(worker), weight=w) for worker, w in reversed(others)
            ]
            contributing.update(command.workers)
        elif isinstance(command, AccumulateCommand):
            records.append(CommandRecord(messages.CommandKind.ACCUMULATE, to(command.worker), weight=command.weight))
        elif isinstance(command, Grant):
            kind = messages.CommandKind.RESERVE if command.worker in contributing else messages.CommandKind.PROMISE
            records.append(CommandRecord(kind, command))
    return records[::-1]


def to(worker: int, version: int = 0) -> Grant:
    """Return the grant of a command that names only a worker, or the number of a checkpoint: it grants nothing."""
    return Grant(worker, 0, version, local_steps=0)


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
        Grant of the first iteration of every worker.
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
        first: Sequence[Grant],
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
        stated = None if link.stated is None else link.stated.local.reshape(-1, link.n_stated)
        self.store = Store(buffers, self._slots, link.done.local, rule, len(mine), stated)
        self._save = save
        if state is not None:
            self.store.restore(state["store"])
            restore_arrays({"slots": self._put}, {"slots": state["slots"]})
            if stated is not None:
                stated[:] = state["stated"]
            for begin, end in self._slot_spans:
                link.tensors.release(begin, end)
        self._release()
        self._contributors: list[int] = []
        self._weights: list[float] = []  # of the contributors
        self._reserved: dict[int, CommandRecord] = {}  # by worker: grants that the next update sends
        self._dead: set[int] = set()
        self._grants = link.outbox(messages.TAG_GRANT, messages.COMMAND)
        self._evaluation = link.outbox(messages.TAG_EVALUATION, messages.COMMAND)
        self.finished = False
        for grant in first if state is None else ():
            self.carry_out(CommandRecord(messages.CommandKind.PROMISE, grant))

    def state(self) -> dict[str, Any]:
        """Return the server's state while every worker waits for an answer."""
        for begin, end in self._slot_spans:
            self._link.tensors.acquire(begin, end)
        stated = [] if self._link.stated is None else self._link.stated.local.reshape(-1, self._link.n_stated).tolist()
        return {"store": self.store.state(), "slots": self._put.clone(), "stated": stated}

    def carry_out(self, command: CommandRecord) -> None:
        """Carry out one command.

        Raises
        ------
        RuntimeError
            If this shard's version is not server 0's.
        """
        worker = command.grant.worker
        if command.kind in (messages.CommandKind.CONTRIBUTION, messages.CommandKind.UPDATE):
            self._contributors.append(worker)
            self._weights.append(command.weight)
            if command.kind == messages.CommandKind.UPDATE:
                self._update(command)
        elif command.kind == messages.CommandKind.ACCUMULATE:
            self._acquire(worker)
            self.store.accumulate(worker, command.weight)
            cuda.ready(self._link.tensors.local)  # the next grant tells the worker that its slot is free
        elif command.kind in (messages.CommandKind.PROMISE, messages.CommandKind.RESERVE):
            if command.grant.version != self.store.version:
                raise RuntimeError(
                    f"server {self._server}: version {self.store.version}: must be server 0's, {command.grant.version}"
                )
            self._promise(command.grant, reserved=command.kind == messages.CommandKind.RESERVE)
        elif command.kind == messages.CommandKind.DISCARD:
            self._dead.add(worker)
            self._reserved.pop(worker, None)
            self.store.discard(worker)
        elif command.kind == messages.CommandKind.SAVE:
            self._save(command.grant.version)
        else:
            for worker in set(range(self._link.roles.n_workers)) - self._dead:
                self._promise(command.grant._replace(worker=worker, version=self.store.version))
            self.finished = True

    def _update(self, command: CommandRecord) -> None:
        for worker in self._contributors:
            self._acquire(worker)
        self._link.done.sync()
        self.store.apply(self._contributors, command.lr, self._weights, command.divisor, command.momentum)
        self._release()  # before any reader is granted this version
        self._contributors.clear()
        self._weights.clear()
        self._send_reserved()

    def _acquire(self, worker: int) -> None:
        """Make the worker's contribution visible to this server, and decode it."""
        link = self._link
        link.tensors.acquire(*self._slot_spans[worker])
        if link.stated is not None:
            link.stated.sync()
        if link.compression is not None:
            shard = link.shards[self._server]
            link.compression.decode(self._put[worker], self._slots[worker, : shard.stop - shard.start], shard)

    def _promise(self, grant: Grant, *, reserved: bool = False) -> None:
        reader = grant.worker
        buffer, serial = self.store.pin(reader, contributing=reserved)
        record = CommandRecord(messages.CommandKind.GRANTED, grant, server=self._server, buffer=buffer, serial=serial)
        if reserved:
            self._reserved[reader] = record
            return
        outbox = self._evaluation if reader == self._link.roles.evaluator else self._grants
        outbox.send(self._link.roles.rank_of(reader), record.fields())

    def let_save(self, worker: int, number: int) -> None:
        """Ask a worker that waits for a grant to save its part of the checkpoint."""
        record = CommandRecord(messages.CommandKind.SAVE, to(worker, number))
        self._grants.send(self._link.roles.rank_of(worker), record.fields())

    def _send_reserved(self) -> None:
        for worker, record in self._reserved.items():
            self._grants.send(self._link.roles.rank_of(worker), record.fields())
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
        shard.carry_out(CommandRecord.of(link.backoff.until(commands.poll)))
