"""The k family (Dutta, Joshi, Ghosh, Dube and Nagpurkar, AISTATS 2018): an update waits for the first k, not for all.

                   an update takes the first k ...             the others      a contribution's staleness
    k-sync         workers that computed from its version      are dropped     0
    k-batch-sync   mini-batches computed from its version      are dropped     0
    k-async        workers, whatever they computed from        carry on        any, or up to staleness_max
    k-batch-async  mini-batches, whatever they come from       carry on        any, or up to staleness_max

Versions are updates made so far; a worker computes from that of its grant, and staleness is how many more there are
when it pushes. All four are one machine: a contribution that is too stale is dropped and its worker reads anew, which
in the synchronous forms is every late one. With k the number of workers, k-sync and k-async are BSP; with k = 1 the
asynchronous forms are ASP.

Where the papers leave it open, a letter in this file marks the branch that settles it:

    a  among the first k workers one waits for the update, and so gives one contribution; with mini-batches it goes on
    b  an update takes waiting contributions in worker order, whatever the order of arrival, and releases them in it
    c  computing cannot be stopped from outside: what is late is dropped when it comes, or the worker is told to stop
    d  what a worker pushed before it left stays in its round, as in BSP
    e  fewer than k workers left: a round of workers ends with all of them; of mini-batches it still takes k
    f  k changes between rounds, right after an update
    g  whoever joins reads the current version; if what it pushed before it left still waits for its update, with it
"""

from __future__ import annotations

import math

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Accumulate, Action, Apply, Cancel, Decision, Drop, Grant, Pushed
from hpcsync.planning.checks import is_number, is_whole
from hpcsync.planning.k_controller import POLICIES, KController, staleness_bound

CANCELS = ("drop", "abort")
STALENESS_WEIGHTS = ("none", "inverse")


class FirstK(Paradigm):
    """What the four have in common.

    k:       contributions of an update: a whole number up to n_workers, or "state", "loss" or "min", the policy of a
             KController, which then chooses k as the run goes.
    k_min:   the smallest k that a policy may choose.
    k_start: the first k of a policy; None: n_workers for "state", k_min for the others.

    With a policy, each change of k is a Decision "k" of the worker whose event brought the update on; what it was
    chosen from says KController.
    """

    distinct = True  # whether an update takes at most one contribution of a worker

    def __init__(
        self, n_workers: int, *, k: int | str, k_min: int = 1, k_start: int | None = None, aborts: bool = False
    ) -> None:
        super().__init__(n_workers)
        self._controller: KController | None = None
        if isinstance(k, str):
            if k not in POLICIES:
                raise ValueError(f"k is {k!r}; a whole number or one of {', '.join(POLICIES)} is needed")
            self._controller = KController(n_workers, policy=k, distinct=self.distinct, k_min=k_min, k_start=k_start)
            self.decision_fields = KController.decision_fields
            k = self._controller.k
        elif not is_whole(k) or k < 1:
            raise ValueError(f"k is {k}; a whole number from 1 on or one of {', '.join(POLICIES)} is needed")
        elif k > n_workers:
            raise ValueError(f"k is {k}, more than the {n_workers} workers")
        elif k_min != 1 or k_start is not None:
            raise ValueError(f"k is {k} all the time; k_min and k_start need one of {', '.join(POLICIES)}")
        self.k = k
        self._aborts = aborts
        self._version = 0
        self._read = [0] * n_workers  # version that the worker computes from, or has computed from
        self._up_to_date = set(range(n_workers))  # workers that compute from the current version
        self._accumulated = 0  # contributions that are in the sum of the next update already
        self._waiting: dict[int, float] = {}  # workers whose contributions wait for the update: their weights

    def check(self) -> None:
        """Assert the paradigm's invariants: those of every paradigm, and the round's."""
        super().check()
        active, blocked = self._progress.active, self._blocked_since_s
        assert 1 <= self.k <= self.n_workers, f"k is {self.k}"
        in_round = self._accumulated + len(self._waiting)
        assert in_round < self.k, f"{in_round} contributions wait, and k is {self.k}"
        if self.distinct:
            assert not self._accumulated, f"{self._accumulated} contributions have been collected"
            contributors = {worker for worker in self._waiting if worker in active}
            assert contributors == blocked.keys(), "the held workers are not those that wait for the update"
        else:
            assert not self._waiting and not blocked, f"workers {sorted({*blocked, *self._waiting})} wait"
        for worker in self._waiting:
            staleness = self._version - self._read[worker]
            assert staleness <= self._accepted_staleness(), f"worker {worker} waits with a staleness of {staleness}"
        up_to_date = {worker for worker in active if worker not in blocked and self._read[worker] == self._version}
        assert self._up_to_date == up_to_date, "the up to date are not those who compute from the current version"

    def _accepted_staleness(self) -> float:
        return 0

    def _weight(self, staleness: int) -> float:
        return 1.0

    def _pushed(self, event: Pushed) -> list[Action]:
        worker = event.worker
        self._up_to_date.discard(worker)
        if self._controller is not None:
            self._controller.pushed(worker, event.iteration_s, event.loss)
        staleness = self._version - self._read[worker]
        if staleness > self._accepted_staleness():
            return [Drop(worker), self._grant(worker)]
        weight = self._weight(staleness)
        if not self.distinct and self._accumulated + 1 < self.k:  # (a)
            self._accumulated += 1
            return [Accumulate(worker, weight), self._grant(worker)]
        self._hold(worker)
        self._waiting[worker] = weight
        return self._end_round_if_complete(worker)

    def _left(self, worker: int) -> list[Action]:
        self._up_to_date.discard(worker)
        return self._end_round_if_complete(worker)

    def _joined(self, worker: int) -> list[Action]:
        if worker not in self._waiting:
            return [self._grant(worker)]
        self._hold(worker)  # (g)
        return []

    def _end_round_if_complete(self, worker: int) -> list[Action]:
        in_round = self._accumulated + len(self._waiting)  # (d)
        outstanding = len(self._progress.active) - len(self._blocked_since_s)
        if not self._waiting or (in_round < self.k and outstanding):  # (e)
            return []
        workers = tuple(sorted(self._waiting))  # (b)
        weights = tuple(self._waiting[worker] for worker in workers)
        update = Apply(workers, weights if any(weight != 1 for weight in weights) else ())
        self._waiting.clear()
        self._accumulated = 0
        self._version += 1
        late = sorted(self._up_to_date) if self._aborts else []  # those that were before have been told
        self._up_to_date.clear()
        grants = [self._grant(worker) for worker in sorted(self._blocked_since_s)]
        return [update, *self._choose_k(worker), *grants, *map(Cancel, late)]  # (c)

    def _grant(self, worker: int, credits: int = 0) -> Grant:
        self._read[worker] = self._version
        self._up_to_date.add(worker)
        return super()._grant(worker, credits)

    def _choose_k(self, worker: int) -> list[Decision]:
        """(f) The round that begins is empty, so that no k can be too small for it."""
        if self._controller is None:
            return []
        inputs = self._controller.updated(self._version, self._read, self._progress.active)
        if inputs is None:
            return []
        self.k = self._controller.k
        return [Decision("k", worker, float(self.k), inputs)]


class KSync(FirstK):
    """An update takes the first k workers that computed from its version. What the others were at is dropped.

    cancel: "drop": they finish it. "abort": they are told that it will be dropped, once for each version.
    """

    name = "k-sync"
    synchronous = True

    def __init__(
        self, n_workers: int, *, k: int | str, cancel: str = "drop", k_min: int = 1, k_start: int | None = None
    ) -> None:
        if cancel not in CANCELS:
            raise ValueError(f"cancel is {cancel!r}; one of {', '.join(CANCELS)} is needed")
        super().__init__(n_workers, k=k, k_min=k_min, k_start=k_start, aborts=cancel == "abort")


class KBatchSync(KSync):
    """An update takes the first k mini-batches computed from its version: fast workers may give several."""

    name = "k-batch-sync"
    distinct = False


class KAsync(FirstK):
    """An update takes what the first k workers push, which wait for it; the others carry on.

    staleness_max:    a contribution that is staler is dropped, so that its worker reads anew: a bound that nobody
                      waits for. math.inf: nothing is ever dropped. None: ceil(2 n_workers / k), of the present k.
    staleness_weight: "inverse": a contribution counts 1 / max(1, staleness). "none": it counts 1.
    """

    name = "k-async"

    def __init__(
        self,
        n_workers: int,
        *,
        k: int | str,
        k_min: int = 1,
        k_start: int | None = None,
        staleness_max: float | None = math.inf,
        staleness_weight: str = "none",
    ) -> None:
        if staleness_max is not None and not (is_number(staleness_max) and staleness_max >= 0):
            raise ValueError(f"staleness_max is {staleness_max}; a number from 0 on, inf or None is needed")
        if staleness_weight not in STALENESS_WEIGHTS:
            needed = ", ".join(STALENESS_WEIGHTS)
            raise ValueError(f"staleness_weight is {staleness_weight!r}; one of {needed} is needed")
        super().__init__(n_workers, k=k, k_min=k_min, k_start=k_start)
        self.staleness_max = staleness_max
        self._inverse = staleness_weight == "inverse"

    def _accepted_staleness(self) -> float:
        if self.staleness_max is None:
            return staleness_bound(self.n_workers, self.k)
        return self.staleness_max

    def _weight(self, staleness: int) -> float:
        return 1 / max(1, staleness) if self._inverse else 1.0


class KBatchAsync(KAsync):
    """An update takes the first k mini-batches, whatever they were computed from, and nobody ever waits."""

    name = "k-batch-async"
    distinct = False
