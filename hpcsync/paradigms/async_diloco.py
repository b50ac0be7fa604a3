"""Asynchronous DiLoCo: workers push the change made by their local steps, the servers make outer steps with momentum.

A worker reads the weights, makes local steps with an optimizer of its own, and pushes the change of its weights; the
negative change is the outer gradient. The servers make an outer step for each push, or for several that wait for each
other::

    quorum, grace_s   an update is made `grace_s` after `quorum` contributions wait for it, or as soon as every active
                      worker waits. With 1 and 0, the defaults, no worker waits
    weigh             an update takes the mean of its contributions, weighted by their samples or all alike
    momentum          the outer steps are those of delayed Nesterov
                      (`hpcsync.training.update_rules.DelayedNesterov`): all of the momentum at every N-th update, or
                      parts of it in between
    by_speed          each worker makes steps in proportion to its speed, so that all push about equally often (dynamic
                      local updates): floor(speed / speed of the fastest x `steps`), at least 1

Notes
-----
The algorithms of Liu et al. (2024) are taken from the implementation of delayed Nesterov that accompanies HALoS (Kim et
al., 2025), from the abstract and from the authors' program; quorum and grace window (Douillard et al., 2026) from the
abstract and from descriptions by others. Where they leave it open, a letter in this file marks the branch that settles
it::

    a  the speed of a worker is that of its latest push; the first push of every worker, also of one that joins later,
       is of one step, to measure it. A worker whose pushes took no time makes `steps` steps
    b  a worker waits from its push to the update that takes it. In the authors' program, too, the workers of a grace
       period continue together, but each contribution is an outer step of its own there; here an update is one step
    c  the grace window begins once the quorum is there: with a quorum of 1, at the first contribution, as in Liu et al.
       It has a fixed length
    d  the weight of a contribution is its share of the update's samples; a lone contribution weighs 1, however small
    e  a contribution pushed before its worker left stays in the update; if the worker joins again before that update,
       it waits for it
    f  the state of the local optimizers stays on the workers; in the authors' program every round begins with a new one
    g  N is by default the number of updates in which each worker takes part once on average: the number of workers
       without a quorum, and 1 (the usual Nesterov momentum, as in DiLoCo) if an update waits for all

References
----------
B. Liu, R. Chhaparia, A. Douillard, S. Kale, A. A. Rusu, J. Shen, A. Szlam and M. Ranzato, "Asynchronous Local-SGD
Training for Language Modeling", 2024, arXiv:2401.09135. A. Douillard et al., "DiLoCo: Distributed Low-Communication
Training of Language Models", 2023, arXiv:2311.08105. A. Douillard et al., "Decoupled DiLoCo for Resilient Distributed
Pre-training", 2026, arXiv:2604.21428.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import Action, Apply, Decision, Elapsed, Grant, PushInfo
from hpcsync.paradigms.local_sgd import DOUILLARD
from hpcsync.paradigms.options import (
    Count,
    JobTables,
    NotNegative,
    OptionError,
    OuterMomentum,
    ParadigmOptions,
    Part,
    Positive,
    default,
)
from hpcsync.paradigms.papers import Reference, arxiv
from hpcsync.paradigms.records import UNUSED
from hpcsync.planning.checks import is_number, is_whole, must_be_one_of, must_be_whole

ROUNDING = 1e-9  # relative error of a speed that does not cost a worker a step


class AsyncDiLoCo(Paradigm):
    """Asynchronous DiLoCo: pushes after local steps, updates from a quorum.

    Parameters
    ----------
    n_workers
        Number of workers.
    steps
        Local steps of the fastest worker between two pushes, at least 1.
    by_speed
        Whether slower workers make fewer steps.
    quorum
        Contributions that an update waits for: an integer from 1 to `n_workers`.
    grace_s
        Seconds that an update then waits for more, at least 0.
    weigh
        "samples" or "equal".

    Notes
    -----
    A change of a worker's steps is recorded as `Decision` "local-steps".
    """

    name = "async-diloco"
    decision_fields = {
        "step_s": ("s", "Duration of a local step in the worker's latest push."),
        "fastest_s": ("s", "Shortest such duration of an active worker."),
    }
    state_types = {
        "_step_s": list[float],
        "_granted": list[int],
        "_waiting": dict[int, int],
        "_due_s": float,
        "_due_worker": int,
    }

    def __init__(
        self,
        n_workers: int,
        *,
        steps: int = 10,
        by_speed: bool = True,
        quorum: int = 1,
        grace_s: float = 0.0,
        weigh: str = "samples",
    ) -> None:
        super().__init__(n_workers)
        must_be_whole("steps", steps, 1)
        if not (is_whole(quorum) and 1 <= quorum <= n_workers):
            raise ValueError(f"quorum must be an integer from 1 to n_workers = {n_workers}, got {quorum}")
        if not (is_number(grace_s) and 0 <= grace_s < math.inf):
            raise ValueError(f"grace_s must be a finite number >= 0, got {grace_s}")
        must_be_one_of("weigh", weigh, ("samples", "equal"))
        self._steps = steps
        self._by_speed = by_speed
        self._quorum = quorum
        self._grace_s = grace_s
        self._by_samples = weigh == "samples"
        self._step_s = [math.nan] * n_workers  # of each worker's latest push
        self._granted = [1 if by_speed else steps] * n_workers  # steps of each worker's latest grant (a)
        self._waiting: dict[int, int] = {}  # by worker, samples of the contributions that wait for the update
        self._due_s = math.inf  # end of the grace window
        self._due_worker = 0  # that completed the quorum

    def first(self, worker: int) -> Grant:
        """Return the grant with which the worker starts iteration 1."""
        return Grant(worker, 1, local_steps=self._granted[worker])

    @property
    def due(self) -> Elapsed | None:
        """The end of the grace window."""
        return Elapsed(self._due_s, self._due_worker) if self._due_s < math.inf else None

    def check(self) -> None:
        """Assert the invariants of every paradigm and of the update that is waited for."""
        super().check()
        active, blocked = self._progress.active, self._blocked_since_s
        contributors = {worker for worker in self._waiting if worker in active}
        assert contributors == blocked.keys(), "the blocked workers are not those with a waiting contribution"
        assert (self._due_s < math.inf) == (len(self._waiting) >= self._quorum), (
            f"{len(self._waiting)} contributions wait, the update is due at {self._due_s} s"
        )
        assert not self._waiting or self._now_s < self._due_s, f"the update was due at {self._due_s} s"
        assert all(1 <= steps <= self._steps for steps in self._granted), f"steps are {self._granted}"

    def _pushed(self, event: PushInfo) -> list[Action]:
        worker, step_s = event.worker, event.iteration_s / event.local_steps
        if 0 < step_s < math.inf:
            self._step_s[worker] = step_s
        self._waiting[worker] = 0 if event.problem in UNUSED else event.batch_size
        self._block(worker)  # (b)
        if len(self._waiting) == self._quorum:
            self._due_s, self._due_worker = self._now_s + self._grace_s, worker  # (c)
        return self._update_if_due()

    def _left(self, worker: int) -> list[Action]:
        return self._update_if_due()  # (e)

    def _joined(self, worker: int) -> list[Action]:
        if worker not in self._waiting:
            return [*self._update_if_due(), *self._continue(worker)]
        self._block(worker)  # (e)
        return self._update_if_due()

    def _elapsed(self, worker: int) -> list[Action]:
        return self._update_if_due()

    def _update_if_due(self) -> list[Action]:
        """Make the update once the grace window has ended, or no more contributions can come."""
        computing = len(self._progress.active) - len(self._blocked_since_s)
        if not self._waiting or (self._now_s < self._due_s and computing):
            return []
        workers = tuple(sorted(self._waiting))
        update = Apply(workers, self._weights([self._waiting[worker] for worker in workers]))
        self._waiting.clear()
        self._due_s = math.inf
        grants = [action for worker in sorted(self._blocked_since_s) for action in self._continue(worker)]
        return [update, *grants]

    def _weights(self, samples: list[int]) -> tuple[float, ...]:
        """Return the weights of contributions, whose mean is 1 over those that count (d); empty if they are equal."""
        if not self._by_samples or len(set(samples)) == 1:
            return ()
        n_used = sum(n > 0 for n in samples)
        return tuple(n_used * n / sum(samples) for n in samples)

    def _continue(self, worker: int) -> list[Action]:
        """Grant the worker as many steps as its speed allows."""
        rows, steps, own_s = list[Action](), self._steps, self._step_s[worker]
        if self._by_speed and self._progress.pushes[worker] == 0:
            steps = 1  # (a)
        elif self._by_speed and not math.isnan(own_s):
            fastest_s = min(s for i in self._progress.active if not math.isnan(s := self._step_s[i]))
            steps = max(1, math.floor(self._steps * (fastest_s / own_s) * (1 + ROUNDING)))
            if steps != self._granted[worker]:
                rows.append(Decision("local-steps", worker, float(steps), (own_s, fastest_s)))
        self._granted[worker] = steps
        return [*rows, self._grant(worker, local_steps=steps)]


LIU = Reference(
    "liu2024asynchronous",
    "article",
    (
        "Liu, Bo",
        "Chhaparia, Rachita",
        "Douillard, Arthur",
        "Kale, Satyen",
        "Rusu, Andrei A.",
        "Shen, Jiajun",
        "Szlam, Arthur",
        "Ranzato, Marc'Aurelio",
    ),
    "Asynchronous Local-SGD Training for Language Modeling",
    2024,
    arxiv("2401.09135"),
)


DECOUPLED = Reference(
    "douillard2026decoupled",
    "article",
    ("Douillard, Arthur", "others"),
    "Decoupled DiLoCo for Resilient Distributed Pre-training",
    2026,
    arxiv("2604.21428"),
)


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCoOptions(ParadigmOptions):
    """Asynchronous DiLoCo: workers push the change of many local steps, the servers make outer steps with momentum.

    Parameters
    ----------
    steps
        Local steps of the fastest worker from one push to the next.
    by_speed
        A slower worker makes fewer steps, in proportion to its speed, so that all push about equally often.
    outer_lr
        Learning rate of the outer steps.
    outer_momentum
        Nesterov momentum of the outer steps.
    momentum_every
        Updates from one use of the whole momentum to the next (delayed Nesterov); 1: the usual Nesterov momentum.
    momentum_between
        Share of the momentum that each update in between uses; at most 1 / `momentum_every`.
    quorum
        Contributions that an update waits for; at most the number of workers.
    grace_s
        Seconds that an update then waits for more contributions.
    weigh
        Weights of an update's contributions: in proportion to their samples, or equal.
    """

    name: Literal["async-diloco"] = "async-diloco"
    steps: Count = 10
    by_speed: bool = True
    outer_lr: Positive = 0.7
    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    momentum_every: Count | None = default(None, "workers / `quorum`, rounded up")
    momentum_between: Part = 0.0
    quorum: Count = 1
    grace_s: NotNegative = 0.0
    weigh: Literal["samples", "equal"] = "samples"

    policy = AsyncDiLoCo
    contribution = "change"
    waits_for_update = True
    place = 115
    colour = "#AA7744"
    waiting = "none; with `quorum` or `grace_s`, until enough contributions have arrived"
    update = "an outer step along the change of many local steps, with delayed momentum"
    source = "Liu et al., 2024; Douillard et al., 2026"

    @property
    def papers(self) -> tuple[Reference, ...]:
        """Papers behind the paradigm."""
        return (LIU, DOUILLARD, DECOUPLED) if self.quorum > 1 or self.grace_s else (LIU, DOUILLARD)

    def check(self, job: JobTables) -> None:
        """Raise OptionError if there are too few workers for a quorum, or too much momentum."""
        n_workers = job.cluster.workers
        if self.quorum > n_workers:
            raise OptionError("paradigm.quorum", self.quorum, f"must be at most cluster.workers = {n_workers}")
        period = self._period(n_workers)
        if self.momentum_between > 1 / period:
            must = f"must be at most {1 / period:g}, one over paradigm.momentum_every = {period}"
            raise OptionError("paradigm.momentum_between", self.momentum_between, must)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the policy; the outer steps concern the servers' weights alone."""
        return {name: getattr(self, name) for name in ("steps", "by_speed", "quorum", "grace_s", "weigh")}

    @property
    def exchange_every(self) -> int:
        """Local steps of the fastest worker from one push to the next."""
        return self.steps

    def moving_rate(self, n_workers: int) -> float:
        """Return the outer learning rate."""
        return self.outer_lr

    def outer(self, n_workers: int) -> OuterMomentum:
        """Return the momentum of the outer steps."""
        return OuterMomentum(self.outer_momentum, self._period(n_workers), self.momentum_between)

    def _period(self, n_workers: int) -> int:
        return self.momentum_every or math.ceil(n_workers / self.quorum)

    @property
    def _waits(self) -> bool:
        return self.quorum > 1 or self.grace_s > 0

    def zero_time_workers(self, n_workers: int) -> int:
        """Return how many workers can iterate for ever while the others compute."""
        return n_workers if self.grace_s > 0 else self.quorum

    @property
    def guarantees(self) -> tuple[str, ...]:
        """Guarantees that the audit verifies."""
        return ("outer-steps",) if self._waits else ("outer-steps", "nobody-waits")

    @property
    def bound(self) -> str:
        """Description of the synchronisation, for messages."""
        if not self._waits:
            return super().bound
        grace = f" and at most {self.grace_s:g} s for more" if self.grace_s > 0 else ""
        return f"an update waits for {self.quorum} contribution{'s' * (self.quorum > 1)}{grace}"

    @property
    def label(self) -> str:
        """Name with the main options, for figures."""
        return f"async DiLoCo, {self.steps} steps" + (f", {self.quorum} together" if self.quorum > 1 else "")

    def describe(self, n_workers: int) -> str:
        """Return the paradigm in a sentence."""
        waits = self.bound if self._waits else "each push is an update, and no worker waits"
        return f"workers push the weight change of their local steps; {waits}"

    def details(self, n_workers: int) -> list[tuple[str, str]]:
        """Return further rows of `hpcsync show`, as names and values."""
        period, slower = self._period(n_workers), "fewer in proportion to their speed" if self.by_speed else "as many"
        momentum = f"momentum {self.outer_momentum:g}" + (f" at every {period} updates" if period > 1 else "")
        return [
            ("local steps", f"{self.steps} by the fastest worker, by the others {slower}"),
            ("outer steps", f"learning rate {self.outer_lr:g}, {momentum}"),
        ]
