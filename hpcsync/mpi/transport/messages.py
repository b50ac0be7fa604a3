"""The records that travel, and their tags. Together with the windows this is all that ranks say to each other.

worker -> server 0           REPORT   a contribution is in the slots / I leave / I join / I failed / my part is written
server 0 -> other servers    ORDER    what to carry out, in order
server 0 -> worker           CANCELLATION  what it computes from this version, or one before it, need not be ended
every server -> a reader     GRANT    read this buffer of mine

Where there are no servers, rank 0's monitor has the part of server 0:

worker -> rank 0             PEER_REPORT  I have made an iteration / make no more / nothing is left for me / I failed /
                             I have halted / my part is written
rank 0 -> worker             PEER_ORDER   stop / all have ended / halt / write your part / go on / a worker has died
worker -> worker             CROSSED      where layers are separated: a piece's activations, or their gradients, are in
                             your window / I make no more
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hpcsync.core.assignments import Assignment

TAG_REPORT, TAG_ORDER, TAG_GRANT, TAG_EVALUATION = 1, 2, 3, 4
TAG_MODEL = 6  # 5 is the clock's
TAG_CANCELLATION = 7
TAG_CROSSED = 8

PUSHED, LEFT, FAILED, SAVED, JOINED = 0, 1, 2, 3, 4  # of FAILED and SAVED, `worker` is the rank

# `kind`, then the fields of coordinator.Report.
REPORT = np.dtype(
    [
        ("kind", "i1"),
        ("worker", "i4"),
        ("iteration", "i8"),
        ("version_read", "i8"),
        ("begin_s", "f8"),
        ("end_s", "f8"),
        ("compute_s", "f8"),
        ("wait_s", "f8"),
        ("comm_s", "f8"),
        ("batch_size", "i4"),
        ("local_steps", "i4"),
        ("loss", "f8"),
        ("wire_bytes", "i8"),
        ("share", "f8"),
        ("predicted_fixed_s", "f8"),
        ("predicted_sample_s", "f8"),
        ("pull_s", "f8"),
        ("encode_s", "f8"),
    ]
)

# An update from n slots travels as n - 1 CONTRIBUTIONs and an UPDATE, which names the last; each has its worker's
# weight. COLLECT empties a slot into the sum that the next update begins with. PROMISE lets a reader read the current
# version. So does RESERVE, a worker whose contribution the next UPDATE takes: its grant waits for that update, for the
# worker takes it to mean that its slot is free. FINISH is the last order: every worker hears that the run is over.
# SAVE: write your part of checkpoint number `version`. DISCARD: this worker has died; it reads nothing any more, and
# what is in its slot counts only if a later order says so.
CONTRIBUTION, UPDATE, PROMISE, RESERVE, FINISH, COLLECT, SAVE, DISCARD = 0, 1, 2, 3, 4, 5, 6, 7
# The fields of deciding.Assignment.
ASSIGNMENT = [
    ("first_sample", "i8"),
    ("batch_size", "i4"),
    ("local_steps", "i4"),
    ("commit_s", "f8"),
    ("ratio", "f8"),
]
ORDER = np.dtype(
    [
        ("kind", "i1"),
        ("reader", "i4"),
        ("iteration", "i8"),
        ("version", "i8"),
        *ASSIGNMENT,
        ("lr", "f8"),
        ("weight", "f8"),
        ("divisor", "f8"),
    ]
)

CANCELLATION = np.dtype([("version", "i8")])

# `buffer` and `serial` are the promise of learning.store.Store.pin. Without a serial number nothing is granted: the
# worker is to write its part of checkpoint number `version`.
NO_GRANT = 0
GRANT = np.dtype(
    [
        ("server", "i4"),
        ("iteration", "i8"),
        ("version", "i8"),
        ("buffer", "i4"),
        ("serial", "i8"),
        *ASSIGNMENT,
    ]
)


def brief(dtype: np.dtype, kind: int, who: int) -> tuple[int, ...]:
    """A report that says nothing but its kind, and of which rank or worker."""
    return (kind, who) + (0,) * (len(dtype.names or ()) - 2)


EXCHANGED, ENDED, SETTLED, LOST, HALTED, WRITTEN = 0, 1, 2, 3, 4, 5
# `kind`, then the fields of peers.Exchanged.
PEER_REPORT = np.dtype(
    [
        ("kind", "i1"),
        ("worker", "i4"),
        ("iteration", "i8"),
        ("peer", "i4"),
        ("begin_s", "f8"),
        ("end_s", "f8"),
        ("compute_s", "f8"),
        ("wait_s", "f8"),
        ("comm_s", "f8"),
        ("batch_size", "i4"),
        ("loss", "f8"),
        ("wire_bytes", "i8"),
        ("n_received", "i4"),
        ("weight", "f8"),
    ]
)

# For a checkpoint all HALT: make no further iteration, and send nothing. Then they WRITE their parts of the one with
# this number, unless somebody cannot halt. Then they GO_ON. BURY: the worker with this number has died.
STOP, ALL_ENDED, HALT, WRITE, GO_ON, BURY = 0, 1, 2, 3, 4, 5
PEER_ORDER = np.dtype([("kind", "i1"), ("number", "i4")])


# `last`: nobody makes an iteration after this one; `halt`: not before a checkpoint. After GONE the sender sends nothing
# more.
PIECE, GONE = 0, 1
CROSSED = np.dtype([("kind", "i1"), ("worker", "i4"), ("piece", "i4"), ("last", "i1"), ("halt", "i1")])


class OrderRecord(NamedTuple):
    kind: int
    reader: int = 0
    iteration: int = 0
    version: int = 0
    first_sample: int = -1
    batch_size: int = 0
    local_steps: int = 0
    commit_s: float = math.inf
    ratio: float = math.nan
    lr: float = 0.0
    weight: float = 1.0
    divisor: float = 1.0

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.first_sample, self.batch_size, self.local_steps, self.commit_s, self.ratio)


class GrantRecord(NamedTuple):
    server: int
    iteration: int
    version: int
    buffer: int
    serial: int
    first_sample: int
    batch_size: int
    local_steps: int
    commit_s: float
    ratio: float

    @property
    def assignment(self) -> Assignment:
        return Assignment(self.first_sample, self.batch_size, self.local_steps, self.commit_s, self.ratio)
