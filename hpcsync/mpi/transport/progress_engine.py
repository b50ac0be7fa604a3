"""Who moves the one-sided transfers of others while this rank computes: measured when a run starts.

On one node nobody has to, in windows that MPI allocates. In others, and between hosts over TCP, a get waits until its
target makes MPI calls, and a rank of a run without servers computes most of the time. Three kinds of help:

    passive     none: a get from a rank that computes is complete at once
    thread      a thread beside the computation, which makes MPI calls
    hooks       MPI calls from within the computation: whoever computes calls `poll` now and then
"""

from __future__ import annotations

import atexit
import statistics
import sys
import threading
import time
from typing import Literal, get_args

import numpy as np
import torch
from mpi4py import MPI

from hpcsync.mpi.transport import cuda
from hpcsync.mpi.transport.backoff import NETWORK_CEILING_S, NETWORK_PROBES
from hpcsync.mpi.transport.busy_target import Trial, farthest, while_busy
from hpcsync.mpi.transport.tensor_window import HOST, Transport

Kind = Literal["passive", "thread", "hooks"]

BUSY_S = 0.04  # of computing in a trial: far longer than a get takes, also where the machine is shared
TRIALS = 3  # of each kind; their median counts
GET_BYTES = 1 << 18
EDGE = 64  # of the matrices multiplied meanwhile, some 10 us each: about what a layer of a small model takes
PASSIVE_SHARE = 0.75  # of the time computed, within which a passive get is complete
THREAD_GAIN_MIN = 2.0  # a thread has to make a get so many times faster
THREAD_COST_MAX = 0.25  # and may slow the computation down by this share; a shared machine's noise reaches half of it
SWITCH_S = (
    1e-4  # Python code gives way to a thread after so long; by default 5 ms, and each call of MPI may wait for it
)
POLL_S = 5e-4  # from one poll that makes MPI calls to the next


class ProgressEngine:
    """What was chosen for all ranks, at work until `close`.

    get_s_without: how long a get took from a rank that computed and made no MPI calls, in seconds; None on one rank.
    get_s_with:    the same with the help that was chosen; None where that is none.
    cost:          the share of its speed that the computation lost by it; None likewise.
    """

    def __init__(self, comm: MPI.Intracomm, device: torch.device) -> None:
        self.kind: Kind = "passive"
        self.get_s_without: float | None = None
        self.get_s_with: float | None = None
        self.cost: float | None = None
        self._comm = comm
        self._device = device
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._interval_s = sys.getswitchinterval()
        self._next_s = float("inf")

    def attributes(self) -> dict[str, str | float | None]:
        """What a trace says of it."""
        return {
            "progression": self.kind,
            "progression_get_s_without": self.get_s_without,
            "progression_get_s_with": self.get_s_with,
            "progression_cost": self.cost,
        }

    def poll(self) -> None:
        """To be called from within the computation, as often as one likes: now and then it makes MPI calls, if needed.

        Only by the thread that makes the other MPI calls, where MPI does not support several.
        """
        if (now_s := time.perf_counter()) >= self._next_s:
            self._advance()
            self._next_s = now_s + POLL_S

    def begin(self, kind: Kind) -> None:
        """Help in this way from now on, and no other; local."""
        self._stop()
        self.kind = kind
        self._next_s = 0.0 if kind == "hooks" else float("inf")
        if kind == "thread":
            self._stopped.clear()
            self._thread = threading.Thread(target=self._work, daemon=True, name="progression")
            self._thread.start()
            self._interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_S, self._interval_s))
            atexit.register(self._stop)  # before MPI is finalised

    def _work(self) -> None:
        cuda.enter(self._device)
        while not self._stopped.is_set():
            self._advance()
            time.sleep(NETWORK_CEILING_S)

    def _advance(self) -> None:
        for _ in range(NETWORK_PROBES):  # one call moves little
            self._comm.Iprobe()

    def _stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._interval_s)
            atexit.unregister(self._stop)

    def close(self) -> None:
        """Stop helping; collective, and harmless when repeated."""
        self._stop()
        self._next_s = float("inf")
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def __enter__(self) -> ProgressEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def choose(comm: MPI.Intracomm, wanted: str = "auto", transport: Transport = HOST) -> ProgressEngine:
    """The help that this transport's transfers need here, at work; collective, and the same for all ranks.

    wanted: one of the kinds, instead of the best. Raises ValueError for another word, or a thread where MPI supports
    none.
    """
    multiple = comm.allreduce(MPI.Query_thread() >= MPI.THREAD_MULTIPLE, MPI.LAND)
    if wanted not in ("auto", *get_args(Kind)) or (wanted == "thread" and not multiple):
        raise ValueError(f"no progress by {wanted!r}: it is auto, passive, hooks, or with MPI_THREAD_MULTIPLE thread")
    progression = ProgressEngine(comm.Dup(), transport.device)
    if comm.size == 1:
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

        get() if comm.rank == 0 else None  # the first one sets up what later ones use
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
    """The kinds to try, the last of which is taken if none before is worthwhile.

    On a GPU hooks are no help: they are called when its work is begun, and then the rank waits for it without MPI.
    """
    if wanted != "auto":
        return [wanted]  # type: ignore[list-item]
    if without.ended_s < PASSIVE_SHARE * BUSY_S:
        return ["passive"]
    if multiple and device.type == "cuda":
        return ["thread"]
    return ["thread", "hooks"] if multiple else ["hooks"]


def worthwhile(get_s_without: float, get_s_with: float, cost: float) -> bool:
    """Whether a thread does enough good and little enough harm."""
    return get_s_with * THREAD_GAIN_MIN <= get_s_without and cost <= THREAD_COST_MAX
