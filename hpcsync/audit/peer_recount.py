"""Recount of a trace without servers from the order of its rows and from its job.

In an unfinished trace the last rows of /exchanges are missing, not equally many of each worker, and so are the
updates that follow from its last row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from hpcsync.audit.check import SAME_TIME_S
from hpcsync.audit.clock_errors import clock_errors_s
from hpcsync.paradigms.gossip import PeerSelection
from hpcsync.paradigms.records import ALL_PEERS, NO_PEER
from hpcsync.planning.layer_groups import Groups
from hpcsync.trace.iteration_counts import running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import Change, Rows


def previous(workers: Rows) -> Rows:
    """Return the previous row of the same worker for each row, or -1."""
    order = np.argsort(workers, kind="stable")
    before = np.full(len(workers), -1)
    before[order[1:]] = np.where(workers[order[1:]] == workers[order[:-1]], order[:-1], -1)
    return before


class PeerRecount:
    """Rows of `/exchanges` in the order in which rank 0 received them, and quantities that follow from that order.

    Attributes
    ----------
    rows
        All rows of /exchanges.
    steps
        The rows that are iterations, shape (n_steps,); the others have batch size 0.
    count
        Number of each step among those of its worker, from 1, shape (n_steps,).
    made
        Number of iterations of each worker, shape (n_workers,).
    left_s
        Time at which each worker left, inf if it did not, shape (n_workers,).
    uncertain_s
        Uncertainty of the clock of each step's worker, in seconds, shape (n_steps,).
    """

    def __init__(self, trace: Trace) -> None:
        self.job, self.finished, self.n_workers = trace.job, trace.finished, trace.n_workers
        self.attributes = trace.attributes
        self.rows, self.updates, self.evaluations, self.membership, clocks = (
            trace.tables[table] for table in ("exchanges", "updates", "evaluations", "membership", "clocks")
        )
        self.decisions, self.starts = trace.tables["decisions"], trace.tables["starts"]
        self.is_step = self.rows["batch_size"] > 0
        self.steps = self.rows[self.is_step]
        self.count = running_count(self.steps["worker"])
        self.made = np.bincount(self.steps["worker"], minlength=self.n_workers)
        self.left_s = np.full(self.n_workers, np.inf)
        np.minimum.at(self.left_s, self.membership["worker"], self.membership["now_s"])
        self.uncertain_s = clock_errors_s(clocks, 0, self.steps["worker"], self.steps["now_s"]) + SAME_TIME_S

    @cached_property
    def method(self) -> Any:
        """What a worker does at the end of an iteration (`PeerMethod`), for its traits."""
        return self.job.paradigm.method(self.n_workers, self.job.seed)

    @property
    def together(self) -> bool:
        """True if all workers exchange after the same iteration."""
        return self.job.paradigm.lead_bound < math.inf

    @property
    def pushes(self) -> bool:
        """True if models arrive at any time, also after the worker's last iteration."""
        return bool(self.method.transport == "inbox")

    @property
    def one_model(self) -> bool:
        """True if an iteration of all workers is one update; otherwise every step is one."""
        return self.job.paradigm.one_model

    @property
    def pairwise(self) -> bool:
        """True if a worker that averages with a peer changes the peer's weights, too."""
        return self.job.paradigm.pairwise

    @cached_property
    def initiates(self) -> Rows:
        """Workers that may draw another one, bool of shape (n_workers,)."""
        return np.array([list(self._peers.neighbours(worker)) != [worker] for worker in range(self.n_workers)])

    @cached_property
    def groups(self) -> Groups | None:
        """The groups of workers under layer separation, otherwise None."""
        return self.job.paradigm.groups(self.n_workers)

    @cached_property
    def is_fc(self) -> Rows:
        """Steps of fully-connected workers, bool of shape (n_steps,). None without layer separation."""
        return self.steps["worker"] < (self.groups.n_fc if self.groups else 0)

    @cached_property
    def samples(self) -> Rows:
        """Samples by which each step adds to the training of the model, shape (n_steps,).

        The samples of a convolution worker also pass through a fully-connected worker, where they do not count again.
        """
        return np.where(self.is_fc, 0, self.steps["batch_size"])

    @property
    def period(self) -> int:
        """Iterations from one exchange to the next."""
        return self.job.paradigm.exchange_every

    @cached_property
    def peer(self) -> Rows:
        """Peer of each step's exchange according to the job, shape (n_steps,)."""
        exchanges, workers = self.count % self.period == 0, self.steps["worker"]
        if self.groups is not None:
            fc_of = [ALL_PEERS if self.groups.is_fc(w) else self.groups.fc_of(w) for w in range(self.n_workers)]
            return np.array(fc_of)[workers]
        if not self.draws_peers:
            return np.where(exchanges, ALL_PEERS, NO_PEER)
        peer = np.full(len(self.count), NO_PEER)
        if self.together:
            peer[exchanges] = self.peers_together[self.count[exchanges] // self.period, workers[exchanges]]
        else:
            peers, rounds = self._peers, self.count[exchanges] // self.period
            drawn = zip(workers[exchanges].tolist(), rounds.tolist(), self._weight[exchanges].tolist(), strict=True)
            if len(self.died):
                peer[exchanges] = self._drawn_among_survivors(list(drawn), self.steps[exchanges])
            else:
                peer[exchanges] = [peers.drawn(worker, round, weight) for worker, round, weight in drawn]
        return peer

    def _drawn_among_survivors(self, drawn: list[tuple[int, int, float]], steps: Rows) -> list[int]:
        """Return the peers drawn in a run in which workers died.

        A worker learns of deaths in the order of /membership, each after its row, and does not forget. The trace does
        not record when. Of the peers that a worker can have drawn, the recorded one is returned if it is among them.
        """
        dead = self.died["worker"].tolist()
        without = [replace(self._peers, dead=tuple(dead[:n])) for n in range(len(dead) + 1)]
        happened = np.searchsorted(self.died["now_s"], steps["now_s"], side="right").tolist()
        n_known, peers = [0] * self.n_workers, []
        for (worker, round, weight), found, most in zip(drawn, steps["peer"].tolist(), happened, strict=True):
            possible = range(n_known[worker], 1 + (most if worker not in dead[:most] else dead.index(worker)))
            chosen = next((n for n in possible if without[n].drawn(worker, round, weight) == found), possible[-1])
            n_known[worker] = chosen
            peers.append(without[chosen].drawn(worker, round, weight))
        return peers

    @cached_property
    def died(self) -> Rows:
        """Rows of /membership of workers that died, in order."""
        return self.membership[self.membership["change"] == Change.DIED]

    @cached_property
    def unrecorded(self) -> Rows:
        """Largest number of steps without a row of each worker that died, else 0; shape (n_workers,).

        The messages that rank 0 has not received are lost with their sender. There may be one since the last recorded
        step, and one in each time of the run's shortest iteration.
        """
        begin_s, before = self.steps["begin_s"], previous(self.steps["worker"])
        shortest_s = (begin_s - begin_s[before])[before >= 0].min(initial=np.inf)
        last_s, unrecorded = np.zeros(self.n_workers), np.zeros(self.n_workers, np.int64)
        np.maximum.at(last_s, self.steps["worker"], self.steps["end_s"] - self.uncertain_s)
        dead = self.died["worker"]
        unrecorded[dead] = 1 + np.maximum(self.left_s - last_s, 0.0)[dead] // max(shortest_s, SAME_TIME_S)
        return unrecorded

    @property
    def _weight(self) -> Rows:
        """Push-sum weight of the worker before the exchange of each step, shape (n_steps,)."""
        return np.append(self.rows["weight"], 1.0)[previous(self.rows["worker"])][self.is_step]

    @property
    def exchanged(self) -> Rows:
        """Steps that end with an exchange with another worker, or with all; bool of shape (n_steps,)."""
        return (self.peer != NO_PEER) & (self.peer != self.steps["worker"])

    @cached_property
    def peers_together(self) -> Rows:
        """Peer of each worker in round 1, 2, ... of synchronous gossip; shape (1 + n_rounds, n_workers).

        Round 0 is the identity.
        """
        n_rounds = int(self.count.max(initial=0)) // self.period
        rounds = [np.arange(self.n_workers)]
        for round in range(1, n_rounds + 1):
            if self.method.permutes:
                rounds.append(np.array(self._peers.permutation(round)))
            else:
                rounds.append(np.array([self._peers.drawn(worker, round) for worker in range(self.n_workers)]))
        return np.array(rounds)

    @cached_property
    def sent_together(self) -> Rows:
        """Models sent to each worker in round 1, 2, ... of synchronous gossip; shape (1 + n_rounds, n_workers)."""
        peers = self.peers_together
        others = peers != np.arange(self.n_workers)
        if self.method.reads:
            return others.astype(np.int64)
        return np.array(
            [np.bincount(row[own], minlength=self.n_workers) for row, own in zip(peers, others, strict=True)]
        )

    @cached_property
    def weights_together(self) -> Rows:
        """Push-sum weight of each worker after round 1, 2, ... of synchronous gossip; shape (1 + n_rounds, n_workers).

        Workers that have left exchange too, but have no rows.
        """
        weights = [np.ones(self.n_workers)]
        for peers in self.peers_together[1:]:
            sends = peers != np.arange(self.n_workers)
            kept = np.where(sends, weights[-1] / 2, weights[-1])
            received = np.zeros(self.n_workers)
            np.add.at(received, peers[sends], kept[sends])
            weights.append(kept + received)
        return np.array(weights)

    @property
    def draws_peers(self) -> bool:
        """True if a worker exchanges with one peer, which is drawn; otherwise all exchange with all."""
        return self.job.paradigm.peers(self.n_workers, self.job.seed) is not None

    @cached_property
    def _peers(self) -> PeerSelection:
        peers: PeerSelection | None = self.job.paradigm.peers(self.n_workers, self.job.seed)
        assert peers is not None
        return peers

    @cached_property
    def n_contributing(self) -> Rows:
        """Number of workers in the latest exchange up to each iteration, shape (1 + n_iterations,).

        For synchronous workers. These are the workers that have made an iteration since the exchange before, including
        those that have left since. The value for iteration 0 is n_workers.
        """
        n_iterations = int(self.count.max(initial=0))
        n_left = np.cumsum(
            np.bincount(self.made[~self.remaining], minlength=n_iterations + 1)
        )  # after at most 0, 1, ... iterations
        exchange = np.arange(n_iterations + 1) // self.period * self.period
        took_part = np.bincount(self.count, minlength=n_iterations + 1)[exchange]
        took_part += n_left[exchange - 1] - n_left[np.maximum(exchange - self.period, 0)]
        return np.where(exchange == 0, self.n_workers, took_part)

    @cached_property
    def steps_as_counted(self) -> Rows:
        """Number of steps of all workers after each iteration as workers count them, shape (1 + n_iterations,).

        For synchronous workers. After an exchange the count is exact. From there on it assumes that all contributors to
        that exchange continue.
        """
        iterations = np.arange(len(self.n_contributing))
        exchange = iterations // self.period * self.period
        made = np.cumsum(np.bincount(self.count, minlength=len(iterations)))[exchange]
        return made + (iterations - exchange) * self.n_contributing

    @cached_property
    def samples_as_counted(self) -> Rows:
        """Number of samples of `steps_as_counted`, shape (1 + n_iterations,).

        Between exchanges all batches have the same size.
        """
        iterations = np.arange(len(self.n_contributing))
        exchange = iterations // self.period * self.period
        sizes = self.samples
        made = np.cumsum(np.bincount(self.count, sizes, minlength=len(iterations)).astype(np.int64))[exchange]
        return made + (iterations - exchange) * self.n_contributing * int(sizes.max(initial=0))

    @cached_property
    def remaining(self) -> Rows:
        """Workers that have not left, bool of shape (n_workers,)."""
        return np.isinf(self.left_s)

    def known(self, iteration: Rows) -> Rows:
        """Return for each of these iterations whether the trace has the rows of all workers that had not left."""
        return iteration <= self.made[self.remaining].min(initial=np.iinfo(np.int64).max)

    def step_name(self, row: int) -> str:
        """Return the name of a step for messages."""
        return f"iteration {self.steps['iteration'][row]} of worker {self.steps['worker'][row]}"

    # ---- updates ---------------------------------------------------------------------------------------------------

    @cached_property
    def update_of(self) -> Rows:
        """Version that each step makes or contributes to, from 1, shape (n_steps,)."""
        return self.count if self.one_model else np.arange(1, len(self.steps) + 1)

    @cached_property
    def updated_s(self) -> Rows:
        """Time at which all contributions of each expected version were known, in seconds, shape (n_versions,)."""
        if not self.one_model:
            return self.steps["now_s"]
        known_s = np.full(len(self.n_contributing), -np.inf)
        np.maximum.at(known_s, self.count, self.steps["now_s"])
        left = np.flatnonzero(~self.remaining)
        late = np.full(len(known_s) + 1, -np.inf)  # an update without a worker that left waits until that is known
        np.maximum.at(late, self.made[left] + 1, self.left_s[left])
        known_s = np.maximum(known_s, np.maximum.accumulate(late)[:-1])[1:]
        counted = np.bincount(self.count, self.samples > 0, len(known_s) + 1)[1:] > 0  # else of fc workers alone
        return known_s[counted & self.known(np.arange(1, len(known_s) + 1))]

    @property
    def possible_s(self) -> Rows:
        """Earliest time at which each recorded version can have existed, in seconds, shape (n_updates,).

        By then its steps have been computed: all of one iteration, or as many as the version counts. Under layer
        separation they have begun: a worker publishes its part before its step ends.
        """
        end_s = self.steps["end_s" if self.groups is None else "begin_s"] - self.uncertain_s
        n = len(self.updates)
        if not self.one_model:
            return np.append(np.sort(end_s), np.full(n, -np.inf))[:n]
        made_s, known = np.full(n, -np.inf), self.count <= n
        np.maximum.at(made_s, self.count[known] - 1, end_s[known])
        return made_s

    @cached_property
    def first_step_of(self) -> Rows:
        """First recorded step of each expected version, as an index into `steps`, shape (n_versions,)."""
        first = np.unique(self.update_of, return_index=True)[1]
        return first[: len(self.updated_s)]
