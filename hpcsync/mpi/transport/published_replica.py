"""A replica that every rank shows to all others: read one-sided, at any time, never torn, and nobody waits for anybody.

Each rank has a few rows of memory for its replica and, in a second window, words that say which row is to be read:

    current             serial * rows + row: the publication that stands, a count, and the row where it lies
    pin of each reader  row + 1 while that reader copies the row; ANY while it may be about to copy any row; 0 otherwise

These are hazard pointers, made of puts, gets and flushes alone. The reader: get `current`; put the pin; flush; get
`current` again; where that is still the same row, copy it and clear the pin. The writer: choose a row that is neither
current nor pinned; fill it; set `current`.

Why a row is never filled while somebody copies it. A writer that fills row r had set `current` to another row before
(the current one is never chosen), and only then, after a full fence, loaded the pins. A reader has stored its pin, and
only then, after a flush, loaded `current`. Stores before loads on either side: of the two loads at least one sees the
other's store. Either the reader finds that r is not current any more, and does not copy it, or the writer finds the
pin, and does not choose r. On the writer's side `Window.sync` is the fence; on the reader's side a flush means that the
put is in the target's memory before the next get begins. Words change as a whole: those of 8 bytes are aligned and
copied at once, as the words of a store's `done` are.
"""

from __future__ import annotations

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.window import Window

ROWS = 4  # one current, one to fill, two for slow readers
CURRENT = 0  # the word; the pin of reader i follows at 1 + i
ANY = -1
TRIES = 3  # of pinning one row, against an owner who publishes faster than a word goes there and back


class PublishedReplica:
    """This rank's flat replica for others to read, and theirs for this one.

    comm:  collective over it, `free` too. A reader is a number: each rank's own, and comm.size for one more on any one
           rank (an evaluator's thread). Readers may be threads beside the one that publishes, if MPI supports that.
    size:  elements of this rank's replica.
    dtype: theirs.

    Before the first publication there is one of zeros, with serial number 0.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, dtype: torch.dtype, transport: Transport = HOST) -> None:
        self._rank, self._readers = comm.rank, comm.size + 1
        self._sizes, self._n_rows = comm.allgather(size), min(comm.size + 2, ROWS)
        self._size = size
        self._rows = transport.window(comm, self._n_rows * (size + 1), dtype)  # the weight comes last
        self._words = Window(comm, 1 + self._readers, np.int64)
        self._rows.local[:size] = 0  # only what is shown: rows that are never needed are never committed
        self._rows.release(0, size + 1)
        self._words.local[:] = 0
        self._words.sync()
        self._dead: set[int] = set()
        comm.Barrier()

    @property
    def serial(self) -> int:
        """Of this rank's last publication."""
        return self._unpack(self._words.local[CURRENT])[0]

    def publish(self, vector: torch.Tensor, serial: int | None = None, weight: float = 1.0) -> bool:
        """Show a copy of `vector`, shape (size,), from now on.

        serial: greater than that of the last publication; by default the next number. weight: shown beside it.

        False where no row is free, because slow readers still hold all the others: the last publication stands. Raises
        ValueError for another shape or dtype, or a serial number that is not greater.
        """
        self._check(vector, self._size)
        row = self._free_row()
        serial = self.serial + 1 if serial is None else serial
        if serial <= self.serial:
            raise ValueError(f"serial number {serial} after {self.serial}")
        if row is None:
            return False
        self._row(row)[:-1] = vector
        self._row(row)[-1] = weight
        self._rows.release(row * (self._size + 1), (row + 1) * (self._size + 1))
        self._words.local[CURRENT] = serial * self._n_rows + row
        self._words.sync()
        return True

    def forget(self, rank: int) -> None:
        """This rank has died: what it was reading may be filled."""
        self._dead.add(rank)

    def read(self, peer: int, into: torch.Tensor, reader: int | None = None, weight: torch.Tensor | None = None) -> int:
        """Copy the publication of `peer` into `into`, of its replica's size; its serial number, which never goes back.

        weight: shape (1,), for what is shown beside it. reader: who reads, this rank by default; one reader may not
        read the same peer in two threads at once. Raises ValueError for another shape or dtype, or a reader that there
        is not.
        """
        self._check(into, self._sizes[peer])
        reader = self._rank if reader is None else reader
        if not 0 <= reader < self._readers:
            raise ValueError(f"reader {reader} is none of 0 to {self._readers - 1}")
        if peer == self._rank == reader:  # by the one who publishes
            serial, row = self._unpack(self._words.local[CURRENT])
            into[:] = self._row(row)[:-1]
            if weight is not None:
                weight[:] = self._row(row)[-1]
            return serial
        serial, row = self._pin(peer, reader)
        self._copy(peer, row, into, weight)
        self._set_pin(peer, reader, 0)
        return serial

    # ---- the owner's side ----

    def _free_row(self) -> int | None:
        self._words.sync()  # the full fence between the last store of `current` and these loads of the pins
        pins = self._pins()
        taken = {pin - 1 for pin in pins} | {self._unpack(self._words.local[CURRENT])[1]}
        return None if ANY in pins else next((row for row in range(self._n_rows) if row not in taken), None)

    def _pins(self) -> list[int]:
        pins: list[int] = self._words.local[1:].tolist()
        for rank in self._dead:
            pins[rank] = 0
        return pins

    def _row(self, row: int) -> torch.Tensor:
        return self._rows.local[row * (self._size + 1) : (row + 1) * (self._size + 1)]

    # ---- the reader's side; scratch memory is made for each call, since readers may be threads ----

    def _pin(self, peer: int, reader: int) -> tuple[int, int]:
        """(serial, row) of a publication that stays as it is until the pin is cleared; in a bounded number of steps."""
        _, row = self._current(peer)
        for _ in range(TRIES):
            self._set_pin(peer, reader, row + 1)
            serial, still = self._current(peer)
            if still == row:
                return serial, row
            row = still
        # The owner keeps ahead of us: for the moment of one more look it is not to fill any row.
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

    def _copy(self, peer: int, row: int, into: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        size = self._sizes[peer]
        self._rows.get(into, peer, row * (size + 1))
        if weight is not None:
            self._rows.get(weight, peer, row * (size + 1) + size)
        self._rows.flush(peer)

    # ---- both ----

    def _unpack(self, word: np.int64) -> tuple[int, int]:
        """(serial, row)."""
        return divmod(int(word), self._n_rows)

    def _check(self, vector: torch.Tensor, size: int) -> None:
        dtype = self._rows.local.dtype
        if vector.shape != (size,) or vector.dtype != dtype:
            raise ValueError(f"{vector.dtype}{list(vector.shape)} is not {dtype}[{size}]")

    def free(self) -> None:
        """Collective, and harmless when repeated; nobody may be reading any more."""
        self._rows.free()
        self._words.free()

    def __enter__(self) -> PublishedReplica:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()
