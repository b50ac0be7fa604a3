"""Shard of a server, and the commands that every server carries out in the same order on its shard."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hpcsync.core.coordinator import AccumulateCommand, Command, UpdateCommand
from hpcsync.mpi.server.channel import ServerChannel
from hpcsync.mpi.server.slot_pool import SlotPool
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.messages import CommandRecord
from hpcsync.paradigms.records import Grant
from hpcsync.state import restore_arrays
from hpcsync.training.parameter_store import Store
from hpcsync.training.update_rules import Rule


def encode(commands: Sequence[Command]) -> list[CommandRecord]:
    """Return the records that every server carries out for the coordinator's commands; cancellations need none."""
    records: list[CommandRecord] = []
    contributing: set[int] = set()  # workers whose contribution a later update takes
    for command in reversed(commands):
        if isinstance(command, Grant):
            kind = messages.CommandKind.RESERVE if command.worker in contributing else messages.CommandKind.PROMISE
            records.append(CommandRecord(kind, command))
        elif isinstance(command, UpdateCommand):
            *others, (last, weight) = zip(command.workers, command.weights, strict=True)
            update = (command.lr, weight, command.divisor, command.momentum)
            records.append(CommandRecord(messages.CommandKind.UPDATE, to(last), *update))
            for worker, weight in reversed(others):
                records.append(CommandRecord(messages.CommandKind.CONTRIBUTION, to(worker), weight=weight))
            contributing.update(command.workers)
        elif isinstance(command, AccumulateCommand):
            records.append(CommandRecord(messages.CommandKind.ACCUMULATE, to(command.worker), weight=command.weight))
    records.reverse()
    return records


@functools.lru_cache(4096)
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
    pool : SlotPool or None
        Slots of the workers; None if every worker has its own.
    dead : set of int
        Workers that died.
    finished : bool
        Whether FINISH has been carried out.
    gradient_sq : float
        Squared norm of the shard of the latest update's gradient; NaN if it was none, or is not measured.
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
        self._put = list(put)  # contributions as sent, possibly compressed, by slot
        n_workers = link.roles.n_workers
        if link.compression is None:
            put[:, len(mine) :] = 0
            self._slots = self._put if not link.lends else [put[0]] * n_workers  # until they are acquired
        else:
            self._slots = list(buffers.new_zeros(n_workers, row_size))
        self.pool = SlotPool(link.n_slots) if link.lends else None
        self._moved: dict[int, torch.Tensor] = {}  # by worker: contributions in private memory instead of a slot
        self._spare: list[torch.Tensor] = []  # private memory for further ones
        stated = None if link.stated is None else link.stated.local.reshape(-1, link.n_stated)
        link.done.local[:] = 0  # before the first promise, hence before any reader's word
        link.done.sync()
        self.store = Store(buffers, self._slots, link.done.local, rule, len(mine), stated)
        self._save = save
        if state is not None:
            self.store.restore(state["store"])
            self._restore_slots(state.get("kept", range(n_workers)), state["slots"])
            if stated is not None:
                stated[:] = state["stated"]
            for begin, end in self._slot_spans:
                link.tensors.release(begin, end)
        self._release()
        self._contributors: list[int] = []
        self._weights: list[float] = []  # of the contributors
        self._reserved: dict[int, CommandRecord] = {}  # by worker: grants that the next update sends
        self._hidden: list[CommandRecord] = []  # grants of versions that are in private memory
        self._kept: list[int] = []  # workers whose contributions belong to the checkpoint that follows
        self.dead: set[int] = set()
        grants = link.outbox(messages.TAG_GRANT, messages.COMMAND)
        evaluation = link.outbox(messages.TAG_EVALUATION, messages.COMMAND)
        self._readers = [(grants, link.roles.rank_of(worker)) for worker in range(n_workers)]  # where their grants go
        self._readers.append((evaluation, link.roles.rank_of(link.roles.evaluator)))
        self.finished = False
        self.gradient_sq = math.nan
        for grant in first if state is None else ():
            self.carry_out(CommandRecord(messages.CommandKind.PROMISE, grant))

    def state(self) -> dict[str, Any]:
        """Return the server's state while every worker waits for an answer."""
        for begin, end in self._slot_spans:
            self._link.tensors.acquire(begin, end)
        stated = [] if self._link.stated is None else self._link.stated.local.reshape(-1, self._link.n_stated).tolist()
        slots = self._put[0].new_empty(len(self._kept), len(self._put[0]))
        for row, worker in zip(slots, self._kept, strict=True):
            row.copy_(self._contribution(worker))
        kept = {"kept": self._kept, "slots": slots.view(torch.uint8)}
        return {"store": self.store.state(), **kept, "stated": stated}

    def _restore_slots(self, workers: Sequence[int], saved: torch.Tensor) -> None:
        """Restore the contributions of these workers as sent, into private memory if slots are lent."""
        rows = self._put[0].new_empty(len(workers), len(self._put[0]))
        restore_arrays({"slots": rows.view(torch.uint8)}, {"slots": saved})
        for worker, row in zip(workers, rows, strict=True):
            if self.pool is None:
                self._put[worker].copy_(row)
            else:
                self._moved[worker] = row

    def _contribution(self, worker: int) -> torch.Tensor:
        """Return a worker's contribution as sent; anything if there is none."""
        if self.pool is None:
            return self._put[worker]
        if worker in self._moved:
            return self._moved[worker]
        return self._put[self.pool.slot(worker) or 0]

    def carry_out(self, command: CommandRecord) -> None:
        """Carry out one command.

        Raises
        ------
        RuntimeError
            If this shard's version is not server 0's.
        """
        kind, worker = command.kind, command.grant.worker
        if kind in (messages.CommandKind.PROMISE, messages.CommandKind.RESERVE):
            if command.grant.version != self.store.version:
                raise RuntimeError(
                    f"server {self._server}: version {self.store.version}: must be server 0's, {command.grant.version}"
                )
            self._promise(command.grant, reserved=kind == messages.CommandKind.RESERVE)
        elif kind in (messages.CommandKind.CONTRIBUTION, messages.CommandKind.UPDATE):
            self._contributors.append(worker)
            self._weights.append(command.weight)
            if kind == messages.CommandKind.UPDATE:
                self._update(command)
        elif kind == messages.CommandKind.ACCUMULATE:
            self._acquire(worker)
            self.store.accumulate(worker, command.weight)
            cuda.ready(self._link.tensors.local)  # the next grant tells the worker that its slot is free
            self._free_slot(worker)
        elif kind == messages.CommandKind.LEND:
            self._lend(worker, command.buffer)
        elif kind == messages.CommandKind.ARRIVED:
            assert self.pool is not None
            self.pool.arrived(worker)
        elif kind == messages.CommandKind.DISCARD:
            self.dead.add(worker)
            self._reserved.pop(worker, None)
            self._hidden = [record for record in self._hidden if record.grant.worker != worker]
            self.store.discard(worker)
            if self.pool is not None:
                self.pool.discard(worker)
        elif kind == messages.CommandKind.KEEP:
            self._kept.append(worker)
        elif kind == messages.CommandKind.SAVE:
            self._save(command.grant.version)
            self._kept.clear()
        else:
            for worker in set(range(self._link.roles.n_workers)) - self.dead:
                self._promise(command.grant._replace(worker=worker, version=self.store.version))
            self.finished = True

    def _update(self, command: CommandRecord) -> None:
        for worker in self._contributors:
            self._acquire(worker)
        self._link.done.sync()
        update = (command.lr, self._weights, command.divisor, command.momentum)
        gradient_sq = self.store.apply(self._contributors, *update)
        self._release()  # before any reader is granted this version, and any worker another slot
        self.gradient_sq = float(gradient_sq)
        for worker in self._contributors:
            self._free_slot(worker)
        self._contributors.clear()
        self._weights.clear()
        for record in self._reserved.values():
            self._send(record)
        self._reserved.clear()

    def _acquire(self, worker: int) -> None:
        """Make the worker's contribution visible to this server, and decode it."""
        link = self._link
        slot = worker if self.pool is None else self.pool.slot(worker)
        if slot is not None:
            link.tensors.acquire(*self._slot_spans[slot])
        if link.stated is not None:
            link.stated.sync()
        if link.compression is not None:
            shard = link.shards[self._server]
            sent = self._contribution(worker).view(torch.uint8)
            link.compression.decode(sent, self._slots[worker][: shard.stop - shard.start], shard)
        elif self.pool is not None:
            self._slots[worker] = self._contribution(worker)

    def _free_slot(self, worker: int) -> None:
        """Free the memory of a worker's contribution, which has been used or dropped, if slots are lent."""
        if self.pool is not None:
            self.pool.free(worker)
            if worker in self._moved:
                self._spare.append(self._moved.pop(worker))

    def _lend(self, worker: int, slot: int) -> None:
        """Lend a slot to a worker, after moving the contribution that is there."""
        assert self.pool is not None
        tensors, moved = self._link.tensors, self.pool.lend(worker, slot)
        if moved is not None:
            tensors.acquire(*self._slot_spans[slot])
            private = self._spare.pop() if self._spare else torch.empty_like(self._put[slot])
            self._moved[moved] = private.copy_(self._put[slot])
            cuda.ready(tensors.local)  # the slot is not read any more
        self._tell(CommandRecord(messages.CommandKind.LENT, to(worker), server=self._server, buffer=slot))

    @property
    def is_hiding(self) -> bool:
        """Whether there are grants that `poll` will send."""
        return bool(self._hidden)

    def poll(self) -> None:
        """Send the grants of versions for which there is a buffer now."""
        if self._hidden:
            hidden, self._hidden = self._hidden, []
            for record in hidden:
                self._send(record)

    def _promise(self, grant: Grant, *, reserved: bool = False) -> None:
        reader = grant.worker
        buffer, serial = 0, 0  # of a grant that ends a worker's part in the run, with which it reads nothing
        if grant.local_steps:
            buffer, serial = self.store.pin(reader, contributing=reserved)
        record = CommandRecord(messages.CommandKind.GRANTED, grant, server=self._server, buffer=buffer, serial=serial)
        if reserved:
            self._reserved[reader] = record
            return
        self._free_slot(reader)  # its contribution has been dropped, if it is still there
        self._send(record)

    def _send(self, record: CommandRecord) -> None:
        """Send a grant, unless its version is in private memory and no buffer is free; then `poll` does."""
        reader = record.grant.worker
        if record.buffer >= self.store.n_shared:
            self._link.done.sync()
            buffer = self.store.expose(reader)
            if buffer is None:
                self._hidden.append(record)
                return
            self._link.tensors.release(*self._buffer_spans[buffer])
            record = record._replace(buffer=buffer)
        self._tell(record)

    def _tell(self, record: CommandRecord) -> None:
        """Send a record to the reader that its grant names."""
        outbox, rank = self._readers[record.grant.worker]
        outbox.send(rank, record.fields())

    def let_save(self, worker: int, number: int) -> None:
        """Ask a worker that waits for a grant to save its part of the checkpoint."""
        self._tell(CommandRecord(messages.CommandKind.SAVE, to(worker, number)))

    def _release(self) -> None:
        """Make the current version visible to readers, if they can reach it; all earlier uses of slots are complete."""
        shared = self.store.current < self.store.n_shared
        self._link.tensors.release(*self._buffer_spans[self.store.current] if shared else (0, 0))


def follow(link: ServerChannel, shard: Shard) -> None:
    """Carry out commands until the last one; the main loop of every server but the first."""
    commands = link.inbox(messages.TAG_COMMAND, messages.COMMAND)
    norms = link.outbox(messages.TAG_NORM, messages.NORM)

    def command() -> tuple[Any, ...] | None:
        shard.poll()
        return commands.poll()

    while not shard.finished:
        record = CommandRecord.of(link.backoff.until(command))
        shard.carry_out(record)
        if record.kind == messages.CommandKind.UPDATE and not math.isnan(shard.gradient_sq):
            norms.send(0, (shard.store.version, link.comm.rank, shard.gradient_sq))
