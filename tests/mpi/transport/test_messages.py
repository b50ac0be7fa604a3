from __future__ import annotations

from struct import Struct

from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.messages import DEPTH, Inbox, Outbox

RECORD = Struct("<iqd")  # sender, number, value
TAG = 77


def test_every_record_arrives_once_and_in_its_senders_order(comm):
    """This holds also for more records than an inbox has posted receives."""
    n = 3 * DEPTH + 5
    inbox, outbox, backoff = Inbox(comm, TAG, RECORD), Outbox(comm, TAG, RECORD), Backoff(comm)
    received: list[tuple[int, int, float]] = []

    def drain() -> bool:
        while (record := inbox.poll()) is not None:
            received.append(record)
        return len(received) == n * comm.size

    if comm.rank == 0:
        for number in range(n):
            outbox.send(0, (0, number, 0.5 * number))
            drain()
        backoff.until(drain)
        for sender in range(comm.size):
            mine = [(number, value) for who, number, value in received if who == sender]
            assert mine == [(number, 0.5 * number) for number in range(n)]
    else:
        for number in range(n):
            outbox.send(0, (comm.rank, number, 0.5 * number))
    comm.Barrier()
    assert inbox.poll() is None
    outbox.free()
    inbox.free()
    outbox.free()
    inbox.free()


def test_a_record_is_copied_when_it_is_sent(comm):
    """Later writes by the sender do not reach the receiver: there is a ring of buffers, not one."""
    inbox, outbox, backoff = Inbox(comm, TAG, RECORD), Outbox(comm, TAG, RECORD), Backoff(comm)
    for number in range(5):
        outbox.send(comm.rank, (comm.rank, number, 0.0))
    assert [backoff.until(inbox.poll)[1] for _ in range(5)] == list(range(5))
    outbox.free()
    inbox.free()
