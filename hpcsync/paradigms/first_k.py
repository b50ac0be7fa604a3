"""The k family: each update takes the first k contributions, so no worker waits for a straggler.

The four forms are::

                   an update takes the first k ...               other contributions    staleness of a contribution
    k-sync         workers that computed from its version        discarded              0
    k-batch-sync   mini-batches computed from its version        discarded              0
    k-async        workers, whatever version they computed from  used by later updates  any, or up to staleness_max
    k-batch-async  mini-batches computed from any version        used by later updates  any, or up to staleness_max

A version is the number of updates made so far. A worker computes from the version at its grant; the staleness of its
contribution is the number of updates made between the grant and the push. One state machine implements all four: a
contribution that is too stale is discarded and its worker reads the weights again, which in the synchronous forms
applies to every late one. With k = n_workers, k-sync and k-async are BSP; with k = 1 the asynchronous forms are ASP.

Notes
-----
Where the papers leave it open, a letter in this file marks the branch that settles it::

    a  the first k workers block until the update, so each gives one contribution; with mini-batches a worker continues
    b  an update takes waiting contributions in worker order, whatever the order of arrival, and releases them in it
    c  a computation cannot be stopped from outside: a late contribution is discarded when it arrives, or the worker
       is sent a Cancel
    d  a contribution pushed before its worker left stays in the round, as in BSP
    e  with fewer than k workers left, a round of workers ends with all of them; a round of mini-batches still takes k
    f  k changes between rounds, right after an update
    g  a worker that joins reads the current version; if a contribution of its own still waits for an update, it blocks
       until that update

References
----------
S. Dutta, G. Joshi, S. Ghosh, P. Dube and P. Nagpurkar, "Slow and Stale Gradients Can Win the Race: Error-Runtime
Trade-offs in Distributed SGD", AISTATS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Accumulate, Action, Apply, Cancel, Decision, Drop, Grant, PushInfo
from hpcsync.paradigms.options import Allowed, Count, JobTables, OptionError, ParadigmOptions, computed, default
from hpcsync.paradigms.papers import Reference, meeting
from hpcsync.planning.checks import is_number, is_whole, must_be_one_of
from hpcsync.planning.k_controller import FROM_ALL, POLICIES, KController, staleness_bound


class FirstK(Paradigm):
    """Base class of the four forms.

    Parameters
    ----------
    n_workers
        Number of workers.
    k
        Contributions per update: an integer from 1 to `n_workers`, or a policy of
        `hpcsync.planning.k_controller.KController`, which then chooses k during the run.
    k_min
        Smallest k that a policy may choose.
    k_start
        First k of a policy. None: `n_workers` for "state" and "throughput", `k_min` for the others.
    aborts
        Whether a Cancel is sent to workers whose contribution will be discarded.

    Attributes
    ----------
    distinct
        True if an update takes at most one contribution per worker.

    Notes
    -----
    With a policy, each change of k is a `Decision` "k" of the worker whose event completed the update. Its inputs are
    documented at `KController`.
    """

    distinct = True
    state_types = {
        "_controller": KController | None,
        "k": int,
        "_version": int,
        "_read": list[int],
        "_up_to_date": set[int],
        "_accumulated": int,
        "_waiting": dict[int, float],
    }

    def __init__(
        self, n_workers: int, *, k: int | str, k_min: int = 1, k_start: int | None = None, aborts: bool = False
    ) -> None:
        super().__init__(n_workers)
        self._controller: KController | None = None
        if isinstance(k, str):
            if k not in POLICIES:
                raise ValueError(f"k must be an integer or one of {', '.join(POLICIES)}, got {k!r}")
            self._controller = KController(n_workers, policy=k, distinct=self.distinct, k_min=k_min, k_start=k_start)
            self.decision_fields = self._controller.decision_fields
            k = self._controller.k
        elif not is_whole(k) or k < 1:
            raise ValueError(f"k must be an integer >= 1 or one of {', '.join(POLICIES)}, got {k}")
        elif k > n_workers:
            raise ValueError(f"k must be at most n_workers = {n_workers}, got {k}")
        elif k_min != 1 or k_start is not None:
            raise ValueError(f"k_min and k_start need a k of {', '.join(POLICIES)}, got k = {k}")
        self.k = k
        self._aborts = aborts
        self._version = 0
        self._read = [0] * n_workers  # version that each worker last read
        # Workers that compute from the current version, to which a Cancel may be sent.
        self._up_to_date = set(range(n_workers)) if aborts else set()
        self._accumulated = 0  # contributions in the sum of the next update
        self._waiting: dict[int, float] = {}  # weight of each contribution that waits for the update, by worker

    def check(self) -> None:
        """Assert the invariants of every paradigm and of the round."""
        super().check()
        active, blocked = self._progress.active, self._blocked_since_s
        assert 1 <= self.k <= self.n_workers, f"k is {self.k}"
        in_round = self._accumulated + len(self._waiting)
        assert in_round < self.k, f"{in_round} contributions wait although k is {self.k}"
        if self.distinct:
            assert not self._accumulated, f"{self._accumulated} contributions have been accumulated"
            contributors = {worker for worker in self._waiting if worker in active}
            assert contributors == blocked.keys(), "the blocked workers are not those with a waiting contribution"
        else:
            assert not self._waiting and not blocked, f"workers {sorted({*blocked, *self._waiting})} wait"
        for worker in self._waiting:
            staleness = self._version - self._read[worker]
            assert staleness <= self._accepted_staleness(), f"worker {worker} waits with a staleness of {staleness}"
        if self._aborts:
            up_to_date = {worker for worker in active if worker not in blocked and self._read[worker] == self._version}
            assert self._up_to_date == up_to_date, (
                "the up-to-date workers are not those that compute from the current version"
            )

    def _accepted_staleness(self) -> float:
        return 0

    def _weight(self, staleness: int) -> float:
        return 1.0

    def _pushed(self, event: PushInfo) -> list[Action]:
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
        self._block(worker)
        self._waiting[worker] = weight
        return self._end_round_if_complete(worker)

    def _left(self, worker: int) -> list[Action]:
        self._up_to_date.discard(worker)
        return self._end_round_if_complete(worker)

    def _joined(self, worker: int) -> list[Action]:
        if worker not in self._waiting:
            return [self._grant(worker)]
        self._block(worker)  # (g)
        return []

    def _end_round_if_complete(self, worker: int) -> list[Action]:
        in_round = self._accumulated + len(self._waiting)  # (d)
        outstanding = len(self._progress.active) - len(self._blocked_since_s)
        if not self._waiting or (in_round < self.k and outstanding):  # (e)
            return []
        workers = tuple(sorted(set(self._waiting)))  # (b); a set of small numbers is nearly in order
        are_equal = {*self._waiting.values()} == {1.0}
        update = Apply(workers, () if are_equal else tuple(self._waiting[worker] for worker in workers))
        self._waiting.clear()
        self._accumulated = 0
        self._version += 1
        for released in self._blocked_since_s:
            self._read[released] = self._version
        late: list[int] = []
        if self._aborts:
            late = sorted(self._up_to_date)  # earlier ones have been cancelled already
            self._up_to_date = set(self._blocked_since_s)
        grants = self._grant_blocked(workers)
        return [update, *self._choose_k(worker), *grants, *map(Cancel, late)]  # (c)

    def _grant(self, worker: int, **chosen: Any) -> Grant:
        self._read[worker] = self._version
        if self._aborts:
            self._up_to_date.add(worker)
        return super()._grant(worker, **chosen)

    def _choose_k(self, worker: int) -> list[Decision]:
        """Choose k for the round that begins, which is empty, so that any k is possible (f)."""
        if self._controller is None:
            return []
        inputs = self._controller.updated(self._version, self._read, self._progress.active)
        if inputs is None:
            return []
        self.k = self._controller.k
        return [Decision("k", worker, float(self.k), inputs)]


class KSync(FirstK):
    """k-sync: an update takes the first k workers that computed from its version; other contributions are discarded.

    Parameters
    ----------
    n_workers, k, k_min, k_start
        See `FirstK`.
    cancel
        "drop": a late worker finishes its computation. "abort": it is sent a Cancel, once for each version.
    """

    name = "k-sync"
    synchronous = True

    def __init__(
        self, n_workers: int, *, k: int | str, cancel: str = "drop", k_min: int = 1, k_start: int | None = None
    ) -> None:
        must_be_one_of("cancel", cancel, ("drop", "abort"))
        super().__init__(n_workers, k=k, k_min=k_min, k_start=k_start, aborts=cancel == "abort")


class KBatchSync(KSync):
    """k-batch-sync: an update takes the first k mini-batches computed from its version.

    A fast worker may contribute several. The parameters are those of `KSync`.
    """

    name = "k-batch-sync"
    distinct = False


class KAsync(FirstK):
    """k-async: an update takes the first k workers, which block until it is made; the others continue computing.

    Parameters
    ----------
    n_workers, k, k_min, k_start
        See `FirstK`.
    staleness_max
        Largest accepted staleness in updates. A staler contribution is discarded and its worker reads the weights
        again, so the bound blocks no worker. math.inf: nothing is discarded. None: ceil(2 n_workers / k) for the
        present k.
    staleness_weight
        "inverse": a contribution is multiplied by 1 / max(1, staleness). "none": by 1.
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
            raise ValueError(f"staleness_max must be a number >= 0, inf or None, got {staleness_max}")
        must_be_one_of("staleness_weight", staleness_weight, ("none", "inverse"))
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
    """k-batch-async: an update takes the first k mini-batches computed from any version, and no worker is ever blocked.

    The parameters are those of `KAsync`.
    """

    name = "k-batch-async"
    distinct = False


DUTTA = Reference(
    "dutta2018slow",
    "inproceedings",
    ("Dutta, Sanghamitra", "Joshi, Gauri", "Ghosh, Soumyadip", "Dube, Parijat", "Nagpurkar, Priya"),
    "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in Distributed SGD",
    2018,
    meeting(
        "Proceedings of the 21st International Conference on Artificial Intelligence and Statistics (AISTATS)",
        "803--812",
        "84",
    ),
)


def _whole_or_rule(k: Any) -> bool:
    return k in POLICIES if isinstance(k, str) else type(k) is int and k >= 1


def _is_chosen(options: Mapping[str, Any]) -> bool:
    return isinstance(options["k"], str)


@dataclass(frozen=True, kw_only=True)
class FirstKOptions(ParadigmOptions):
    """Each update uses k contributions.

    Parameters
    ----------
    k
        Contributions of an update, or the controller that chooses it (`"throughput"` only with k-sync). At most
        `cluster.workers`.
    k_min
        Smallest k of a controller. Only with a k that is chosen.
    k_start
        First k. Only with a k that is chosen.
    """

    k: Annotated[
        int | Literal["state", "loss", "min", "throughput"],
        Allowed('a whole number of at least 1, or one of "state", "loss", "min", "throughput"', _whole_or_rule),
    ]
    k_min: Count | None = computed(lambda given: 1 if _is_chosen(given) else None, "1 with a k that is chosen")
    k_start: Count | None = default(None, 'all workers with `"state"` and `"throughput"`, else `k_min`')

    waits: ClassVar[bool] = True  # True if an update takes a contribution each of k workers, which wait for it
    by_throughput: ClassVar[bool] = False  # True if k may be chosen by the throughput
    papers = (DUTTA,)
    page = "k-sync"
    source = "Dutta et al., AISTATS 2018"

    def _check_options(self) -> None:
        if self.k == "throughput" and not self.by_throughput:
            must = f'must be a number, "state", "loss" or "min" with {self.name}'
            raise OptionError("paradigm.k", self.k, must)
        if isinstance(self.k, int):
            for key in ("k_min", "k_start"):
                if getattr(self, key) is not None:
                    must = f"must be omitted beside paradigm.k = {self.k}, which does not change"
                    raise OptionError(f"paradigm.{key}", getattr(self, key), must)
        elif self.k_start is not None and self.k_min is not None and self.k_start < self.k_min:
            raise OptionError("paradigm.k_start", self.k_start, f"must be at least paradigm.k_min = {self.k_min}")

    def check(self, job: JobTables) -> None:
        """Raise OptionError if there are fewer workers than contributions to an update."""
        for key in ("k", "k_min", "k_start"):
            value = getattr(self, key)
            if isinstance(value, int) and value > job.cluster.workers:
                raise OptionError(f"paradigm.{key}", value, f"must be at most cluster.workers = {job.cluster.workers}")

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the policy, which do not include the worker's micro-batches."""
        left_out = {"micro_batches"} | ({"k_min"} if self.k_min is None else set())
        return {key: value for key, value in super().options.items() if key not in left_out}

    def k_at_first(self, n_workers: int) -> int:
        """Return the k of the first update."""
        if isinstance(self.k, int):
            return self.k
        return self.k_start or (n_workers if self.k in FROM_ALL else self.k_min or 1)

    @property
    def k_rules(self) -> tuple[str, ...]:
        """Rules by which k changes during the run."""
        if isinstance(self.k, int):
            return ()
        return ("loss", "state") if self.k == "min" else (self.k,)

    @property
    def smallest_k(self) -> int:
        """The least k of the run."""
        return self.k if isinstance(self.k, int) else self.k_min or 1

    def zero_time_workers(self, n_workers: int) -> int:
        """Return how many workers can iterate for ever while the others compute."""
        return self.smallest_k if self.waits else 1

    @property
    def mixes_pushes(self) -> bool:
        """True if an update can be of pushes with which workers are at different steps."""
        return True

    @property
    def counts_workers(self) -> bool:
        """True if an update takes one contribution of each of several workers."""
        return self.waits

    @property
    def guarantees(self) -> tuple[str, ...]:
        """Guarantees that the audit verifies."""
        return ("first-k",) if self.waits else ("first-k", "nobody-waits")

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        if not self.waits:  # a worker may contribute several times
            return super().bound
        have = "1 worker has" if self.k == 1 else f"{self._k} workers have"
        return f"a worker that has pushed waits until {have} pushed"

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        by = "state and loss" if self.k == "min" else self.k
        return f"{self.name}, k = {self.k}" if isinstance(self.k, int) else f"{self.name}, k by {by}"

    @property
    def _k(self) -> str:
        return str(self.k) if isinstance(self.k, int) else "k"

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        if isinstance(self.k, int):
            return []
        adapts_to = {
            "state": "the workers' speeds",
            "loss": "the loss",
            "min": "the workers' speeds and the loss, whichever gives the smaller k",
            "throughput": "the workers' speeds, for most contributions a second",
        }
        start = self.k_at_first(n_workers)
        return [("k", f"{self.k_min} to {n_workers}, initially {start}: adapts to {adapts_to[self.k]}")]


@dataclass(frozen=True, kw_only=True)
class FirstKOfAVersionOptions(FirstKOptions):
    """All contributions to an update are computed from the version before it; late ones are dropped.

    Parameters
    ----------
    cancel
        `"drop"`: a late worker finishes its iteration. `"abort"`: it stops at the next micro-batch.
    micro_batches
        Pieces of a batch, with `cancel = "abort"`.
    """

    cancel: Literal["drop", "abort"] = "drop"
    micro_batches: Count = 4

    of_one_version = True
    drops = "late"
    update = "the mean of the first k gradients of one version; late gradients are discarded"

    @property
    def aborts(self) -> bool:
        """True if the computation of a worker may be cancelled."""
        return self.cancel == "abort"

    def pieces(self, worker: int, n_workers: int) -> int:
        """Return the number of pieces of a batch, between which a worker checks whether it has been cancelled."""
        return self.micro_batches if self.aborts else 1

    @property
    def _late(self) -> str:
        if self.cancel == "drop":
            return "late gradients are dropped"
        return f"late gradients are cancelled between their {self.micro_batches} micro-batches"


@dataclass(frozen=True, kw_only=True)
class KSyncOptions(FirstKOfAVersionOptions):
    """K-sync: each update uses the first k workers to contribute."""

    name: Literal["k-sync"] = "k-sync"

    policy = KSync
    by_throughput = True
    place = 50
    colour = "#117733"
    waiting = "the first k workers wait for the k-th"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return f"each update is the mean of the first {self._k} workers' gradients; {self._late}"


@dataclass(frozen=True, kw_only=True)
class KBatchSyncOptions(FirstKOfAVersionOptions):
    """K-batch-sync: each update uses the first k contributions, several of which may be of one fast worker."""

    name: Literal["k-batch-sync"] = "k-batch-sync"

    policy = KBatchSync
    waits = False
    place = 60
    colour = "#999933"
    waiting = "none"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        of = f"the first {self._k} gradients of its version; a worker may contribute several"
        return f"each update is the mean of {of}; {self._late}"


@dataclass(frozen=True, kw_only=True)
class FirstKOfAnyOptions(FirstKOptions):
    """Contributions count whatever version they were computed from; nothing is cancelled.

    Parameters
    ----------
    staleness_max
        A gradient with a larger staleness is discarded. `inf`: no limit.
    staleness_weight
        `"inverse"`: a gradient counts 1 / max(1, staleness).
    """

    staleness_max: Annotated[float, Ge(0)] | None = computed(
        lambda given: None if _is_chosen(given) else math.inf,
        "`inf`; with a k that is chosen 2 workers / k, rounded up",
    )
    staleness_weight: Literal["none", "inverse"] = computed(
        lambda given: "inverse" if _is_chosen(given) else "none", '`"none"`; with a k that is chosen `"inverse"`'
    )

    drops = "stale"
    update = "the mean of the first k gradients of any version"

    @property
    def discounts(self) -> bool:
        """True if a contribution weighs one over its staleness."""
        return self.staleness_weight == "inverse"

    @property
    def _stale(self) -> str:
        bound = ""
        if self.staleness_max is None:
            bound = f"; gradients older than 2 workers / {self._k} updates are dropped"
        elif self.staleness_max < math.inf:
            bound = f"; gradients older than {self.staleness_max:g} updates are dropped"
        return bound + ("; the weight of a gradient is 1 / age" if self.discounts else "")


@dataclass(frozen=True, kw_only=True)
class KAsyncOptions(FirstKOfAnyOptions):
    """K-async: each update uses k workers, which wait for it; the others continue."""

    name: Literal["k-async"] = "k-async"

    policy = KAsync
    place = 70
    colour = "#AA4499"
    waiting = "the first k workers wait for the k-th"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        of = f"the next {self._k} workers' gradients; these workers wait for it, the others continue"
        return f"each update is the mean of {of}{self._stale}"


@dataclass(frozen=True, kw_only=True)
class KBatchAsyncOptions(FirstKOfAnyOptions):
    """K-batch-async: each update uses any k contributions; no worker waits."""

    name: Literal["k-batch-async"] = "k-batch-async"

    policy = KBatchAsync
    waits = False
    place = 80
    colour = "#332288"
    waiting = "none"

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        return f"each update is the mean of the next {self._k} gradients; no worker waits{self._stale}"
