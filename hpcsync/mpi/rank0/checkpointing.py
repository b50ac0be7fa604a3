"""Rank 0's part in checkpoints: when one is due, what is kept back meanwhile, and when everybody has written."""

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


class Checkpointer:
    """A checkpoint is of a moment at which nothing is on its way. So when one is due, no report is heard any more: the
    workers that compute push, one after the other, and wait. When all do, every rank writes what it has. Then what was
    kept back is heard, as late as it is, and the run goes on; or another does, from there.

    run: what server 0 knows of the run at this moment, without the reports that are kept back.
    unheard: these reports, of the checkpoint from which the run goes on. now_s, version: where it begins.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: Checkpoint,
        run: Callable[[], Mapping[str, Any]],
        unheard: Iterable[Record],
        now_s: float,
        version: int,
    ) -> None:
        self.unheard = deque(unheard)
        self.holding = False
        self.suspending = False  # whether the run ends with the next checkpoint
        self.number = number_of(checkpoints.resumed)
        """Of the last checkpoint that was begun."""
        self._checkpoints = checkpoints
        self._settings = settings
        self._run = run
        self._last = (now_s, version)
        self._asked = False
        self._missing: set[int] | None = None  # ranks that have not written yet; None before they are told to
        self._spoiled = False  # somebody has died meanwhile

    def ask(self, *, suspending: bool) -> None:
        """Make one as soon as possible. suspending: and end the run with it."""
        self._asked, self.suspending = True, suspending

    def hold_if_due(self, now_s: float, version: int) -> None:
        """From now on keep reports back, if it is time."""
        since_s, since_version = self._last
        if self._asked or self._settings.due(now_s - since_s, version - since_version):
            self.holding, self._asked, self._last = True, False, (now_s, version)

    def keeps_back(self, record: Record) -> bool:
        """Whether this report is one for later; then it is taken."""
        if self.holding and record[0] in (messages.InfoKind.PUSHED, messages.InfoKind.LEFT, messages.InfoKind.JOINED):
            self.unheard.append(record)
            return True
        return False

    def can_begin(self, computing: Collection[int]) -> bool:
        """Whether everybody waits of those who, as far as was heard, compute."""
        waiting = {record[1] for record in self.unheard}
        return self.holding and self._missing is None and waiting.issuperset(computing)

    def begin(self, ranks: Iterable[int]) -> int:
        """These others are about to write; the checkpoint's number."""
        self.number += 1
        self._missing = set(ranks)
        self._checkpoints.begin(self.number)
        return self.number

    def saved(self, rank: int) -> None:
        """One of them has."""
        assert self._missing is not None
        self._missing.discard(rank)

    def lost(self, rank: int) -> None:
        """One of all has died: nothing comes of this checkpoint, but of the next as soon as the run goes on."""
        self._asked = True
        if self._missing is None:
            self.holding = False
        else:
            self._missing.discard(rank)
            self._spoiled = True

    def commit_if_complete(self) -> bool:
        """Whether all have; then the checkpoint is there. Raises Suspended where the run is to end with it."""
        if self._missing is None or self._missing:
            return False
        if self._spoiled:
            self.holding, self._missing, self._spoiled = False, None, False
            self.number -= 1
            return False
        self._checkpoints.write(self.number, RUN, {**self._run(), "unheard": list(self.unheard)})
        self._checkpoints.commit(self.number)
        self.holding, self._missing = False, None
        if self.suspending:
            raise Suspended(f"checkpoint {self.number}")
        return True


def heed(saver: Checkpointer | None, signum: int, *, ending: bool) -> None:
    """A signal has come: make a checkpoint, after SIGTERM the last. saver: None where there are none to be. ending: the
    run is about to end. Raises Interrupted where it is to end at once."""
    if saver is None or signum == signal.SIGINT or ending or saver.suspending:
        interrupt(signum)
    else:
        saver.ask(suspending=signum == signal.SIGTERM)
