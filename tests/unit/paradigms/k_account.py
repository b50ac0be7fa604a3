"""Recount of the k family from events and actions alone: contributors, staleness and cancellations."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from hpcsync.paradigms.events import Accumulate, Apply, Cancel, Drop, Grant, Left, PushInfo


@dataclass
class Account:
    """Recounted outcome of every push.

    updates: of each, its contributions as (worker, staleness, weight), in the order in which they were taken.
    left:    how many workers had left when it was made.
    """

    n_workers: int
    updates: list[list[tuple[int, int, float]]] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)  # (worker, staleness)
    cancelled: Counter = field(default_factory=Counter)  # (worker, version): number of Cancel actions

    def __post_init__(self):
        self.read = [0] * self.n_workers
        self.staleness = [0] * self.n_workers  # of the contribution in the slot
        self.round = []
        self.departures = 0

    def see(self, event, actions):
        version = len(self.updates)
        if isinstance(event, PushInfo):
            self.staleness[event.worker] = version - self.read[event.worker]
        elif isinstance(event, Left):
            self.departures += 1
        for action in actions:
            match action:
                case Accumulate(worker, weight):
                    self.round.append((worker, self.staleness[worker], weight))
                case Apply(workers, weights):
                    weights = weights or (1.0,) * len(workers)
                    for worker, weight in zip(workers, weights, strict=True):
                        self.round.append((worker, self.staleness[worker], weight))
                    self.updates.append(self.round)
                    self.left.append(self.departures)
                    self.round = []
                case Drop(worker):
                    self.dropped.append((worker, self.staleness[worker]))
                case Cancel(worker):
                    self.cancelled[worker, self.read[worker]] += 1
                case Grant(worker):
                    self.read[worker] = len(self.updates)


def recount(referee):
    """Return the account of a whole run."""
    account = Account(referee.n_workers)
    for event, actions in referee.trace:
        account.see(event, actions)
    return account


def mean_staleness(account):
    """Staleness of each update's contributions."""
    return [fmean(staleness for _, staleness, _ in update) for update in account.updates]


def largest_staleness(account):
    """Staleness of all pushes, applied or dropped."""
    applied = (staleness for update in account.updates for _, staleness, _ in update)
    return max(chain(applied, (staleness for _, staleness in account.dropped)))
