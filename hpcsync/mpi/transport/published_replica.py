"""Published replica: read one-sided by all ranks at any time, never torn, without waiting on either side.

Each rank has a few rows of memory for its replica, of which one is current, and in a second window these words:

    current              claims * rows + row: how often readers have claimed a row so far, and the current row
    serial of each row   serial number of the publication that is in the row
    done of each row     how often a reader has finished with the row

A reader claims the current row by an atomic sum, which counts the claim and returns the row. It copies the row and its
serial number, and adds 1 to the row's `done`. The writer fills a row that is not current and of which all claims are
done, and makes it current by an atomic sum on the same word. This returns the number of claims until then, so it knows
how many of them were of the row that it has replaced: those since it was made current.

Why no row is filled while a reader copies it: a claim and the choice of the current row change one word, so they have
an order. Every claim of a row comes before the row is replaced, and is counted then; the row is not filled before as
many readers are done with it.

A reader that dies leaves a claim that is never done. Every rank therefore says in its own memory from which rank it is
reading; nobody looks there until a rank has died (`forget`) and no row is free. A claim that is left once every living
reader has been seen without a read from this rank, after the row was replaced, is that of a dead one.

References
----------
The counts of claims and of what is done are a split reference count: A. Williams, "C++ Concurrency in Action", 2nd
edition, 2019, chapter 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.window import Freed, Window

PEERS_ROWS = 3  # if ranks read each other: one current, one to fill, one for slow readers
EVALUATED_ROWS = 2  # if the evaluation alone reads: one current, one to fill, which it may still read
UNREAD_ROWS = 1  # if no rank reads before the last publication
CURRENT = 0  # index of the word


class PublishedReplica(Freed):
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
    n_rows
        Rows of memory. With `EVALUATED_ROWS` one reader reads at a time, and a publication is refused only while that
        still reads the one before the current one. With `UNREAD_ROWS` a publication overwrites the one before: no rank
        may read before the last one.

    Attributes
    ----------
    serial
        Serial number of this rank's latest publication.

    Notes
    -----
    Readers are numbered: each rank has its own number, and `comm.size` is one further reader on rank 0 (the
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
        n_rows: int = PEERS_ROWS,
    ) -> None:
        self._rank, self._n_ranks, self._n_rows = comm.rank, comm.size, n_rows
        self._sizes = comm.allgather(size)
        self._size, self._extra = size, extra
        self._length = size + extra + 1  # of a row; the weight comes last
        self._rows = transport.window(comm, self._n_rows * self._length, dtype)
        self._serials, self._done = 1, 1 + self._n_rows  # indices of the words of row 0
        self._reading = 1 + 2 * self._n_rows  # of 1 + the rank that this rank reads from, 0: none; then its evaluator's
        self._words = Window(comm, self._reading + 2, np.int64)
        self._rows.local[: self._length] = 0  # first row only: memory of rows that are never used is never committed
        self._rows.release(0, self._length)
        self._words.local[:] = 0
        self._words.sync()
        self.serial = 0
        self._current = 0
        self._claims = 0  # until the current row was made so
        self._claimed = [0] * self._n_rows  # how often each row was claimed before it was replaced
        self._dead: set[int] = set()
        self._suspects: dict[int, set[int]] = {}  # of a replaced row: living readers that may still have a claim
        comm.Barrier()

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
            False if no row is free because slow readers still copy all others; the latest publication then stays
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
        self._fill(row, vector, weight, extra)
        self._words.local[self._serials + row] = serial
        self._words.sync()
        self._make_current(row)
        self.serial = serial
        return True

    def _fill(self, row: int, vector: torch.Tensor, weight: float, extra: torch.Tensor | None) -> None:
        self._row(row)[: self._size] = vector
        if extra is not None:
            self._row(row)[self._size : -1] = extra
        self._row(row)[-1] = weight
        self._rows.release(row * self._length, (row + 1) * self._length)

    def forget(self, rank: int) -> None:
        """Do not wait for a rank that died, so that the row it was reading can be filled."""
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
        if not 0 <= reader <= self._n_ranks:
            raise ValueError(f"reader {reader}: must be one of 0 to {self._n_ranks}")
        if peer == self._rank == reader:  # no claim is needed in the thread that publishes
            own = self._row(self._current)
            into[:] = own[: self._size]
            if extra is not None:
                extra[:] = own[self._size : -1]
            if weight is not None:
                weight[:] = own[-1]
            return self.serial
        with self._claimed_row(peer, reader) as row:
            return self._copy(peer, row, into, weight, extra)

    def serial_of(self, peer: int, reader: int) -> int:
        """Return the serial number of what a `read` would copy."""
        with self._claimed_row(peer, reader) as row:
            return self._serial_in(peer, row)

    # ---- the owner's side ----

    def _free_row(self) -> int | None:
        if self._n_rows == UNREAD_ROWS:
            return self._current
        row = self._unclaimed()
        if row is None and self._dead:
            self._discount_the_dead()
            row = self._unclaimed()
        return row

    def _unclaimed(self) -> int | None:
        self._words.sync()
        return next((row for row in self._replaced() if self._n_readers(row) == 0), None)

    def _replaced(self) -> list[int]:
        return [row for row in range(self._n_rows) if row != self._current]

    def _n_readers(self, row: int) -> int:
        """Return the number of claims of a replaced row that are not done."""
        return self._claimed[row] - int(self._words.local[self._done + row])

    def _make_current(self, row: int) -> None:
        before = self._words.fetch_add(row - self._current, self._rank, CURRENT)
        claims, _ = self._unpack(before)
        self._claimed[self._current] += claims - self._claims
        self._current, self._claims = row, claims
        self._suspects.pop(row, None)

    def _discount_the_dead(self) -> None:
        """Count the claims of readers that died as done, as far as they are known."""
        living = {reader for reader in range(self._n_ranks + 1) if reader % self._n_ranks not in self._dead}
        idle = {reader for reader in living - {self._rank} if not self._reads_from_here(reader)} | {self._rank}
        self._words.sync()  # what idle readers have finished is counted now
        for row in self._replaced():
            if n_readers := self._n_readers(row):
                suspects = self._suspects.setdefault(row, living) & living - idle
                self._suspects[row] = suspects
                if not suspects:
                    self._claimed[row] -= n_readers

    def _reads_from_here(self, reader: int) -> bool:
        evaluates, rank = divmod(reader, self._n_ranks)
        return bool(self._words.get_word(rank, self._reading + evaluates) == 1 + self._rank)

    def _row(self, row: int) -> torch.Tensor:
        return self._rows.local[row * self._length : (row + 1) * self._length]

    # ---- the reader's side; scratch memory is allocated in each call, since readers may be threads ----

    def _say_reading(self, reader: int, peer: int) -> None:
        self._words.local[self._reading + reader // self._n_ranks] = peer
        self._words.sync()

    @contextmanager
    def _claimed_row(self, peer: int, reader: int) -> Iterator[int]:
        """Hold the current row of `peer`; give its number."""
        self._say_reading(reader, 1 + peer)
        row = self._claim(peer)
        yield row
        self._finish(peer, row)
        self._say_reading(reader, 0)

    def _claim(self, peer: int) -> int:
        """Claim the current row, which then stays unchanged until `_finish`; return it."""
        _, row = self._unpack(self._words.fetch_add(self._n_rows, peer, CURRENT))
        return row

    def _copy(
        self,
        peer: int,
        row: int,
        into: torch.Tensor,
        weight: torch.Tensor | None = None,
        extra: torch.Tensor | None = None,
    ) -> int:
        """Copy a row; return its serial number."""
        size = self._sizes[peer]
        begin = row * (size + self._extra + 1)
        self._rows.get(into, peer, begin)
        if extra is not None and self._extra:
            self._rows.get(extra, peer, begin + size)
        if weight is not None:
            self._rows.get(weight, peer, begin + size + self._extra)
        serial = np.zeros(1, np.int64)
        self._words.get(serial, peer, self._serials + row)
        self._rows.flush(peer)  # first: while it waits, it begins further pieces
        self._words.flush(peer)
        return int(serial[0])

    def _serial_in(self, peer: int, row: int) -> int:
        """Return the serial number of what is in a claimed row."""
        return int(self._words.get_word(peer, self._serials + row))

    def _finish(self, peer: int, row: int) -> None:
        self._words.fetch_add(1, peer, self._done + row)

    # ---- both ----

    def _unpack(self, word: np.int64) -> tuple[int, int]:
        """Return (claims, row)."""
        return divmod(int(word), self._n_rows)

    def _check(self, vector: torch.Tensor, size: int) -> None:
        dtype = self._rows.local.dtype
        if vector.shape != (size,) or vector.dtype != dtype:
            raise ValueError(f"{vector.dtype}{list(vector.shape)}: must be {dtype}[{size}]")

    def free(self) -> None:
        """Free the windows; collective, and harmless when repeated. No rank may still be reading."""
        self._rows.free()
        self._words.free()
