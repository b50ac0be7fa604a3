"""What every rank of a run without servers holds: communicator, clock, and the replica that it shows to the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.core.peer_coordinator import StepInfo
from hpcsync.mpi.transport import messages
from hpcsync.mpi.transport.backoff import Backoff
from hpcsync.mpi.transport.clock import Clock
from hpcsync.mpi.transport.mailbox import Inbox, Outbox
from hpcsync.mpi.transport.published_replica import PublishedReplica
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import Deaths, survivors
from hpcsync.mpi.transport.worker_state import WorkerStates


class PeerChannel:
    """Made collectively over a private duplicate of `comm`. size, dtype: of the flat weights.

    Ranks report to rank 0, and hear from it when to stop, when to halt for a checkpoint, that all have ended, and who
    has died. tolerant: whether the run then goes on.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        size: int,
        dtype: torch.dtype,
        transport: Transport = HOST,
        *,
        tolerant: bool = False,
    ) -> None:
        self.comm = comm.Dup()
        self.transport = transport
        self.deaths = Deaths(self.comm, tolerated=tolerant)
        self.died: list[int] = []  # workers, until somebody takes them from here
        self._tolerant = tolerant
        self.backoff = Backoff(self.comm, passive=transport.passive, deaths=self.deaths)
        self.published = PublishedReplica(self.comm, size, dtype, transport)
        self.phases = WorkerStates(self.comm, one_node=self.backoff.one_node)
        self.clock: Clock
        self.stop_requested = False
        self.halt_requested = False
        self.all_ended = False
        self._to_write: int | None = None  # the checkpoint with this number
        self._commands = Inbox(self.comm, messages.TAG_COMMAND, messages.PEER_COMMAND, self.deaths)
        self._infos = Outbox(self.comm, messages.TAG_INFO, messages.STEP_INFO, self.deaths)
        self._inbox: Inbox | None = None

    def start(self, begin_s: float = 0.0) -> list[tuple[int, str, float, float]] | None:
        """Everything is made: the run begins, or goes on from this time of rank 0, for all at once. On rank 0, rows of
        the trace's /clocks."""
        self.clock = Clock(self.comm, begin_s)
        return self.clock.rows(self.comm)

    # ---- every rank ----

    def step_info(self, exchanged: StepInfo) -> None:
        self._infos.send(0, (messages.StepInfoKind.STEPPED, *exchanged))

    def say(self, kind: int) -> None:
        """Report that this rank has left, is settled, or has failed; that it has halted, or written its part."""
        self._infos.send(0, messages.brief(messages.STEP_INFO, kind, self.comm.rank))

    def hear(self) -> None:
        """Take note of what rank 0 has said."""
        while (command := self._commands.poll()) is not None:
            kind, number = command
            if kind in (messages.PeerCommandKind.STOP, messages.PeerCommandKind.ALL_ENDED):
                self.stop_requested = True
                self.all_ended = self.all_ended or kind == messages.PeerCommandKind.ALL_ENDED
            elif kind == messages.PeerCommandKind.REMOVE:
                self.published.forget(number)
                self.died.append(number)
            elif kind == messages.PeerCommandKind.SAVE:
                self._to_write = number
            else:
                self.halt_requested, self._to_write = kind == messages.PeerCommandKind.HALT, None

    def halt(self, write: Callable[[int], None]) -> None:
        """Make no further iteration until rank 0 says so; before that, when all have halted, write this rank's part of
        the checkpoint with the number that it says, unless there is none after all."""
        self.halt_requested = True  # in step, others may have been told earlier
        self.say(messages.StepInfoKind.HALTED)

        def told() -> bool | None:
            self.hear()
            return self._to_write is not None or not self.halt_requested or None

        def continued() -> bool | None:
            self.hear()
            return not self.halt_requested or None

        self.backoff.until(told)
        if self._to_write is not None:
            write(self._to_write)
            self.say(messages.StepInfoKind.SAVED)
            self.backoff.until(continued)

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        """What every rank says, as many numbers each, shape (n_ranks, n_numbers); collective, and patient."""
        own = np.array(numbers, np.float64)
        all_ranks = np.empty((self.comm.size, len(own)))
        gathering = self.comm.Iallgather(own, all_ranks)
        self.backoff.until(lambda: gathering.Test() or None)
        return all_ranks

    def wait_for_all(self) -> None:
        """Until rank 0 says that every rank has left."""

        def ended() -> bool | None:
            self.hear()
            return self.all_ended or None

        self.backoff.until(ended)

    def together(self) -> Backoff:
        """Whose barrier is of all ranks, or of those that are left; collective over them."""
        return Backoff(survivors(self.comm)) if self._tolerant else self.backoff

    # ---- rank 0's monitor, in a thread of its own ----

    def patience_of_its_own(self) -> Backoff:
        return copy.copy(self.backoff)

    def infos(self) -> Inbox:
        """On rank 0: what all ranks report. It is withdrawn together with the link."""
        self._inbox = Inbox(self.comm, messages.TAG_INFO, messages.STEP_INFO, self.deaths)
        return self._inbox

    def commands(self) -> Outbox:
        """On rank 0: to tell ranks something."""
        return Outbox(self.comm, messages.TAG_COMMAND, messages.PEER_COMMAND, self.deaths)

    def free(self) -> None:
        """Collective, and harmless when repeated: returns when every rank has come here."""
        if self.comm == MPI.COMM_NULL:
            return
        self._infos.free()
        self.published.free()
        self.phases.free()
        for inbox in (self._commands, self._inbox):
            if inbox is not None:
                inbox.free()
        self.comm.Free()
