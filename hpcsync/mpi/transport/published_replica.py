"""Published replica: read one-sided by all ranks at any time, never torn, without waiting on either side.

Each rank has a few rows of memory for its replica and, in a second window, words that tell which row to read:

    current             serial * rows + row: the serial number of the current publication, and its row
    pin of each reader  row + 1 while the reader copies the row; ANY while it may be about to copy any row; 0 otherwise

These are hazard pointers, made of puts, gets and flushes alone. The reader gets `current`, puts its pin, flushes, and
gets `current` again; if it still names the same row, the reader copies the row and clears its pin. The writer chooses a
row that is neither current nor pinned, fills it, and sets `current`.

Why no row is filled while a reader copies it:

- Before a writer fills row r, it has set `current` to another row (the current row is never chosen) and only then,
  after a full fence, loaded the pins.
- A reader has stored its pin and only then, after a flush, loaded `current`.
- Both sides store before they load, so at least one of the two loads sees the other side's store. Either the reader
  finds that r is no longer current and does not copy it, or the writer finds the pin and does not choose r.
- The writer's fence is `Window.sync`. On the reader's side, the flush means that the put has reached the target's
  memory before the next get begins.
- Words change as a whole: they are aligned, of 8 bytes, and copied at once, as are the words of `Store`'s `done`.

References
----------
M. M. Michael, "Hazard pointers: safe memory reclamation for lock-free objects", IEEE TPDS 15(6), 2004.
"""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.window import Window

ROWS = 4  # one current, one to fill, two for slow readers
UNREAD_ROWS = 3  # if ranks do not read each other: one current, one to fill, one for the evaluation
CURRENT = 0  # index of the word; the pin of reader i is at 1 + i
ANY = -1
TRIES = 3  # attempts at pinning one row, if the owner publishes faster than a round trip of a word


class PublishedReplica:
    """Flat replica of this rank for others to read, and access to theirs.

    Before the first publication, a replica of zeros with serial number 0 is current.

    Parameters
    ----------
    comm
        Communicator; the constructor and `free` are collective over it.
    size
        Elements of this rank's replica.
    dtype
        Type of the elements.
    transport
        Transport of the replicas.
    extra
        Elements published with each replica, which only some readers want; as many on every rank.
    peers_read
        Whether ranks read each other's replicas. If only one reader reads at a time, a row is always free for a
        publication.

    Notes
    -----
    Readers are numbered: each rank has its own number, and `comm.size` is one further reader on any one rank (the
    evaluator's thread). Readers may be threads beside the publishing one, if MPI supports that.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        size: int,
        dtype: torch.dtype,
        transport: Transport = HOST,
        *,
        extra: int = 0,
        peers_read: bool = True,
    ) -> None:
        self._rank, self._readers = comm.rank, comm.size + 1
        self._sizes, self._n_rows = comm.allgather(size), min(comm.size + 2, ROWS if peers_read else UNREAD_ROWS)
        self._size, self._extra = size, extra
        self._length = size + extra + 1  # of a row; the weight comes last
        self._rows = transport.window(comm, self._n_rows * self._length, dtype)
        self._words = Window(comm, 1 + self._readers, np.int64)
        self._rows.local[: self._length] = 0  # first row only: memory of rows that are never used is never committed
        self._rows.release(0, self._length)
        self._words.local[:] = 0
        self._words.sync()
        self._dead: set[int] = set()
        comm.Barrier()

    @property
    def serial(self) -> int:
        """Serial number of this rank's latest publication."""
        return self._unpack(self._words.local[CURRENT])[0]

    def publish(
        self, vector: torch.Tensor, serial: int | None = None, weight: float = 1.0, extra: torch.Tensor | None = None
    ) -> bool:
        """Publish a copy of `vector`, shape (size,).

        Parameters
        ----------
        vector
            The replica.
        serial
            Serial number, greater than that of the latest publication; by default the next number.
        weight
            Scalar published with the replica: its push-sum weight.
        extra
            Elements published with it, shape (extra,), if there are any.

        Returns
        -------
        bool
            False if no row is free because slow readers still pin all others; the latest publication then stays
            current.

        Raises
        ------
        ValueError
            If the shape, dtype or serial number does not fit.
        """
        self._check(vector, self._size)
        row = self._free_row()
        serial = self.serial + 1 if serial is None else serial
        if serial <= self.serial:
            raise ValueError(f"serial number {serial} after {self.serial}")
        if row is None:
            return False
        self._row(row)[: self._size] = vector
        if extra is not None:
            self._row(row)[self._size : -1] = extra
        self._row(row)[-1] = weight
        self._rows.release(row * self._length, (row + 1) * self._length)
        self._words.local[CURRENT] = serial * self._n_rows + row
        self._words.sync()
        return True

    def forget(self, rank: int) -> None:
        """Ignore the pins of a rank that died, so that the rows it was reading can be filled."""
        self._dead.add(rank)

    def read(
        self,
        peer: int,
        into: torch.Tensor,
        reader: int | None = None,
        weight: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
    ) -> int:
        """Copy the publication of `peer` into `into`.

        Parameters
        ----------
        peer
            Rank whose replica to read.
        into
            Destination, of the size of the peer's replica.
        reader
            Number of the reader, by default this rank's. One reader must not read the same peer in two threads at once.
        weight
            Destination of the published scalar, shape (1,).
        extra
            Destination of the elements published with the replica, shape (extra,).

        Returns
        -------
        int
            Serial number of the publication; it never decreases.

        Raises
        ------
        ValueError
            If the shape or dtype does not fit, or there is no such reader.
        """
        self._check(into, self._sizes[peer])
        reader = self._rank if reader is None else reader
        if not 0 <= reader < self._readers:
            raise ValueError(f"reader {reader}: must be one of 0 to {self._readers - 1}")
        if peer == self._rank == reader:  # no pin is needed in the thread that publishes
            serial, row = self._unpack(self._words.local[CURRENT])
            into[:] = self._row(row)[: self._size]
            if extra is not None:
                extra[:] = self._row(row)[self._size : -1]
            if weight is not None:
                weight[:] = self._row(row)[-1]
            return serial
        serial, row = self._pin(peer, reader)
        self._copy(peer, row, into, weight, extra)
        self._set_pin(peer, reader, 0)
        return serial

    # ---- the owner's side ----

    def _free_row(self) -> int | None:
        self._words.sync()  # full fence between the last store of `current` and these loads of the pins
        pins = self._pins()
        taken = {pin - 1 for pin in pins} | {self._unpack(self._words.local[CURRENT])[1]}
        return None if ANY in pins else next((row for row in range(self._n_rows) if row not in taken), None)

    def _pins(self) -> list[int]:
        pins: list[int] = self._words.local[1:].tolist()
        for rank in self._dead:
            pins[rank] = 0
        return pins

    def _row(self, row: int) -> torch.Tensor:
        return self._rows.local[row * self._length : (row + 1) * self._length]

    # ---- the reader's side; scratch memory is allocated in each call, since readers may be threads ----

    def _pin(self, peer: int, reader: int) -> tuple[int, int]:
        """Pin a publication, which then stays unchanged until the pin is cleared; return (serial, row).

        The number of steps is bounded.
        """
        _, row = self._current(peer)
        for _ in range(TRIES):
            self._set_pin(peer, reader, row + 1)
            serial, still = self._current(peer)
            if still == row:
                return serial, row
            row = still
        # The owner publishes faster than this rank pins. ANY keeps it from filling any row during one more read.
        self._set_pin(peer, reader, ANY)
        serial, row = self._current(peer)
        self._set_pin(peer, reader, row + 1)
        return serial, row

    def _current(self, peer: int) -> tuple[int, int]:
        word = np.zeros(1, np.int64)
        self._words.get(word, peer, CURRENT)
        self._words.flush(peer)
        return self._unpack(word[0])

    def _set_pin(self, peer: int, reader: int, pin: int) -> None:
        word = np.array([pin], np.int64)
        self._words.put(word, peer, 1 + reader)
        self._words.flush(peer)

    def _copy(
        self,
        peer: int,
        row: int,
        into: torch.Tensor,
        weight: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
    ) -> None:
        size = self._sizes[peer]
        begin = row * (size + self._extra + 1)
        self._rows.get(into, peer, begin)
        if extra is not None and self._extra:
            self._rows.get(extra, peer, begin + size)
        if weight is not None:
            self._rows.get(weight, peer, begin + size + self._extra)
        self._rows.flush(peer)

    # ---- both ----

    def _unpack(self, word: np.int64) -> tuple[int, int]:
        """Return (serial, row)."""
        return divmod(int(word), self._n_rows)

    def _check(self, vector: torch.Tensor, size: int) -> None:
        dtype = self._rows.local.dtype
        if vector.shape != (size,) or vector.dtype != dtype:
            raise ValueError(f"{vector.dtype}{list(vector.shape)}: must be {dtype}[{size}]")

    def free(self) -> None:
        """Free the windows; collective, and harmless when repeated. No rank may still be reading."""
        self._rows.free()
        self._words.free()

    def __enter__(self) -> PublishedReplica:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
