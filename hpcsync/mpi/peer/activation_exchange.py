"""Where layers are separated: how activations come to the fully-connected workers, and their gradients back.

Each piece of a batch is put, one-sided, to where it is computed with: a convolution worker's rows to their place among
those of all that its fully-connected worker serves, beside them their labels; later the rows' gradients into the
convolution worker's own window. A thread puts, and says in a message that the piece is there, while its owner computes.

Nothing is overwritten too early. A convolution worker sends rows again when it has been given the gradients of the
ones before, which its fully-connected worker sends when it has computed with them; and is given gradients again when it
has sent rows again, which it does when it has computed with those before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.background_thread import Background
from hpcsync.mpi.transport.mailbox import Inbox, Outbox
from hpcsync.planning.layer_groups import Groups
from hpcsync.trace.schema import Phase

ALIGNED = 16  # bytes: labels of several types lie one after the other


class Rows(NamedTuple):
    """One tensor of a batch, without its first dimension, which is that of the samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.size * self.dtype.itemsize


class ActivationExchange:
    """Both sides of it; collective over the link's communicator.

    rows:        of a convolution worker's batch. pieces: equal ones, in which they cross.
    activations: at the cut. labels: of the other tensors of a batch.
    waited_s:    seconds that this worker has waited in this iteration for what others compute.
    last:        whether the other side has said that the iteration is the last one. halt: that all halt after it.
    """

    def __init__(
        self, link: PeerChannel, groups: Groups, rows: int, pieces: int, activations: Rows, labels: Sequence[Rows]
    ) -> None:
        self._comm, self._groups = link.comm, groups
        self._backoff = link.patience_of_its_own()
        self._rows, self._activations, self._labels = rows // pieces, activations, labels
        worker = link.comm.rank
        self._is_fc = groups.is_fc(worker)
        fc = worker if self._is_fc else groups.fc_of(worker)
        self._others: Sequence[int] = groups.served(fc) if self._is_fc else [fc]
        self._n_served = len(groups.served(fc))
        n_here = len(self._others) if self._is_fc else 1
        count = n_here * rows * activations.size
        self._window = link.transport.window(link.comm, count, activations.dtype)
        self._label_begins = [0]
        for label in labels:
            size = self._n_served * rows * label.n_bytes
            self._label_begins.append(self._label_begins[-1] + -(-size // ALIGNED) * ALIGNED)
        n_octets = self._label_begins[-1] if self._is_fc else 0
        self._label_window = link.transport.window(link.comm, n_octets, torch.uint8)
        self._phases = link.phases
        self._inbox = Inbox(self._comm, messages.TAG_ACTIVATION, messages.ACTIVATION)
        self._outbox = Outbox(self._comm, messages.TAG_ACTIVATION, messages.ACTIVATION)
        self._background = Background()
        self._come = [0] * pieces  # of each piece: how many have sent theirs, and it is not taken yet
        self._gone: int | None = None  # a worker that sends nothing more
        self.waited_s = 0.0
        self.last = self.halt = False

    # ---- a convolution worker's side ----

    def send(self, piece: int, activations: torch.Tensor, labels: Sequence[torch.Tensor]) -> None:
        """This piece's rows, shape (rows / pieces, *activations), and their labels, to the fully-connected worker."""
        fc = self._others[0]
        place = piece * self._n_served + self._groups.served(fc).index(self._comm.rank)
        # Tensors are held until they are put: the thread's calls hold them.
        for tensor, rows in zip((activations, *labels), (self._activations, *self._labels), strict=True):
            if (len(tensor), *Rows(tuple(tensor.shape[1:]), tensor.dtype)) != (self._rows, *rows):
                raise RuntimeError(
                    f"a batch has {tensor.dtype}{list(tensor.shape)} where others have "
                    f"{rows.dtype}{[self._rows, *rows.shape]}: where layers are separated all must be alike"
                )
        vector = activations.detach().contiguous().view(-1)
        octets = [label.detach().contiguous().view(-1).view(torch.uint8) for label in labels]
        cuda.ready(vector)

        def put() -> None:
            self._window.release(0, 0)  # of the gradients that were here
            self._window.put(vector, fc, place * vector.numel())
            for begin, label in zip(self._label_begins, octets, strict=False):
                self._label_window.put(label, fc, begin + place * label.numel())
            self._window.flush(fc)
            self._label_window.flush(fc)
            self._outbox.send(fc, (messages.ActivationKind.PIECE, self._comm.rank, piece, False, False))

        self._background.submit(put)

    def gradient(self, piece: int) -> torch.Tensor:
        """Wait for the gradients of this piece's rows, shape (rows / pieces, *activations); valid until `send`."""
        self._await(piece)
        size = self._rows * self._activations.size
        self._window.acquire(piece * size, (piece + 1) * size)
        return self._window.local[piece * size : (piece + 1) * size].view(self._rows, *self._activations.shape)

    # ---- a fully-connected worker's ----

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Activations and labels of all pieces, in the window, the first dimension their rows: piece after piece, and
        within it worker after worker. What is there of a piece is to be waited for."""
        n_rows = len(self._come) * self._n_served * self._rows
        found = [self._window.local.view(n_rows, *self._activations.shape)]
        for begin, label in zip(self._label_begins, self._labels, strict=False):
            octets = self._label_window.local[begin : begin + n_rows * label.n_bytes]
            found.append(octets.view(label.dtype).view(n_rows, *label.shape))
        return tuple(found)

    def wait(self, piece: int) -> None:
        """Until all rows of this piece are there."""
        self._await(piece)
        size = self._n_served * self._rows * self._activations.size
        self._window.acquire(piece * size, (piece + 1) * size)
        self._label_window.acquire(0, len(self._label_window.local))

    def give_back(self, piece: int, gradients: torch.Tensor, last: bool, halt: bool) -> None:
        """The gradients of this piece's rows, of their shape, to whom they belong. Nobody reads the rows any more."""
        size = self._rows * self._activations.size
        parts = gradients.contiguous().view(self._n_served, size)
        cuda.ready(parts)

        def put() -> None:
            self._window.release(0, 0)
            for worker, part in zip(self._others, parts, strict=True):
                self._window.put(part, worker, piece * size)
            for worker in self._others:
                self._window.flush(worker)
                self._outbox.send(worker, (messages.ActivationKind.PIECE, self._comm.rank, piece, last, halt))

        self._background.submit(put)

    # ---- both ----

    @property
    def sent_bytes(self) -> int:
        """That this worker sends across in an iteration."""
        per_row = self._activations.n_bytes + (0 if self._is_fc else sum(label.n_bytes for label in self._labels))
        return len(self._come) * self._rows * per_row * (self._n_served if self._is_fc else 1)

    def _await(self, piece: int) -> None:
        begin_s, needed = time.perf_counter(), len(self._others)
        self._phases.enter(Phase.WAITING)

        def complete() -> bool | None:
            self._background.check()  # what cannot be sent is not answered
            self._hear()
            if self._come[piece] < needed and self._gone is not None:
                raise RuntimeError(
                    f"worker {self._gone} makes no further iteration, but this one does: where layers are separated "
                    "all workers make as many; to end earlier give connect a stop"
                )
            return self._come[piece] >= needed or None

        self._backoff.until(complete)
        self._come[piece] = 0
        self._phases.enter(Phase.COMPUTING)
        self.waited_s += time.perf_counter() - begin_s

    def _hear(self) -> None:
        while (said := self._inbox.poll()) is not None:
            kind, worker, piece, last, halt = said
            if kind == messages.ActivationKind.LEFT:
                self._gone = worker
            else:
                self._come[piece] += 1
                self.last, self.halt = bool(last), bool(halt)

    def finish(self) -> None:
        """Until everything that was to be sent in this iteration is."""
        self._background.wait()

    def leave(self) -> None:
        """Say that this worker sends nothing more."""
        for worker in self._others:
            self._outbox.send(worker, (messages.ActivationKind.LEFT, self._comm.rank, 0, False, False))

    def free(self) -> None:
        """Collective."""
        self._background.close()
        self._outbox.free()
        self._inbox.free()
        self._window.free()
        self._label_window.free()
