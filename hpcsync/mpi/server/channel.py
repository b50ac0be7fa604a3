"""Channel of a parameter-server run: communicator, roles, windows and clock of a rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from operator import attrgetter
from struct import Struct

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.core.roles import Roles
from hpcsync.mpi.server.buffer_rows import BufferRows
from hpcsync.mpi.transport import messages
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.clock import Clock
from hpcsync.mpi.transport.messages import CommandRecord, Inbox, Outbox
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import Deaths
from hpcsync.mpi.transport.window import Window
from hpcsync.mpi.transport.worker_state import WorkerStates
from hpcsync.paradigms.records import Grant, PushInfo
from hpcsync.training.compressor import Compression
from hpcsync.training.parameter_store import n_buffers, row_size

OWN_ROWS_BYTES = 32 << 20  # within this size, every reader has a buffer of its own, and every worker a slot
SHARED_ROWS = 4  # otherwise readers share so many buffers, and workers so many slots


def n_rows(n: int, row_bytes: int) -> int:
    """Return how many of `n` rows of a server's window, of so many bytes each, exist."""
    return min(n, max(SHARED_ROWS, OWN_ROWS_BYTES // max(1, row_bytes)))


class ServerChannel:
    """Communication between servers and workers; the constructor is collective over a private duplicate of `comm`.

    Parameters
    ----------
    comm
        Communicator of all ranks.
    roles
        Servers and workers.
    size, dtype
        Number and type of the flat weights.
    transport
        Transport of the weights.
    contributors_read
        See `parameter_store.n_buffers`.
    compression
        Compression of contributions; None if they are sent uncompressed.
    begin_s
        Time at which the clock starts, in seconds.
    tolerant
        Whether the run continues when workers die.
    shards
        Every server's slice of the flat vector; by default as equal as possible.
    n_stated
        Length of what a worker states with a push (`training.script_optimizers`).
    buffer_words
        Words of the model's buffers.

    Attributes
    ----------
    tensors : TensorWindow
        On a server: `n_buffers` buffers of its weights, each one row, followed by `n_slots` slots for contributions.
    n_buffers, n_slots : int
        Rows of a server's window. If there are fewer buffers than `parameter_store.n_buffers`, versions may have to
        wait in private memory (`parameter_store.Store.expose`).
    hides : bool
        Whether there are fewer buffers than that.
    lends : bool
        Whether there are fewer slots than workers, so that a worker has to ask for one (`slot_pool`).
    done : Window
        On a server: one word per reader; see `parameter_store`.
    stated : Window or None
        On a server: one row per worker of what it states with a push; None if it states nothing.
    buffers : BufferRows
        On server 0: the workers' buffers.
    infos : Outbox
        Push infos to server 0.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        roles: Roles,
        size: int,
        dtype: torch.dtype,
        transport: Transport = HOST,
        *,
        contributors_read: bool = False,
        compression: Compression | None = None,
        begin_s: float = 0.0,
        tolerant: bool = False,
        shards: list[slice] | None = None,
        n_stated: int = 0,
        buffer_words: int = 0,
    ) -> None:
        self.comm = comm.Dup()
        self.roles = roles
        self.deaths = Deaths(self.comm, tolerated=tolerant, vital=range(roles.n_servers))
        self.size = size
        self.shards = shards or roles.shards(self.size)
        is_server = roles.is_server(comm.rank)
        self.compression = compression
        servers = range(roles.n_servers)
        needed = n_buffers(roles.n_workers, contributors_read)
        self.n_buffers = n_rows(needed, dtype.itemsize * max(map(self.row_size, servers)))
        self.hides = self.n_buffers < needed
        self.n_slots = n_rows(roles.n_workers, dtype.itemsize * max(map(self.slot_size, servers)))
        self.lends = self.n_slots < roles.n_workers
        elements = self._slots_begin(comm.rank) + self.n_slots * self.slot_size(comm.rank) if is_server else 0
        self.tensors = transport.window(self.comm, elements, dtype)
        self.done = Window(self.comm, roles.n_workers + 1 if is_server else 0, np.int64)
        self.n_stated = n_stated
        self.stated = Window(self.comm, roles.n_workers * n_stated * is_server, np.float64) if n_stated else None
        self._servers = self.comm.Split(int(is_server)) if n_stated and roles.n_servers > 1 else None
        self.buffers = BufferRows(self.comm, roles.n_workers, buffer_words)
        self.backoff = Backoff(self.comm, passive=transport.passive, deaths=self.deaths)
        self.phases = WorkerStates(self.comm, one_node=self.backoff.one_node)
        self.clock = Clock(self.comm, begin_s)
        self._inboxes: list[Inbox] = []
        self._outboxes: list[Outbox] = []
        self.infos = self.outbox(messages.TAG_INFO, messages.PUSH_INFO)

    def row_size(self, server: int) -> int:
        """Return the elements from one row of a server's buffers to the next."""
        shard = self.shards[server]
        return row_size(shard.stop - shard.start)

    def slot_size(self, server: int) -> int:
        """Return the elements, of the weights' type, from one slot to the next."""
        return self.row_size(server) if self.compression is None else self.compression.slot_size(self.shards[server])

    def slot(self, server: int, number: int) -> int:
        """Return the first element of a slot; worker w has slot w unless slots are lent."""
        return self._slots_begin(server) + number * self.slot_size(server)

    def _slots_begin(self, server: int) -> int:
        return self.n_buffers * self.row_size(server)

    def parts(self, local: torch.Tensor, server: int) -> list[torch.Tensor]:
        """Split a server's tensors into buffers and slots, one per row."""
        begin = self._slots_begin(server)
        return [local[:begin].view(-1, self.row_size(server)), local[begin:].view(-1, self.slot_size(server))]

    def pieces(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Split a flat vector, shape (size,), into every server's shard, as views."""
        return [vector[shard] for shard in self.shards]

    def inbox(self, tag: int, layout: Struct) -> Inbox:
        """Create an inbox that is freed with the channel."""
        self._inboxes.append(Inbox(self.comm, tag, layout, self.deaths))
        return self._inboxes[-1]

    def outbox(self, tag: int, layout: Struct) -> Outbox:
        """Create an outbox that is freed with the channel."""
        self._outboxes.append(Outbox(self.comm, tag, layout, self.deaths))
        return self._outboxes[-1]

    def sum_over_servers(self, number: float) -> float:
        """Return the sum of a number over all servers, in their order; they all call it at the same update."""
        return number if self._servers is None else math.fsum(self._servers.allgather(number))

    def say(self, kind: int) -> None:
        """Notify server 0 that this rank has failed, or has saved its part of a checkpoint."""
        failed = kind == messages.InfoKind.FAILED  # and then it must not wait for earlier messages
        outbox = self.outbox(messages.TAG_INFO, messages.PUSH_INFO) if failed else self.infos
        outbox.send(0, (kind, *PushInfo(math.nan, self.comm.rank)[1:]))

    def free(self) -> None:
        """Free windows, inboxes, outboxes and the communicator; collective, and harmless when repeated."""
        if self.comm == MPI.COMM_NULL:
            return
        for outbox in self._outboxes:
            outbox.free()
        for window in (self.tensors, self.done, self.stated, self.buffers, self.phases):
            if window is not None:
                window.free()
        for inbox in self._inboxes:
            inbox.free()
        if self._servers is not None:
            self._servers.Free()
        self.comm.Free()


class Reader:
    """Reader of the weights that servers promise: a worker, or the evaluation beside server 0.

    Parameters
    ----------
    link
        Channel to the servers.
    reader
        Number of the reader.
    save
        Called with a checkpoint's number when one is to be saved while a grant is waited for.

    Attributes
    ----------
    granted_s : float
        When the latest grant arrived, in seconds: all of its records, or the first one if a record may be delayed.
    """

    def __init__(self, link: ServerChannel, reader: int, save: Callable[[int], None] = lambda number: None) -> None:
        self._link = link
        self._reader = reader
        self._save = save
        self._backoff = copy.copy(link.backoff)  # own state, because the evaluator waits in a thread
        tag = messages.TAG_EVALUATION if reader == link.roles.evaluator else messages.TAG_GRANT
        self._inbox = link.inbox(tag, messages.COMMAND)
        self._early: list[CommandRecord] = []  # grants that arrived during `idle`
        self._unread: list[CommandRecord] = []  # grants of weights that are to be read
        self._words = [np.zeros(1, np.int64) for _ in link.shards]  # MPI may read each until its put is complete
        self._reads_at_once = link.hides and len(link.shards) > 1
        self.granted_s = 0.0

    def wait(
        self,
        *,
        version: int | None = None,
        iteration: int | None = None,
        into: list[torch.Tensor] | None = None,
    ) -> Grant:
        """Wait for every server's grant of the next read, and return it.

        Parameters
        ----------
        version, iteration
            Version and iteration that the grants must be for, where they are known.
        into
            Where the weights will be read to, as for `read`. If servers may have no free buffer, each piece is read as
            soon as its grant arrives: readers that kept one server's buffer while they waited for another server's
            could wait for each other.

        Raises
        ------
        RuntimeError
            If the grants are for something else, or do not agree.
        """
        grants: list[Grant] = []
        for _ in self._link.shards:
            record = self._next()
            if not (grants and self._reads_at_once):
                self.granted_s = self._link.clock.now()
            grants.append(record.grant)
            if record.grant.local_steps:
                self._unread.append(record)
                if into is not None and self._reads_at_once:
                    self.read(into)
        first = grants[0]
        due = first._replace(
            iteration=first.iteration if iteration is None else iteration,
            version=first.version if version is None else version,
        )
        if any(grant[:3] != due[:3] or grant.local_steps != due.local_steps for grant in grants):
            raise RuntimeError(f"{grants}: must be grants of (worker, iteration, version) = {due[:3]}")
        return first

    def idle(self, until_s: float) -> bool:
        """Wait until `until_s`; return False as soon as a grant arrives before."""
        now, backoff = self._link.clock.now, self._backoff
        backoff.reset()
        while not self._early and now() < until_s:
            if (record := self._inbox.poll()) is None:
                backoff.pause()
            elif (promise := CommandRecord.of(record)).kind == messages.CommandKind.SAVE:
                self._save(promise.grant.version)
            else:
                self._early.append(promise)
        return not self._early

    def lent(self) -> list[int]:
        """Wait for the slot that every server lends; return the slots in the order of the servers.

        Raises
        ------
        RuntimeError
            If another command arrives.
        """
        records = sorted((self._next() for _ in self._link.shards), key=attrgetter("server"))
        if any(record.kind != messages.CommandKind.LENT for record in records):
            raise RuntimeError(f"{records}: must be slots")
        return [record.buffer for record in records]

    def _next(self) -> CommandRecord:
        if self._early:
            return self._early.pop()
        complete, poll = self._backoff.complete, self._inbox.poll
        while (record := CommandRecord.of(complete(poll))).kind == messages.CommandKind.SAVE:
            self._save(record.grant.version)
        return record

    def read(self, into: list[torch.Tensor]) -> None:
        """Copy the promised version into the `pieces` of a vector, as far as it has not been, and release the promises.

        If servers may have no free buffer, `wait` has copied it.
        """
        link, unread, self._unread = self._link, self._unread, []
        for *_, server, buffer, _ in unread:
            link.tensors.get(into[server], server, buffer * link.row_size(server))
        for *_, server, _, serial in unread:
            link.tensors.flush(server)
            self._words[server][0] = serial
            link.done.put(self._words[server], server, self._reader)
        for *_, server, _, _ in unread:
            link.done.flush(server)
