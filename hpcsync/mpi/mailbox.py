"""The control plane: small records of fixed size, in non-blocking messages, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

DEPTH = 64


class Inbox:
    """Receives records of one type under one tag from anybody.

    A ring of receives is always posted. MPI matches messages from all sources to receives in the order in which these
    were posted, so only the oldest one has to be tested, however many senders there are.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, dtype: np.dtype) -> None:
        self._records = np.zeros(DEPTH, dtype)
        self._head = 0
        self._requests = [
            comm.Recv_init([self._records[i : i + 1].view(np.uint8), MPI.BYTE], MPI.ANY_SOURCE, tag)
            for i in range(DEPTH)
        ]
        MPI.Prequest.Startall(self._requests)

    def poll(self) -> tuple[Any, ...] | None:
        """The fields of the next record, or None if there is none yet."""
        request = self._requests[self._head]
        if not request.Test():
            return None
        record: tuple[Any, ...] = self._records[self._head].item()
        request.Start()
        self._head = (self._head + 1) % DEPTH
        return record

    def free(self) -> None:
        """Withdraw the posted receives; harmless when repeated."""
        for request in self._requests:
            request.Cancel()
            request.Wait()
            request.Free()
        self._requests = []


class Outbox:
    """Sends records of one type under one tag. `send` returns at once; the record is copied."""

    def __init__(self, comm: MPI.Intracomm, tag: int, dtype: np.dtype) -> None:
        self._comm = comm
        self._tag = tag
        self._records = np.zeros(DEPTH, dtype)
        self._buffers = [[self._records[i : i + 1].view(np.uint8), MPI.BYTE] for i in range(DEPTH)]
        self._requests = [MPI.REQUEST_NULL] * DEPTH
        self._next = 0

    def send(self, rank: int, record: tuple[Any, ...]) -> None:
        i = self._next
        self._requests[i].Wait()  # long done, unless the receiver is DEPTH messages behind
        self._records[i] = record
        self._requests[i] = self._comm.Isend(self._buffers[i], rank, self._tag)
        self._next = (i + 1) % DEPTH

    def free(self) -> None:
        """Wait until everything sent has left; harmless when repeated."""
        MPI.Request.Waitall(self._requests)
