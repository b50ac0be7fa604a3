"""Virtual time for one paradigm: workers with given times, and a referee with counts of its own.

`run` plays a schedule and passes every event with its answer to a `Referee`, which recounts from them alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st

from hpcsync.paradigms.base import Paradigm
from hpcsync.paradigms.events import (
    Accumulate,
    Action,
    Apply,
    Decision,
    Drop,
    Elapsed,
    Event,
    Grant,
    Joined,
    Left,
    PushInfo,
)

# The same examples on every run, so that failures are reproducible.
PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)


@dataclass
class Referee:
    """Recount of a run from its events and answers, which asserts the invariants of every paradigm.

    bound_iters: largest start lead that is allowed; the push lead may be one more.
    grants_first: whether a worker reads the weights before its own contribution is applied.
    slowest_waits: whether the worker with the fewest pushes may be blocked.
    staleness_max: updates that may be made between a grant and the use of the contribution that is computed from it.
    """

    n_workers: int
    bound_iters: float = math.inf
    grants_first: bool = False
    slowest_waits: bool = False
    staleness_max: float = math.inf
    trace: list[tuple[Event, list[Action]]] = field(default_factory=list)
    largest_start_gap: int = 0
    largest_push_gap: int = 0

    def __post_init__(self) -> None:
        self.pushes = [0] * self.n_workers
        self.iters = [0] * self.n_workers  # pushes, and iterations credited when it joined
        self.least = 0  # of the active workers
        self.fresh = set()  # workers that have joined with an empty slot
        self.settled = [0] * self.n_workers  # contributions applied, accumulated or dropped
        self.active = set(range(self.n_workers))
        self.blocked_since_s: dict[int, float] = {}
        self.version = 0
        self.read = [0] * self.n_workers  # version at each worker's grant

    def see(self, event: Event, actions: list[Action]) -> None:
        self.trace.append((event, actions))
        if isinstance(event, PushInfo):
            self.pushes[event.worker] += 1
            self.iters[event.worker] += 1
            self.blocked_since_s[event.worker] = event.now_s
            self.fresh.discard(event.worker)
        elif isinstance(event, Joined):
            self.iters[event.worker] = max(self.iters[event.worker], self.least)
            self.active.add(event.worker)
            self.blocked_since_s[event.worker] = event.now_s
            if self.settled[event.worker] == self.pushes[event.worker]:
                self.fresh.add(event.worker)
        elif isinstance(event, Left):
            self.active.remove(event.worker)
            self.blocked_since_s.pop(event.worker, None)
        least = min((self.iters[worker] for worker in self.active), default=self.least)
        assert least >= self.least, f"the slowest were further before {event}"
        self.least = least
        for worker in self.active:
            self.largest_push_gap = max(self.largest_push_gap, self.lead(worker))
        for action in actions:
            if isinstance(action, Apply):
                for worker in action.workers:
                    self._see_used(worker, action)
                self.version += 1
            elif isinstance(action, Accumulate):
                self._see_used(action.worker, action)
            elif isinstance(action, Drop):
                self._see_settled(action.worker, action)
            elif isinstance(action, Grant):
                self._see_grant(action, event.now_s)
        assert self.largest_push_gap <= self.bound_iters + 1, f"push lead {self.largest_push_gap} at {event}"
        if self.active:
            assert self.active - self.blocked_since_s.keys(), f"deadlock: every worker is blocked after {event}"
            slowest = [worker for worker in self.blocked_since_s if self.lead(worker) == 0]
            assert self.slowest_waits or not slowest, f"the slowest, {slowest}, are blocked after {event}"

    def lead(self, worker: int) -> int:
        return self.iters[worker] - min(self.iters[other] for other in self.active)

    def _see_used(self, worker: int, action: Action) -> None:
        self._see_settled(worker, action)
        staleness = self.version - self.read[worker]
        assert staleness <= self.staleness_max, f"{action}: a stale contribution, {staleness} updates late"

    def _see_settled(self, worker: int, action: Action) -> None:
        self.settled[worker] += 1
        assert self.settled[worker] == self.pushes[worker], f"{action}: not one contribution per push"

    def _see_grant(self, grant: Grant, now_s: float) -> None:
        worker = grant.worker
        assert worker in self.blocked_since_s, f"{grant} answers no push"
        pending = self.grants_first and worker not in self.fresh
        held_s = now_s - self.blocked_since_s.pop(worker)
        assert grant.iteration == self.pushes[worker] + 1, f"{grant} after {self.pushes[worker]} pushes"
        assert grant.gap_iters == self.lead(worker), f"{grant}: the lead is {self.lead(worker)}"
        assert grant.held_s == held_s, f"{grant}: it was blocked for {held_s} s"
        wrong_order = f"{grant} {'after' if self.grants_first else 'before'} its own contribution is applied"
        assert self.settled[worker] == self.pushes[worker] - pending, wrong_order
        self.read[worker] = self.version
        self.largest_start_gap = max(self.largest_start_gap, grant.gap_iters)
        assert grant.gap_iters <= self.bound_iters, f"{grant} beyond the bound of {self.bound_iters}"

    def actions(self, kind: type[Action]) -> list[Action]:
        return [action for _, actions in self.trace for action in actions if isinstance(action, kind)]

    def decisions(self) -> list[dict[str, float]]:
        """Return the decisions with their inputs by name."""
        fields = self.decision_fields
        return [
            dict(zip(fields, decision.inputs, strict=True), chosen=decision.chosen, worker=decision.worker)
            for decision in self.actions(Decision)
        ]

    decision_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """intervals_s[i]: seconds of worker i's iterations; it leaves when granted one more.

    deaths_s: time at which a worker dies, unless it has left before.
    changes: times and workers that leave then, or join if they have left.
    """

    intervals_s: Sequence[Sequence[float]]
    deaths_s: dict[int, float] = field(default_factory=dict)
    changes: Sequence[tuple[float, int]] = ()

    @property
    def n_workers(self) -> int:
        return len(self.intervals_s)


def fixed(*intervals_s: float, until_s: float) -> Schedule:
    """Return workers of constant speed that all die at the end."""
    deaths_s = dict.fromkeys(range(len(intervals_s)), until_s)
    return Schedule([[t] * (int(until_s / t) + 1) for t in intervals_s], deaths_s)


def referee_of(paradigm: Paradigm, bound_iters: float = math.inf) -> Referee:
    """Return a referee of a run that begins."""
    return Referee(
        paradigm.n_workers,
        bound_iters,
        grants_first=paradigm.name == "easgd",
        slowest_waits=paradigm.name in ("ashl", "adsp", "async-diloco") or paradigm.name.startswith("k-"),
        staleness_max=0 if paradigm.synchronous and paradigm.name != "sync-switch" else math.inf,
        decision_fields=tuple(paradigm.decision_fields),
    )


def run(paradigm: Paradigm, schedule: Schedule, bound_iters: float = math.inf, check: bool = True) -> Referee:
    """Play the schedule to its end. With `check` the paradigm's own check runs at every event as well."""
    referee = referee_of(paradigm, bound_iters)
    order = itertools.count()  # of events at the same time: first scheduled, first handled
    queue: list[tuple[float, int, int, Event]] = []
    stays = [0] * schedule.n_workers  # departures of each worker, which void its pending events
    remaining = [iter(intervals_s) for intervals_s in schedule.intervals_s]

    def start(worker: int, now_s: float) -> None:
        interval_s = next(remaining[worker], None)
        if interval_s is None:
            event: Event = Left(now_s, worker)
        else:
            event = PushInfo(now_s + interval_s, worker, compute_s=interval_s, loss=1 / (1 + referee.pushes[worker]))
        heapq.heappush(queue, (event.now_s, next(order), stays[worker], event))

    for worker, death_s in schedule.deaths_s.items():
        heapq.heappush(queue, (death_s, next(order), 0, Left(death_s, worker)))
    for change_s, worker in schedule.changes:
        heapq.heappush(queue, (change_s, next(order), -1, Joined(change_s, worker)))
    for worker in range(schedule.n_workers):
        start(worker, 0.0)
    while queue:
        _, _, stay, event = heapq.heappop(queue)
        worker = event.worker
        if isinstance(event, Elapsed) and event != paradigm.due:
            continue  # void: other events have come before
        if stay == -1 and worker in referee.active and not isinstance(event, Elapsed):
            event = Left(event.now_s, worker)
        elif stay not in (-1, stays[worker]):
            continue  # void: it has died or left since
        stays[worker] += isinstance(event, Left)
        actions = paradigm.handle(event)
        if check:
            paradigm.check()
        referee.see(event, actions)
        for action in actions:
            if isinstance(action, Grant):
                start(action.worker, event.now_s)
        if (due := paradigm.due) is not None:
            heapq.heappush(queue, (due.now_s, next(order), -1, due))
    return referee


# Small integers give ties and simultaneous pushes, floats give real clock values.
_intervals_s = st.one_of(
    st.sampled_from([1.0, 2.0, 3.0]),
    st.floats(0.0, 8.0, allow_nan=False),
    st.floats(0.9, 1.1, allow_nan=False),
)


@st.composite
def schedules(draw: st.DrawFn, max_workers: int = 5, max_iterations: int = 25, max_changes: int = 0) -> Schedule:
    """Random interval traces: a speed, noise and end of data per worker, and possibly a death or a join."""
    n_workers = draw(st.integers(1, max_workers))
    intervals_s = []
    for _ in range(n_workers):
        n_iterations = draw(st.integers(0, max_iterations))
        if draw(st.booleans()):
            intervals_s.append([draw(_intervals_s)] * n_iterations)
        else:
            intervals_s.append(draw(st.lists(_intervals_s, min_size=n_iterations, max_size=n_iterations)))
    dying = draw(st.sets(st.integers(0, n_workers - 1), max_size=2))
    deaths_s = {worker: draw(st.floats(0.0, 40.0)) for worker in sorted(dying)}
    change = st.tuples(st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 40.0)), st.integers(0, n_workers - 1))
    return Schedule(intervals_s, deaths_s, draw(st.lists(change, max_size=max_changes)))
