"""Control plane: small records of fixed size, sent in order by non-blocking messages.

| from, to                | record    | content                                                                       |
|-------------------------|-----------|-------------------------------------------------------------------------------|
| worker, server 0        | PUSH_INFO | a contribution is in the slots, or the worker leaves, joins, failed or saved  |
| server 0, other servers | COMMAND   | what to carry out, in order                                                   |
| server 0, worker        | CANCEL    | the worker may abandon work based on `version` or an earlier one              |
| every server, a reader  | COMMAND   | the reader may read a buffer of this server, put into a slot, or save         |
| worker, server 0        | SLOT      | a slot is wanted for the next push, if there are fewer slots than workers     |
| other servers, server 0 | NORM      | the squared norm of this server's part of the gradient of an update           |

Without servers, rank 0's monitor takes the place of server 0:

| from, to         | record       | content                                                                            |
|------------------|--------------|------------------------------------------------------------------------------------|
| worker, rank 0   | STEP_INFO    | the worker made an iteration, ended, settled, failed, halted or saved              |
| rank 0, worker   | PEER_COMMAND | stop, all have ended, halt, save, continue, or remove a worker that died           |
| worker, worker   | ACTIVATION   | Stanza: a piece's activations or gradients are in the window, or the sender leaves |
"""

from __future__ import annotations

import math
from enum import IntEnum
from struct import Struct
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from mpi4py import MPI

from hpcsync.mpi.transport.ulfm import Deaths
from hpcsync.paradigms.records import Grant, PushInfo, StepInfo, layout

TAG_INFO, TAG_COMMAND, TAG_GRANT, TAG_EVALUATION = 1, 2, 3, 4
TAG_MODEL = 6  # clock.TAG is 5
TAG_CANCEL = 7
TAG_ACTIVATION = 8
TAG_SLOT = 9
TAG_NORM = 10
TAG_FREE = 11  # a window may be put into
DEPTH = 64  # messages of one sender under way, and receives posted


class InfoKind(IntEnum):
    """Kinds of PUSH_INFO. In FAILED and SAVED, `worker` is the rank; RATE is made by `rate_change`."""

    PUSHED = 0
    LEFT = 1
    FAILED = 2
    SAVED = 3
    JOINED = 4
    RATE = 5


class CommandKind(IntEnum):
    """Kinds of COMMAND.

    An update from n slots travels as n - 1 CONTRIBUTION commands and one UPDATE, which names the last slot; each holds
    the weight of its worker.
    """

    CONTRIBUTION = 0
    UPDATE = 1
    PROMISE = 2  # the reader may read the current version
    RESERVE = 3  # the same for a worker whose contribution the next UPDATE takes: its grant follows that update
    FINISH = 4  # the last command: the run is over
    ACCUMULATE = 5  # move a slot into the sum that the next update begins with
    SAVE = 6  # write this rank's part of checkpoint `version`; workers hear it while they wait for a grant
    DISCARD = 7  # the worker died: its promises are void, and its slot counts only if a later command names it
    GRANTED = 8  # to a reader: it may read a buffer of this server, as promised
    ARRIVED = 9  # the worker's contribution is in its slot, and is used later
    LEND = 10  # lend slot `buffer` to the worker, after moving what is there to private memory
    LENT = 11  # to a worker: it may put its next contribution into slot `buffer` of this server
    KEEP = 12  # the worker's slot holds a contribution that is used after the SAVE that follows


class StepInfoKind(IntEnum):
    """Kinds of STEP_INFO; RATE is made by `rate_change`."""

    STEPPED = 0
    ENDED = 1
    SETTLED = 2
    FAILED = 3
    HALTED = 4
    SAVED = 5
    RATE = 6


class PeerCommandKind(IntEnum):
    """Kinds of PEER_COMMAND.

    For a checkpoint all workers HALT: they make no further iteration and send nothing. Then each saves its part of the
    checkpoint with this number (SAVE), unless a worker cannot halt, and all CONTINUE.
    """

    STOP = 0
    ALL_ENDED = 1
    HALT = 2
    SAVE = 3
    CONTINUE = 4
    REMOVE = 5  # the worker with this number died


class ActivationKind(IntEnum):
    """Kinds of ACTIVATION. After LEFT the sender sends nothing more."""

    PIECE = 0
    LEFT = 1


# ---- records: the kind first, where there are several ----

Kind = Annotated[int, "i1"]
Number = Annotated[int, "i4"]
Serial = Annotated[int, "i8"]
Value = Annotated[float, "f8"]


class CommandRecord(NamedTuple):
    """A COMMAND record.

    Attributes
    ----------
    kind
        Kind of the command.
    grant
        Grant of PROMISE, RESERVE and GRANTED. Other kinds use its worker alone, and SAVE its version.
    lr, weight, divisor
        Rate and divisor of an UPDATE, and weight of the contribution that it, CONTRIBUTION or ACCUMULATE names.
    momentum
        Momentum of the optimizer from an UPDATE on; NaN: as before.
    server, buffer, serial
        Of GRANTED: the sender, and its promise (`parameter_store.Store.pin`). Of LENT: the sender, and the slot,
        which LEND names, too.
    """

    kind: Kind
    grant: Grant
    lr: Value = 0.0
    weight: Value = 1.0
    divisor: Value = 1.0
    momentum: Value = math.nan
    server: Number = 0
    buffer: Number = 0
    serial: Serial = 0

    def fields(self) -> tuple[float, ...]:
        """Return the fields of the record."""
        return (self.kind, *self.grant, *self[2:])

    @staticmethod
    def of(fields: tuple[Any, ...]) -> CommandRecord:
        """Return the record with these fields."""
        return CommandRecord(fields[0], Grant._make(fields[1:-7]), *fields[-7:])


def rate_change(info: PushInfo | StepInfo, group: int, lr: float) -> PushInfo | StepInfo:
    """Return the info that from its iteration on a parameter group, in `batch_size`, has the rate `lr`."""
    return info._replace(batch_size=group, lr=lr)


def _types(record: Any) -> list[str]:
    """Return the NumPy types of a declaration: those of a class's fields, or that of one field."""
    if isinstance(record, type):
        return [of_field for hint in get_type_hints(record, include_extras=True).values() for of_field in _types(hint)]
    declared = record.__metadata__[0]
    return [declared if isinstance(declared, str) else declared.dtype]


def _layout(*parts: Any) -> Struct:
    return layout(name for part in parts for name in _types(part))


PUSH_INFO = layout(["i1", *_types(PushInfo)[1:]])  # without `now_s`, which server 0 sets
COMMAND = _layout(CommandRecord)
CANCEL = _layout(Serial)  # version
SLOT = _layout(Number)  # worker
NORM = _layout(Serial, Number, Value)  # version, server, squared norm
STEP_INFO = _layout(Kind, StepInfo)
PEER_COMMAND = _layout(Kind, Number)
# Worker, piece; whether no worker makes an iteration after this one, and whether workers halt before the next one.
ACTIVATION = _layout(Kind, Number, Number, Kind, Kind)


# ---- mailboxes ----


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
            return self.poll()  # a record that has arrived is not kept back by a death
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
