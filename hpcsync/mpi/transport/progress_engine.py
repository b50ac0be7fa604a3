"""Progress of one-sided transfers whose target computes: the method is measured and chosen when a run starts.

On one node, windows that MPI allocates need no help. In other windows, and between hosts over TCP, a get waits until
its target makes MPI calls, and a rank of a run without servers computes most of the time. There are three methods:

    passive     no help: a get from a rank that computes completes at once
    thread      a thread beside the computation makes MPI calls
    hooks       the computation makes MPI calls: it calls `poll` from time to time
"""

from __future__ import annotations

import atexit
import statistics
import sys
import threading
import time
from contextlib import suppress
from typing import Literal, get_args

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import NETWORK_CEILING_S, help_others
from hpcsync.mpi.transport.busy_target import Trial, farthest, while_busy
from hpcsync.mpi.transport.communicator import is_in_memory, takes_several_threads
from hpcsync.mpi.transport.tensor_window import HOST, Transport
from hpcsync.mpi.transport.ulfm import Deaths, RankFailed

Kind = Literal["passive", "thread", "hooks"]

BUSY_S = 0.04  # computation in a trial: far longer than a get takes, also where the machine is shared
TRIALS = 3  # trials of each kind; the median is used
GET_BYTES = 1 << 18
EDGE = 64  # size of the matrices multiplied in a trial, about 10 us each: as long as a layer of a small model takes
PASSIVE_SHARE = 0.75  # a get counts as passive if it completes within this share of the computation
THREAD_GAIN_MIN = 2.0  # a thread must make a get faster by at least this factor
THREAD_COST_MAX = (
    0.25  # and may slow the computation by at most this share; noise on a shared machine reaches half of it
)
# Switch interval of the Python interpreter; each MPI call of the thread may wait this long. The default is 5 ms.
SWITCH_S = 1e-4
POLL_S = 5e-4  # time between polls that make MPI calls


class ProgressEngine:
    """Method of progress chosen for all ranks, active until `close`.

    Parameters
    ----------
    comm
        Communicator of its own for the MPI calls; `close` frees it.
    device
        Device of the transfers.
    tolerant
        Whether the other ranks continue after a death.

    Attributes
    ----------
    kind : str
        Method in use.
    get_s_without : float or None
        Duration of a get from a rank that computes and makes no MPI calls, in seconds; None with one rank.
    get_s_with : float or None
        Duration of a get with the chosen method, in seconds; None for "passive".
    cost : float or None
        Share of the computation's speed that the method costs; None for "passive".
    """

    def __init__(self, comm: MPI.Intracomm, device: torch.device, tolerant: bool) -> None:
        self.kind: Kind = "passive"
        self.get_s_without: float | None = None
        self.get_s_with: float | None = None
        self.cost: float | None = None
        self._comm = comm
        self._deaths = Deaths(comm, tolerated=tolerant)
        self._device = device
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._interval_s = sys.getswitchinterval()
        self._next_s = float("inf")

    def attributes(self) -> dict[str, str | float | None]:
        """Return the attributes of the trace's root that describe the method."""
        return {
            "progression": self.kind,
            "progression_get_s_without": self.get_s_without,
            "progression_get_s_with": self.get_s_with,
            "progression_cost": self.cost,
        }

    def poll(self) -> None:
        """Make MPI calls if the method is "hooks" and `POLL_S` has passed; cheap enough to call often.

        Where MPI does not support several threads, only the thread that makes the other MPI calls may call this.
        """
        if (now_s := time.perf_counter()) >= self._next_s:
            help_others(self._comm, self._deaths)
            self._next_s = now_s + POLL_S

    def begin(self, kind: Kind) -> None:
        """Use this method from now on, instead of any other; local."""
        self._stop()
        self.kind = kind
        self._next_s = 0.0 if kind == "hooks" else float("inf")
        if kind == "thread":
            self._stopped.clear()
            self._thread = threading.Thread(target=self._work, daemon=True, name="progression")
            self._thread.start()
            self._interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, self._interval_s))
            atexit.register(self._stop)  # runs before MPI is finalised

    def _work(self) -> None:
        cuda.enter(self._device)
        with suppress(RankFailed):  # the other thread hears of it, too
            while not self._stopped.is_set():
                help_others(self._comm, self._deaths)
                time.sleep(NETWORK_CEILING_S)

    def _stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._interval_s)
            atexit.unregister(self._stop)

    def close(self) -> None:
        """Stop the method; collective, and harmless when repeated."""
        self._stop()
        self._next_s = float("inf")
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()


def choose(
    comm: MPI.Intracomm, wanted: str = "auto", transport: Transport = HOST, *, tolerant: bool = False
) -> ProgressEngine:
    """Choose, measure and start the method of progress that this transport needs; collective.

    Parameters
    ----------
    comm
        Communicator of the run; duplicated.
    wanted
        Method to use, or "auto" for the best one.
    transport
        Transport of the run's tensors.
    tolerant
        Whether the other ranks continue after a death.

    Returns
    -------
    ProgressEngine
        Active, and of the same kind on all ranks.

    Raises
    ------
    ValueError
        If `wanted` is unknown, or is "thread" and MPI lacks MPI_THREAD_MULTIPLE.
    """
    multiple = comm.allreduce(takes_several_threads(comm), MPI.LAND)
    if wanted not in ("auto", *get_args(Kind)) or (wanted == "thread" and not multiple):
        raise ValueError(
            f"no progress by {wanted!r}: must be auto, passive, hooks or, with MPI_THREAD_MULTIPLE only, thread"
        )
    progression = ProgressEngine(comm.Dup(), transport.device, tolerant)
    if comm.size == 1 or is_in_memory(comm):
        progression.begin("passive" if wanted == "auto" else wanted)  # type: ignore[arg-type]
        return progression
    target = farthest(comm)
    into = torch.zeros(GET_BYTES // 4, device=transport.device)
    matrix = np.ones((EDGE, EDGE), np.float32)
    with transport.window(comm, len(into) if comm.rank == target else 0, into.dtype) as window:

        def get() -> None:
            window.get(into, target, 0)
            window.flush(target)

        def compute() -> None:
            np.matmul(matrix, matrix)
            progression.poll()

        def trial(kind: Kind) -> Trial:
            progression.begin(kind)
            trials = [while_busy(comm, target, get, compute, BUSY_S) for _ in range(TRIALS)]
            return Trial(*(statistics.median(values) for values in zip(*trials, strict=True)))

        get() if comm.rank == 0 else None  # the first get sets up resources that later ones use
        without = trial("passive")
        progression.get_s_without = without.took_s
        for kind in _candidates(wanted, without, multiple, transport.device):
            if kind == "passive":
                progression.begin(kind)
                break
            found = trial(kind)
            progression.get_s_with = found.took_s
            progression.cost = max(0.0, 1 - found.rate / without.rate)
            if wanted == "auto" and kind == "thread" and worthwhile(without.took_s, found.took_s, progression.cost):
                break
    return progression


def _candidates(wanted: str, without: Trial, multiple: bool, device: torch.device) -> list[Kind]:
    """Return the kinds to try; the last is used if no earlier one is worthwhile.

    On a GPU, hooks do not help: they run while work is queued, and the rank then waits for the GPU without calling MPI.
    """
    if wanted != "auto":
        return [wanted]  # type: ignore[list-item]
    if without.ended_s < PASSIVE_SHARE * BUSY_S:
        return ["passive"]
    if multiple and device.type == "cuda":
        return ["thread"]
    return ["thread", "hooks"] if multiple else ["hooks"]


def worthwhile(get_s_without: float, get_s_with: float, cost: float) -> bool:
    """Return whether a thread speeds up a get enough and slows down the computation little enough."""
    return get_s_with * THREAD_GAIN_MIN <= get_s_without and cost <= THREAD_COST_MAX
