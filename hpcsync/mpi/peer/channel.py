"""Communication of every rank in a run without servers: communicator, clock, published replica, messages to rank 0."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import messages
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.clock import Clock
from hpcsync.mpi.transport.messages import Inbox, Outbox
from hpcsync.mpi.transport.published_replica import PEERS_ROWS, PublishedReplica
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import Deaths
from hpcsync.mpi.transport.worker_state import WorkerStates
from hpcsync.paradigms.records import StepInfo
from hpcsync.training.buffers import WORD_BYTES


class PeerChannel:
    """Communication of one rank, created collectively over a private duplicate of `comm`.

    Ranks send step infos to rank 0 and receive its commands: stop, halt for a checkpoint, all ranks have ended, and
    remove a worker that has died.

    Parameters
    ----------
    comm
        Communicator of all ranks.
    size, dtype
        Number of elements and dtype of the flat weights.
    transport
        Kind of the tensor windows.
    tolerant
        True if the run continues after the death of a worker.
    buffer_words
        Words of the model's buffers, which are published with the weights.
    published_rows
        Rows for the published weights, by who reads them; see `PublishedReplica`.

    Attributes
    ----------
    died
        Workers that have died and have not been handled yet; the session removes them.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        size: int,
        dtype: torch.dtype,
        transport: Transport = HOST,
        *,
        tolerant: bool = False,
        buffer_words: int = 0,
        published_rows: int = PEERS_ROWS,
    ) -> None:
        self.comm = comm.Dup()
        self.transport = transport
        self.deaths = Deaths(self.comm, tolerated=tolerant)
        self.died: list[int] = []  # workers, until the session removes them from its exchange
        self.backoff = Backoff(self.comm, passive=transport.passive, deaths=self.deaths)
        extra = buffer_words * WORD_BYTES // dtype.itemsize
        self.published = PublishedReplica(self.comm, size, dtype, transport, extra=extra, n_rows=published_rows)
        self.phases = WorkerStates(self.comm, one_node=self.backoff.one_node)
        self.clock: Clock
        self.stop_requested = False
        self.halt_requested = False
        self.all_ended = False
        self._checkpoint_number: int | None = None  # number of the checkpoint to write
        self._commands = Inbox(self.comm, messages.TAG_COMMAND, messages.PEER_COMMAND, self.deaths)
        self._infos = Outbox(self.comm, messages.TAG_INFO, messages.STEP_INFO, self.deaths)
        self._inboxes, self._outboxes = [self._commands], [self._infos]

    def start(self, begin_s: float = 0.0) -> list[tuple[int, str, float, float]] | None:
        """Start the clocks of all ranks at once.

        Parameters
        ----------
        begin_s
            Time of rank 0 at which the run begins or is resumed, in seconds.

        Returns
        -------
        list or None
            On rank 0, rows of the trace's ``/clocks``.
        """
        self.clock = Clock(self.comm, begin_s)
        return self.clock.rows(self.comm)

    # ---- every rank ----

    def step_info(self, exchanged: StepInfo, rates: Sequence[tuple[int, float]] = ()) -> None:
        """Send a step info to rank 0, after the parameter groups whose learning rates have changed."""
        for change in rates:
            self._infos.send(0, (messages.StepInfoKind.RATE, *messages.rate_change(exchanged, *change)))
        self._infos.send(0, (messages.StepInfoKind.STEPPED, *exchanged))

    def send_status(self, kind: int) -> None:
        """Send a status to rank 0: ended, settled, failed, halted or saved."""
        self._infos.send(0, (kind, *StepInfo(self.comm.rank, 0)))

    def poll_commands(self) -> None:
        """Process rank 0's commands that have arrived."""
        while (command := self._commands.poll()) is not None:
            kind, number = command
            if kind in (messages.PeerCommandKind.STOP, messages.PeerCommandKind.ALL_ENDED):
                self.stop_requested = True
                self.all_ended = self.all_ended or kind == messages.PeerCommandKind.ALL_ENDED
            elif kind == messages.PeerCommandKind.REMOVE:
                self.published.forget(number)
                self.died.append(number)
            elif kind == messages.PeerCommandKind.SAVE:
                self._checkpoint_number = number
            else:
                self.halt_requested, self._checkpoint_number = kind == messages.PeerCommandKind.HALT, None

    def halt(self, write: Callable[[int], None]) -> None:
        """Halt until rank 0 continues the run, and write a checkpoint in between unless rank 0 abandons it.

        Parameters
        ----------
        write
            Writes this rank's part of the checkpoint; called with the checkpoint's number once all ranks have halted.
        """
        self.halt_requested = True  # a synchronous worker may halt before the command arrives
        self.send_status(messages.StepInfoKind.HALTED)
        self._poll_until(lambda: self._checkpoint_number is not None or not self.halt_requested)
        if self._checkpoint_number is not None:
            write(self._checkpoint_number)
            self.send_status(messages.StepInfoKind.SAVED)
            # Not until a halt is no longer requested: the next one may be due at once.
            self._poll_until(lambda: self._checkpoint_number is None)

    def _poll_until(self, holds: Callable[[], bool]) -> None:
        """Process rank 0's commands until this holds."""

        def poll() -> bool:
            self.poll_commands()
            return holds()

        self.backoff.until(poll)

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """Gather numbers from every rank; collective, and waits without blocking in MPI.

        Returns
        -------
        np.ndarray
            Shape (n_ranks, len(numbers)), float64.
        """
        own = np.array(numbers, np.float64)
        all_ranks = np.empty((self.comm.size, len(own)))
        gathering = self.comm.Iallgather(own, all_ranks)
        self.backoff.complete(gathering.Test)
        return all_ranks

    def wait_for_all(self) -> None:
        """Wait until rank 0 reports that every rank has ended."""
        self._poll_until(lambda: self.all_ended)

    # ---- rank 0's monitor, in a thread of its own ----

    def own_backoff(self) -> Backoff:
        """Return a Backoff for a separate thread."""
        return copy.copy(self.backoff)

    def infos(self) -> Inbox:
        """Return rank 0's inbox of step infos, which is freed with the channel."""
        self._inboxes.append(Inbox(self.comm, messages.TAG_INFO, messages.STEP_INFO, self.deaths))
        return self._inboxes[-1]

    def commands(self) -> Outbox:
        """Return rank 0's outbox of commands, which is freed with the channel."""
        self._outboxes.append(Outbox(self.comm, messages.TAG_COMMAND, messages.PEER_COMMAND, self.deaths))
        return self._outboxes[-1]

    def free(self) -> None:
        """Free all communication; collective and idempotent, returns when every rank has called it."""
        if self.comm == MPI.COMM_NULL:
            return
        for outbox in self._outboxes:
            outbox.free()
        self.published.free()
        self.phases.free()
        for inbox in self._inboxes:
            inbox.free()
        self.comm.Free()
