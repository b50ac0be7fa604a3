"""Layer separation: transfer of activations to the fully-connected workers, and of their gradients back.

Each piece (micro-batch) of a batch is put one-sided into the window of the rank that processes it: a convolution
worker's rows go to their place among those of all workers that its fully-connected worker serves, with their labels
beside them; later the gradients of the rows go into the convolution worker's window. A background thread puts the piece
and notifies the target by a message, while the owner of the piece computes.

Notes
-----
No buffer is overwritten too early. A convolution worker sends rows again only after it has received the gradients of
the previous ones, which its fully-connected worker sends after processing these. A fully-connected worker returns
gradients again only after new rows have arrived, which a convolution worker sends after processing the previous
gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.transport import cuda, messages
from hpcsync.mpi.transport.background_thread import Background
from hpcsync.mpi.transport.messages import Inbox, Outbox
from hpcsync.planning.layer_groups import Groups
from hpcsync.trace.schema import Phase

ALIGNED = 16  # bytes; labels of several dtypes are stored one after the other


class Rows(NamedTuple):
    """Shape and dtype of one tensor of a batch, without the first dimension (samples)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of elements per sample."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes per sample."""
        return self.size * self.dtype.itemsize


class ActivationExchange:
    """Both sides of the exchange; created collectively over the channel's communicator.

    Parameters
    ----------
    link
        Channel of the run.
    groups
        Assignment of workers to the two groups.
    rows
        Batch size of a convolution worker.
    pieces
        Number of equal pieces in which a batch is transferred.
    activations
        Activations at the cut.
    labels
        The other tensors of a batch.

    Attributes
    ----------
    waited_s
        Seconds in which this worker was blocked by the other group in this iteration.
    last
        True if the other group has declared this iteration the last one.
    halt
        True if all workers halt after this iteration.
    """

    def __init__(
        self, link: PeerChannel, groups: Groups, rows: int, pieces: int, activations: Rows, labels: Sequence[Rows]
    ) -> None:
        self._comm, self._groups = link.comm, groups
        self._backoff = link.own_backoff()
        self._rows, self._activations, self._labels = rows // pieces, activations, labels
        worker = link.comm.rank
        self._is_fc = groups.is_fc(worker)
        fc = worker if self._is_fc else groups.fc_of(worker)
        self._others: Sequence[int] = groups.served(fc) if self._is_fc else [fc]
        self._n_served = len(groups.served(fc))
        count = len(self._others) * rows * activations.size
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
        self._device, self._stream = link.transport.device, cuda.new_stream(link.transport.device)
        self._n_arrived = [0] * pieces  # per piece: number of workers whose rows have arrived and are not yet processed
        self._left_worker: int | None = None  # a worker that sends nothing more
        self.waited_s = 0.0
        self.last = self.halt = False

    # ---- a convolution worker's side ----

    def send(self, piece: int, activations: torch.Tensor, labels: Sequence[torch.Tensor]) -> None:
        """Send a piece to the fully-connected worker, in the background.

        Parameters
        ----------
        piece
            Index of the piece.
        activations
            Its rows, shape (rows / pieces, *activations).
        labels
            Labels of these rows.

        Raises
        ------
        RuntimeError
            If a tensor differs in shape or dtype from those of the other workers.
        """
        fc = self._others[0]
        place = piece * self._n_served + self._groups.served(fc).index(self._comm.rank)
        # The closure keeps the tensors alive until they have been put.
        for tensor, rows in zip((activations, *labels), (self._activations, *self._labels), strict=True):
            if (len(tensor), *Rows(tuple(tensor.shape[1:]), tensor.dtype)) != (self._rows, *rows):
                raise RuntimeError(
                    f"a batch has {tensor.dtype}{list(tensor.shape)}: with separated layers all batches must have "
                    f"{rows.dtype}{[self._rows, *rows.shape]}"
                )
        vector = activations.detach().contiguous().view(-1)
        octets = [label.detach().contiguous().view(-1).view(torch.uint8) for label in labels]
        cuda.ready(vector)

        def put() -> None:
            self._window.release(0, 0)  # the gradients in this window have been read
            self._window.put(vector, fc, place * vector.numel())
            for begin, label in zip(self._label_begins, octets, strict=False):
                self._label_window.put(label, fc, begin + place * label.numel())
            self._window.flush(fc)
            self._label_window.flush(fc)
            self._outbox.send(fc, (messages.ActivationKind.PIECE, self._comm.rank, piece, False, False))

        self._begin(put)

    def gradient(self, piece: int) -> torch.Tensor:
        """Wait for the gradients of a piece.

        Returns
        -------
        torch.Tensor
            Gradients of the piece's rows, shape (rows / pieces, *activations); valid until the next `send`.
        """
        self._await(piece)
        size = self._rows * self._activations.size
        self._window.acquire(piece * size, (piece + 1) * size)
        return self._window.local[piece * size : (piece + 1) * size].view(self._rows, *self._activations.shape)

    # ---- a fully-connected worker's side ----

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return views of the activations and labels of all pieces in the window.

        The first dimension is that of the rows: piece by piece, and within a piece worker by worker. The data of a
        piece is valid after `wait`.
        """
        n_rows = len(self._n_arrived) * self._n_served * self._rows
        found = [self._window.local.view(n_rows, *self._activations.shape)]
        for begin, label in zip(self._label_begins, self._labels, strict=False):
            octets = self._label_window.local[begin : begin + n_rows * label.n_bytes]
            found.append(octets.view(label.dtype).view(n_rows, *label.shape))
        return tuple(found)

    def wait(self, piece: int) -> None:
        """Wait until all rows of a piece have arrived."""
        self._await(piece)
        size = self._n_served * self._rows * self._activations.size
        self._window.acquire(piece * size, (piece + 1) * size)
        self._label_window.acquire(0, len(self._label_window.local))

    def return_gradients(self, piece: int, gradients: torch.Tensor, last: bool, halt: bool) -> None:
        """Send the gradients of a piece's rows to their convolution workers, in the background.

        The rows must not be read any more.

        Parameters
        ----------
        piece
            Index of the piece.
        gradients
            Gradients of its rows, of their shape.
        last
            True if this iteration is the last one.
        halt
            True if all workers halt after this iteration.
        """
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

        self._begin(put)

    # ---- both sides ----

    def _begin(self, put: Callable[[], None]) -> None:
        """Put in the background; on a GPU beside the owner's computation, which is on another stream."""
        self._background.submit(cuda.after_this(put, self._device, self._stream))

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker sends to the other group in an iteration."""
        per_row = self._activations.n_bytes + (0 if self._is_fc else sum(label.n_bytes for label in self._labels))
        return len(self._n_arrived) * self._rows * per_row * len(self._others)

    def _await(self, piece: int) -> None:
        begin_s, needed = time.perf_counter(), len(self._others)
        self._phases.enter(Phase.WAITING)

        def complete() -> bool:
            self._background.check()  # a send that failed gets no answer
            self._poll()
            if self._n_arrived[piece] < needed and self._left_worker is not None:
                raise RuntimeError(
                    f"worker {self._left_worker} makes no further iteration, but this one does: with separated layers "
                    "all workers must make equally many; to end earlier pass a stop to connect"
                )
            return self._n_arrived[piece] >= needed

        self._backoff.until(complete)
        self._n_arrived[piece] = 0
        self._phases.enter(Phase.COMPUTING)
        self.waited_s += time.perf_counter() - begin_s

    def _poll(self) -> None:
        while (message := self._inbox.poll()) is not None:
            kind, worker, piece, last, halt = message
            if kind == messages.ActivationKind.LEFT:
                self._left_worker = worker
            else:
                self._n_arrived[piece] += 1
                self.last, self.halt = bool(last), bool(halt)

    def finish(self) -> None:
        """Wait until everything that this iteration sends has been sent."""
        self._background.wait()

    def leave(self) -> None:
        """Notify the other group that this worker sends nothing more."""
        for worker in self._others:
            self._outbox.send(worker, (messages.ActivationKind.LEFT, self._comm.rank, 0, False, False))

    def free(self) -> None:
        """Free windows and messages; collective."""
        self._background.close()
        self._outbox.free()
        self._inbox.free()
        self._window.free()
        self._label_window.free()
