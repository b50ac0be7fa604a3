"""Control plane: small records of fixed size, sent in order by non-blocking messages.

What is sent is declared in `hpcsync.mpi.transport.messages`.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport.ulfm import Deaths

DEPTH = 64


class Inbox:
    """Receiver of records of one type under one tag from any rank.

    Parameters
    ----------
    comm
        Communicator of the messages.
    tag
        Tag of the messages.
    layout
        Layout of the records.
    deaths
        Failure detector that decides which deaths are tolerated; by default none is.

    Notes
    -----
    A ring of persistent receives is always posted. MPI matches messages from all sources to receives in the order in
    which the receives were posted, so only the oldest one is tested, however many senders there are.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, layout: Struct, deaths: Deaths | None = None) -> None:
        self._deaths = deaths or Deaths(comm)
        records = np.zeros((DEPTH, layout.size), np.uint8)
        self._unpack_from, self._bytes, self._size = layout.unpack_from, records.reshape(-1).data, layout.size
        self._head = 0
        self._requests = [comm.Recv_init([record, MPI.BYTE], MPI.ANY_SOURCE, tag) for record in records]
        for request in self._requests:
            request.Start()

    def poll(self) -> tuple[Any, ...] | None:
        """Return the fields of the next record, or None if none has arrived.

        Raises
        ------
        RankFailed
            If a rank died whose death is not tolerated.
        """
        request = self._requests[self._head]
        try:
            if not request.Test():
                return None
        except MPI.Exception as error:
            self._deaths.heard(error)
            return None
        record: tuple[Any, ...] = self._unpack_from(self._bytes, self._head * self._size)
        request.Start()
        self._head = (self._head + 1) % DEPTH
        return record

    def free(self) -> None:
        """Cancel the posted receives; calling it again has no effect."""
        for request in self._requests:
            request.Cancel()
            request.Wait()
            request.Free()
        self._requests = []


class Outbox:
    """Sender of records of one type under one tag.

    Parameters
    ----------
    comm
        Communicator of the messages.
    tag
        Tag of the messages.
    layout
        Layout of the records.
    deaths
        Failure detector that decides which deaths are tolerated; by default none is. Records sent to dead ranks are
        lost.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, layout: Struct, deaths: Deaths | None = None) -> None:
        self._comm = comm
        self._deaths = deaths or Deaths(comm)
        self._tag = tag
        records = np.zeros((DEPTH, layout.size), np.uint8)
        self._pack_into, self._bytes, self._size = layout.pack_into, records.reshape(-1).data, layout.size
        self._buffers = [[record, MPI.BYTE] for record in records]
        self._requests: list[Any] = [None] * DEPTH
        self._next = 0

    def send(self, rank: int, record: tuple[Any, ...]) -> None:
        """Send a copy of `record` to `rank`; return at once."""
        i = self._next
        self._settle(i)  # returns at once unless the receiver is DEPTH messages behind
        self._pack_into(self._bytes, i * self._size, *record)
        try:
            self._requests[i] = self._comm.Isend(self._buffers[i], rank, self._tag)
        except MPI.Exception as error:
            self._deaths.heard(error)
        self._next = (i + 1) % DEPTH

    def free(self) -> None:
        """Wait until all records have been sent; calling it again has no effect."""
        for i in range(DEPTH):
            self._settle(i)

    def _settle(self, i: int) -> None:
        request, self._requests[i] = self._requests[i], None
        if request is None:
            return
        try:
            request.Wait()
        except MPI.Exception as error:
            self._deaths.heard(error)
