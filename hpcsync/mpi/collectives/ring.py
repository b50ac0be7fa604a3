"""Ring all-reduce: the sum of one array per rank, divided by a number, in place and in chunks.

The array has a segment per rank. In the first half of the steps partial sums travel around the ring: segment s begins
with rank s, and every rank adds its own elements, in the order of ranks, until the last one divides the sum. In the
second half the results travel on. A chunk of a segment is sent as soon as it has arrived, so several of them are under
way on every link, and the links do not wait for additions.

Each result is computed on one rank and copied, so all ranks get the same bits, and again for the same arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcsync.mpi.transport.communicator import Communicator

CHUNK_BYTES = 60 << 10  # Open MPI sends so much over TCP at once; of a longer message it asks the receiver first
IN_FLIGHT = 8  # receives that wait for chunks


def ring_mean(comm: Communicator, array: np.ndarray, divisor: int, wait: Callable[[Any], None]) -> None:
    """Replace every rank's array by the sum over ranks divided by `divisor`; collective.

    Parameters
    ----------
    comm
        Communicator, with no other messages under way.
    array
        This rank's array, shape (size,), contiguous; of the same size and type on all ranks.
    divisor
        What the sum is divided by.
    wait
        Waits for a request.
    """
    n = comm.size
    per_segment = max(1, -(-array.nbytes // (n * CHUNK_BYTES)))
    half = (n - 1) * per_segment  # messages of each half
    bounds = [array.size * i // (n * per_segment) for i in range(n * per_segment + 1)]
    window = min(IN_FLIGHT, half)
    rooms = np.empty((window, -(-array.size // (n * per_segment))), array.dtype)
    received: deque[tuple[Any, np.ndarray]] = deque()
    sent: deque[Any] = deque()

    def chunk(message: int, sender: int) -> np.ndarray:
        """Return the chunk of a sender's message, in this rank's array."""
        step, place = divmod(message, per_segment)
        i = (sender - step) % n * per_segment + place
        return array[bounds[i] : bounds[i + 1]]

    def send(message: int) -> None:
        sent.append(comm.Isend(chunk(message, comm.rank), (comm.rank + 1) % n))

    def receive(message: int) -> None:
        into = chunk(message, comm.rank - 1)
        if message < half:
            into = rooms[message % window, : into.size]
        else:
            wait(sent.popleft())  # the partial sum that was there before
        received.append((comm.Irecv(into, (comm.rank - 1) % n), into))

    for message in range(window):
        receive(message)
    for message in range(min(per_segment, half)):
        send(message)
    for message in range(2 * half):
        request, part = received.popleft()
        wait(request)
        if message < half:
            total = chunk(message, comm.rank - 1)
            np.add(part, total, out=total)
            if divisor != 1 and message >= half - per_segment:
                np.divide(total, divisor, out=total)
        if message + per_segment < 2 * half:
            send(message + per_segment)
        if message + window < 2 * half:
            receive(message + window)
    for request in sent:
        wait(request)
