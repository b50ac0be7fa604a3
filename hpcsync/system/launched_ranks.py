"""Ranks of a launch on this node, as the process sees them that has started their launcher."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from hpcsync.system import process_cleanup
from hpcsync.system.process_cleanup import MARK
from hpcsync.system.rank_environment import all_on_node, expected_rank, expected_size, under_launcher
from hpcsync.system.signals import listeners, waiting_for_all

LOOK_S, LOST_S = 0.5, 2.0  # how often a start is looked at; how long ranks may take to end after each other
SCRIPT_LOST_S = 10.0  # those of a script: a process may hide its environment, and then looks as if it had ended
HUNG_S = 10.0  # how long a launcher without ranks may wait for a lock


class LaunchedRanks:
    """Ranks of a launch.

    Parameters
    ----------
    launcher
        Their launcher.
    mark
        Mark of the launch, in the environment of its processes.
    listening
        File to which ranks add themselves that listen (`signals.listeners`).
    suspends
        Whether they start a run, which all of them do. Ranks of another program may do without MPI, and end when they
        like; those of a script tell when they begin to wait for all others (`signals.telling_that_mpi_starts`).
    on_node
        Whether all ranks are on this node, and can be looked at.
    """

    def __init__(
        self, launcher: subprocess.Popen[bytes], mark: str, listening: Path, *, suspends: bool, on_node: bool
    ) -> None:
        self.launcher = launcher
        self._mark, self._listening, self._suspends, self._on_node = mark, listening, suspends, on_node
        self._was_told = False  # rank 0, to end in order
        self._seen: set[int] = set()  # ranks
        self._looked_s, self._missing_s = 0.0, math.inf  # at the start; since when one of them is missing
        self._locked_s = math.inf  # since when the launcher waits for a lock

    def pass_on(self, signum: int) -> bool:
        """Forward a signal to the ranks; return True if nothing else is to be done."""
        if signum == signal.SIGUSR1:
            if not self._on_node or self._all_catch(signum):  # else it would kill ranks that have nothing to save
                self.launcher.send_signal(signum)  # both MPI launchers forward it to all ranks
            return True
        if signum != signal.SIGTERM or self._was_told:
            return False
        if not (told := {listener.pid for listener in listeners(self._listening)}):
            return False
        self._was_told = True
        pids = [pid for pid, rank in self._running().items() if rank == 0 and pid in told and _catches(pid, signum)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return bool(pids)

    def lost_at_start(self) -> bool:
        """Return True if others wait for a rank on this node that ended `LOST_S` ago, or `SCRIPT_LOST_S` in a script.

        They wait within MPI_Init for ever if the launcher does not end them: a tolerant one does not, and MPICH's does
        not if the rank had not begun MPI_Init. A rank of a script may end before it is looked at.
        """
        now_s = time.monotonic()
        if not self._starts():
            self._missing_s = math.inf
        elif now_s - self._looked_s >= LOOK_S:
            self._looked_s, found = now_s, self._environments().values()
            running = {expected_rank(environ) for environ in found}
            self._seen |= running
            for environ in found:
                if not self._suspends and all_on_node(environ):
                    self._seen |= {*range(expected_size(environ) or 0)}
            self._missing_s = math.inf if self._seen <= running else min(self._missing_s, now_s)
        lost_s = LOST_S if self._suspends else SCRIPT_LOST_S
        return 0 in self._seen and now_s - self._missing_s >= lost_s and self._starts()

    def _starts(self) -> bool:
        return not self._listening.exists() if self._suspends else waiting_for_all(self._listening).exists()

    def hung(self) -> bool:
        """Return True if the launcher has waited for a lock for `HUNG_S` and no rank is on this node.

        Open MPI's tolerant launcher may wait for ever when several ranks end at the same moment with a status other
        than 0 (5.0.11: in 3 of 12 launches in which five ranks abort): it locks an object that it has freed.
        """
        now_s, waits = time.monotonic(), False
        with contextlib.suppress(OSError):  # the process has ended, or this is not Linux
            waits = "futex" in Path(f"/proc/{self.launcher.pid}/wchan").read_text()
        self._locked_s = min(self._locked_s, now_s) if waits else math.inf
        if now_s - self._locked_s < HUNG_S:
            return False
        self._locked_s = now_s
        return not self._running()

    def _all_catch(self, signum: int) -> bool:
        """Return True if each rank has a process with a handler of this signal."""
        ranks = self._running()
        return bool(ranks) and {*ranks.values()} == {rank for pid, rank in ranks.items() if _catches(pid, signum)}

    def _running(self) -> dict[int, int]:
        """Return the rank of each process of this launch on this node, those that ranks have started included."""
        return {pid: expected_rank(environ) for pid, environ in self._environments().items()}

    def _environments(self) -> dict[int, dict[str, str]]:
        found = process_cleanup.find(self._mark).items()
        return {pid: environ for pid, environ in found if environ[MARK] == self._mark and under_launcher(environ)}


def _catches(pid: int, signum: int) -> bool:
    """Return True if a process has a handler of a signal, as rank 0 has while its run is under way."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and int(caught[1], 16) >> signum - 1 & 1 == 1
    return False
