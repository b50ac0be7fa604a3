"""Checkpoints on rank 0: when one is due, which messages are deferred meanwhile, and when all ranks have saved."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from hpcsync.config.checkpoint import Checkpoint
from hpcsync.mpi.transport import messages
from hpcsync.run_dir.checkpoint import RUN, Checkpoints, number_of
from hpcsync.system.signals import Suspended, interrupt

Record = tuple[Any, ...]
_DEFERRED = (messages.InfoKind.PUSHED, messages.InfoKind.LEFT, messages.InfoKind.JOINED)


class Checkpointer:
    """Coordination of checkpoints, each taken at a moment at which no message is in flight.

    When a checkpoint is due, rank 0 stops handling push infos. The computing workers push one after the other and wait;
    when all of them wait, every rank saves its state. Rank 0 then handles the deferred push infos, late as they are,
    and the run continues; or another run resumes from there.

    Parameters
    ----------
    checkpoints
        The run's checkpoints on disk.
    settings
        When checkpoints are due.
    run
        Returns server 0's state of the run, without the deferred push infos.
    unheard
        Deferred push infos of the checkpoint from which the run is resumed.
    now_s
        Time at which this part of the run begins, in seconds.
    version
        Version of the weights at that time.
    dead
        Workers that died, now and later. What is deferred of them, which may come much later, is kept out of all
        checkpoints: a run that resumes must not handle it.

    Attributes
    ----------
    unheard : deque
        Deferred push infos, in order of arrival.
    holding : bool
        Whether push infos are being deferred.
    suspending : bool
        Whether the run ends with the next checkpoint.
    number : int
        Number of the latest checkpoint that was begun.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: Checkpoint,
        run: Callable[[], Mapping[str, Any]],
        unheard: Iterable[Record],
        now_s: float,
        version: int,
        dead: Collection[int],
    ) -> None:
        self.unheard = deque(unheard)
        self.holding = False
        self.suspending = False
        self.number = number_of(checkpoints.resumed)
        self._checkpoints = checkpoints
        self._settings = settings
        self._run = run
        self._last = (now_s, version)
        self._asked = False
        self._missing: set[int] | None = None  # ranks that have not saved yet; None before a checkpoint begins
        self._spoiled = False  # whether a rank died during the checkpoint
        self._dead = dead

    def ask(self, *, suspending: bool) -> None:
        """Request a checkpoint as soon as possible; with `suspending` the run ends with it."""
        self._asked, self.suspending = True, suspending

    def hold_if_due(self, now_s: float, version: int) -> None:
        """Start deferring push infos if a checkpoint is due.

        Those that the last one deferred are handled before, unless it was abandoned: else a run whose checkpoints take
        longer than from one to the next would make nothing else.
        """
        since_s, since_version = self._last
        is_due = self._settings.due(now_s - since_s, version - since_version)
        if self._asked or (is_due and not any(record[0] in _DEFERRED for record in self.unheard)):
            self.holding, self._asked, self._last = True, False, (now_s, version)

    def keeps_back(self, record: Record) -> bool:
        """Defer this record, received while `holding`, if it must wait for the checkpoint; return whether it was."""
        if record[0] in _DEFERRED:
            self.unheard.append(record)
            return True
        return False

    def deferred(self) -> set[int]:
        """Return the workers of which a push is deferred, so that their contributions are still to be used."""
        return {worker for kind, worker, *_ in self.unheard if kind == messages.InfoKind.PUSHED}

    def can_begin(self, computing: Collection[int]) -> bool:
        """Return whether all workers known to be computing wait for an answer, and the checkpoint has not begun."""
        waiting = {record[1] for record in self.unheard if record[0] in _DEFERRED}  # others name a rank
        return self._missing is None and waiting.issuperset(computing)

    def begin(self, ranks: Iterable[int]) -> int:
        """Begin the checkpoint that these other ranks will save; return its number."""
        self.number += 1
        self._missing = set(ranks)
        self._checkpoints.begin(self.number)
        return self.number

    def saved(self, rank: int) -> None:
        """Record that `rank` has saved its part, unless it died and said so before an abandoned checkpoint."""
        if self._missing is not None:
            self._missing.discard(rank)

    def lost(self, rank: int) -> None:
        """Record that `rank` died: this checkpoint is abandoned, and a new one is made as soon as the run continues."""
        self._asked = True
        if self._missing is None:
            self.holding = False
        else:
            self._missing.discard(rank)
            self._spoiled = True

    def commit_if_complete(self) -> bool:
        """Commit the checkpoint if all ranks have saved; return whether it was committed.

        Raises
        ------
        Suspended
            If the run is to end with this checkpoint.
        """
        if self._missing is None or self._missing:
            return False
        if self._spoiled:
            self.holding, self._missing, self._spoiled = False, None, False
            self.number -= 1
            return False
        unheard = [record for record in self.unheard if record[1] not in self._dead]
        self._checkpoints.write(self.number, RUN, {**self._run(), "unheard": unheard})
        self._checkpoints.commit(self.number)
        self.holding, self._missing = False, None
        if self.suspending:
            raise Suspended(f"checkpoint {self.number}")
        return True


def heed(saver: Checkpointer | None, signum: int, *, ending: bool) -> None:
    """React to a signal: request a checkpoint, after SIGTERM the last one.

    Parameters
    ----------
    saver
        The run's checkpoints; None if there are none.
    signum
        Number of the signal.
    ending
        Whether the run is about to end.

    Raises
    ------
    Interrupted
        If the run is to end at once.
    """
    if saver is None or signum == signal.SIGINT or ending or saver.suspending:
        interrupt(signum)
    else:
        saver.ask(suspending=signum == signal.SIGTERM)
