"""Stale synchronous parallel (SSP): a worker may be at most `staleness` iterations ahead of the slowest.

Every push is applied on arrival as an update of its own. The worker continues if it is at most `staleness` pushes ahead
of the slowest active worker; otherwise it is blocked until the slowest has caught up that far. Hence::

    lead when an iteration starts (start lead)                  <= staleness
    lead at any instant, including the last push (push lead)    <= staleness + 1

which is the guarantee of the paper's reads: iteration c (from 0) sees every update of the first c - staleness
iterations of every active worker, and all of its own.

References
----------
Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Accumulate, Action, Apply, PushInfo
from hpcsync.paradigms.options import Allowed, ParadigmOptions
from hpcsync.paradigms.papers import Reference, neurips
from hpcsync.paradigms.worker_counts import Gate


class SSP(Paradigm):
    """Stale synchronous parallel: bounded staleness.

    Parameters
    ----------
    n_workers
        Number of workers.
    staleness
        Largest lead at which an iteration may start, in iterations: an integer >= 0 (0 is lock-step), or math.inf (no
        worker is ever blocked).
    merge
        If True, the push of a worker that is blocked is added to the next update in place of being one.

    Notes
    -----
    The actions that answer a push are the update, the grant of the pushing worker, then the grants of the workers that
    it releases: least advanced first, ties in worker order. The push of a blocked worker releases no worker. With
    `merge` a worker that a departure releases does not read its own last push, which is applied with the next one.
    """

    name = "ssp"
    state_types = {"_gate": Gate}

    def __init__(self, n_workers: int, *, staleness: float, merge: bool = False) -> None:
        super().__init__(n_workers)
        self.merge = merge
        self._gate = Gate(self._progress, staleness)

    def check(self) -> None:
        """Assert the invariants of every paradigm, the bounds, and that no worker is blocked without need."""
        super().check()
        self._gate.check(self._blocked_since_s, self._start_gap_max_iters())

    def _start_gap_max_iters(self) -> float:
        return self._gate.staleness

    def _pushed(self, event: PushInfo) -> list[Action]:
        worker = event.worker
        answer = [*self._answer(worker), *self._gate.release(self._grant)]
        # Ambiguity m of DSSP: its paper says that pushes which arrive at the same time are aggregated, but not which
        # do. Each push is applied on arrival, as one update, or, with `merge`, those that wait there and the next one.
        if self.merge and worker in self._blocked_since_s:
            return [Accumulate(worker), *answer]
        return [Apply((worker,)), *answer]

    def _left(self, worker: int) -> list[Action]:
        # Ambiguity n of DSSP: a departure can raise the minimum, as a push can.
        self._gate.leave(worker)
        return [*self._gate.release(self._grant)]

    def _joined(self, worker: int) -> list[Action]:
        # The worker may have left far ahead of the slowest; the bound applies to it as before.
        return SSP._answer(self, worker)

    def _answer(self, worker: int) -> list[Action]:
        """Grant or block the worker that has just pushed or joined."""
        if self._gate.is_open(worker):
            return [self._grant(worker)]
        self._block(worker)
        return []

    def _block(self, worker: int) -> None:
        super()._block(worker)
        self._gate.block(worker)


HO = Reference(
    "ho2013more",
    "inproceedings",
    (
        "Ho, Qirong",
        "Cipar, James",
        "Cui, Henggang",
        "Lee, Seunghak",
        "Kim, Jin Kyu",
        "Gibbons, Phillip B.",
        "Gibson, Garth A.",
        "Ganger, Gregory R.",
        "Xing, Eric P.",
    ),
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
    2013,
    neurips(26),
)


def _whole_or_inf(staleness: Any) -> bool:
    return staleness == math.inf or (type(staleness) is int and staleness >= 0)


@dataclass(frozen=True, kw_only=True)
class SspOptions(ParadigmOptions):
    """Stale synchronous parallel.

    Parameters
    ----------
    staleness
        Largest lead, in iterations, at the start of an iteration.
    merge
        Whether the push of a worker that waits is added to the next update in place of being one.
    """

    name: Literal["ssp"] = "ssp"
    staleness: Annotated[int | float, Allowed("a whole number of at least 0, or inf", _whole_or_inf)]
    merge: bool = False

    policy = SSP
    guarantees = ("lead", "slowest-runs", "merged")
    papers = (HO,)
    place = 30
    colour = "#009E73"
    waiting = "a worker waits while it leads the slowest by more than `staleness` iterations"
    update = "every gradient is one update"
    source = "Ho et al., NIPS 2013"

    @property
    def merges(self) -> bool:
        """True if the push of a blocked worker is added to the next update."""
        return self.merge

    @property
    def lead_bound(self) -> float:
        """Largest lead over the slowest worker at which a worker starts."""
        return self.staleness

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        return "no worker waits for another" if self.staleness == math.inf else super().bound

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return f"SSP, s = {self.staleness:g}" + ", merged" * self.merge

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        if self.staleness == math.inf:
            return "each gradient is an update; no worker waits (no bound)"
        ahead = f"no worker starts more than {self.staleness} iterations ahead of the slowest"
        return f"{each_update(merge=self.merge)}; {ahead}"


def each_update(*, merge: bool) -> str:
    """Return what an update consists of, in words."""
    return "each gradient is an update" + ", together with those of workers that wait" * merge
