"""Checkpoints and restarts in virtual time: when all workers halt, and for how long the run then stands still.

As on real ranks, a checkpoint is of a moment at which all workers wait and nothing is in transit. After a death the run
resumes from its last checkpoint and makes again what it had made since: the same decisions, gradients and times. A
simulation therefore keeps them. Its workers halt, and it stands still until a restarted run would be as far.
"""

from __future__ import annotations

import math
from collections import deque

from hpcsync.config.job import Job
from hpcsync.core.coordinator import Recorder


class Halts:
    """When workers are asked to halt, and when they may continue.

    Parameters
    ----------
    job
        Job with a duration of checkpoints, or with deaths.
    trace
        If ranks die, receives rows of /starts and /clocks for every start of the run.

    Attributes
    ----------
    asked
        True from the moment at which workers are asked to halt until they continue.
    has_saved
        True if they have halted for a checkpoint latest, and no rank died meanwhile.
    """

    def __init__(self, job: Job, trace: Recorder) -> None:
        cluster = job.cluster
        self.asked = self.has_saved = False
        self._settings, self._checkpoint_s = job.checkpoint, cluster.checkpoint_s or 0.0
        self._deaths = deque(sorted((e.at_s or 0.0, e.restart_s or 0.0) for e in cluster.events if e.change == "die"))
        self._trace, self._n_ranks, self._n_starts = trace, cluster.ranks, 0
        self._saves = False  # if a checkpoint is due
        self._last = (0.0, 0)  # time and version from which on the next checkpoint is due
        self._saved = (0.0, 0)  # latest time at which the run was in the state of its last checkpoint; its version
        if self._deaths:
            self._record_start(0.0, 0)

    def ask_if_due(self, now_s: float, version: int, *, can_save: bool) -> None:
        """Ask the workers to halt if a checkpoint is due or a rank has died.

        Parameters
        ----------
        now_s
            Time in seconds.
        version
            Version of the weights.
        can_save
            False if there can be no further checkpoint.
        """
        since_s, since_version = self._last
        self._saves = can_save and self._settings.due(now_s - since_s, version - since_version)
        self.asked = self._saves or (bool(self._deaths) and self._deaths[0][0] <= now_s)
        if self._saves:
            due_s = since_s + (self._settings.seconds or math.inf)
            self._last = (max(due_s, self._saved[0]) if due_s <= now_s else now_s, version)

    def continues_s(self, now_s: float, version: int, seq: int, *, can_save: bool) -> float:
        """Return the time at which the workers, which have all halted now, may continue.

        The checkpoint that is due has been written then. If a rank dies before, the run resumes from the last one, and
        gets here again after as many seconds as since then.

        Parameters
        ----------
        now_s, version, can_save
            As for `ask_if_due`; a worker may have left since.
        seq
            Latest `seq` of the trace.
        """
        self._saves = self._saves and can_save
        saved_s, saved_version = self._saved
        end_s = now_s + self._checkpoint_s if self._saves else now_s
        resumed_s = -math.inf
        while self._deaths and (self._deaths[0][0] <= now_s or self._deaths[0][0] < end_s):
            died_s, restart_s = self._deaths.popleft()
            if died_s >= resumed_s:  # before, no rank is there that could die
                resumed_s = died_s + restart_s
                end_s = resumed_s + (now_s - saved_s)
                self._record_start(resumed_s, seq)
        self.has_saved = self._saves and resumed_s == -math.inf
        if resumed_s > -math.inf:
            self._saved = self._last = (resumed_s, saved_version)
        elif self._saves:
            self._saved = (end_s, version)
        return end_s

    def _record_start(self, now_s: float, seq: int) -> None:
        self._trace.append("starts", (self._n_starts, now_s, seq, "", ""))
        if self._n_starts:  # the rows of the first start are those of every simulation
            for rank in range(self._n_ranks):
                self._trace.append("clocks", (self._n_starts, rank, "virtual", 0.0, 0.0))
        self._n_starts += 1
