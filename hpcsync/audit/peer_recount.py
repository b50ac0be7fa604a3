"""Counting again what the trace of a run without servers says: from the order of its reports, and its job.

Of a run that did not finish the last reports are missing, not all workers' alike; and the updates that followed from
its last row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from hpcsync.config.paradigms import GossipOptions, LocalSgdOptions, StanzaOptions
from hpcsync.paradigms.gossip import PeerSelection
from hpcsync.planning.layer_groups import Groups
from hpcsync.trace.iteration_counts import running_count
from hpcsync.trace.reader import Trace
from hpcsync.trace.schema import ALL_PEERS, NO_PEER, Change

DRIFT = 1e-4  # seconds in which the clocks of two hosts come apart in one second, at most
SAME_TIME_S = 1e-6  # differences of float64 seconds agree far better; nobody means less by a time


def previous(workers: np.ndarray) -> np.ndarray:
    """The row before each one of the same worker, or -1."""
    order = np.argsort(workers, kind="stable")
    before = np.full(len(workers), -1)
    before[order[1:]] = np.where(workers[order[1:]] == workers[order[:-1]], order[:-1], -1)
    return before


class PeerRecount:
    """The rows of `/exchanges`, in the order in which they were reported, and what follows from that order.

    steps: those that are iterations. count: of each step, which one of its worker's it is, from 1 on.
    uncertain_s: of each step, how far its worker's clock may be off.
    """

    def __init__(self, trace: Trace) -> None:
        self.job, self.finished, self.n_workers = trace.job, trace.finished, trace.n_workers
        self.attributes = trace.attributes
        self.rows, self.updates, self.evaluations, self.membership, clocks = (
            trace.tables[table] for table in ("exchanges", "updates", "evaluations", "membership", "clocks")
        )
        self.decisions = trace.tables["decisions"]
        self.is_step = self.rows["batch_size"] > 0
        self.steps = self.rows[self.is_step]
        self.count = running_count(self.steps["worker"])
        self.made = np.bincount(self.steps["worker"], minlength=self.n_workers)  # iterations of each worker
        self.left_s = np.full(self.n_workers, np.inf)
        np.minimum.at(self.left_s, self.membership["worker"], self.membership["now_s"])
        of_worker = np.zeros(self.n_workers)
        known = clocks[(clocks["rank"] >= 0) & (clocks["rank"] < self.n_workers)]
        of_worker[known["rank"]] = known["uncertainty_s"]
        drift = DRIFT if len(np.unique(clocks["host"])) > 1 else 0.0
        self.uncertain_s = of_worker[self.steps["worker"]] + drift * self.steps["now_s"] + SAME_TIME_S

    @property
    def mode(self) -> str:
        """The paradigm, or what a gossip's workers do."""
        paradigm = self.job.paradigm
        return paradigm.mode if isinstance(paradigm, GossipOptions) else paradigm.name

    @property
    def together(self) -> bool:
        """Whether workers exchange at the same iteration, all of them."""
        return self.one_model or self.mode in ("local-sgd", "permutation")

    @property
    def one_model(self) -> bool:
        """Whether an iteration of all is one update; otherwise every step is one."""
        return self.job.one_model

    @cached_property
    def groups(self) -> Groups | None:
        """Where layers are separated: who trains which."""
        paradigm = self.job.paradigm
        return paradigm.groups(self.n_workers) if isinstance(paradigm, StanzaOptions) else None

    @cached_property
    def is_fc(self) -> np.ndarray:
        """Which steps are of layers above the cut; where layers are not separated, none. Shape (n_steps,)."""
        return self.steps["worker"] < (self.groups.n_fc if self.groups else 0)

    @cached_property
    def samples(self) -> np.ndarray:
        """Of each step, by how many more samples the model has been trained. Those of a convolution worker pass through
        a fully-connected worker too, where they do not count again. Shape (n_steps,)."""
        return np.where(self.is_fc, 0, self.steps["batch_size"])

    @property
    def period(self) -> int:
        """Iterations from one exchange to the next."""
        match self.job.paradigm:
            case LocalSgdOptions(steps=period) | GossipOptions(period=period):
                return period
        return 1

    @cached_property
    def peer(self) -> np.ndarray:
        """Whom each step's exchange is with, as the job says. Shape (n_steps,)."""
        exchanges, workers = self.count % self.period == 0, self.steps["worker"]
        if self.groups is not None:
            fc_of = [ALL_PEERS if self.groups.is_fc(w) else self.groups.fc_of(w) for w in range(self.n_workers)]
            return np.array(fc_of)[workers]
        if not isinstance(self.job.paradigm, GossipOptions):
            return np.where(exchanges, ALL_PEERS, NO_PEER)
        peer = np.full(len(self.count), NO_PEER)
        if self.mode == "permutation":
            peer[exchanges] = self.permutations[self.count[exchanges] // self.period, workers[exchanges]]
        else:
            peers, rounds = self._peers, self.count[exchanges] // self.period
            drawn = zip(workers[exchanges].tolist(), rounds.tolist(), self._weight[exchanges].tolist(), strict=True)
            if len(self.died):
                peer[exchanges] = self._drawn_among_the_living(list(drawn), self.steps[exchanges])
            else:
                peer[exchanges] = [peers.drawn(worker, round, weight) for worker, round, weight in drawn]
        return peer

    def _drawn_among_the_living(self, drawn: list[tuple[int, int, float]], steps: np.ndarray) -> list[int]:
        """A worker hears of deaths one after the other, each after its row in /membership, and does not forget. The
        trace does not say when: of what can have been drawn, what was, if it is among that."""
        dead = self.died["worker"].tolist()
        without = [replace(self._peers, dead=tuple(dead[:heard])) for heard in range(len(dead) + 1)]
        happened = np.searchsorted(self.died["now_s"], steps["now_s"], side="right").tolist()
        heard, peers = [0] * self.n_workers, []
        for (worker, round, weight), found, most in zip(drawn, steps["peer"].tolist(), happened, strict=True):
            possible = range(heard[worker], 1 + (most if worker not in dead[:most] else dead.index(worker)))
            chosen = next((h for h in possible if without[h].drawn(worker, round, weight) == found), possible[-1])
            heard[worker] = chosen
            peers.append(without[chosen].drawn(worker, round, weight))
        return peers

    @cached_property
    def died(self) -> np.ndarray:
        """The rows of /membership of workers that died, in their order."""
        return self.membership[self.membership["change"] == Change.DIED]

    @property
    def _weight(self) -> np.ndarray:
        """Every worker's push-sum weight before the exchange of each step. Shape (n_steps,)."""
        return np.append(self.rows["weight"], 1.0)[previous(self.rows["worker"])][self.is_step]

    @property
    def exchanged(self) -> np.ndarray:
        """Which steps end with an exchange with somebody else, or everybody. Shape (n_steps,)."""
        return (self.peer != NO_PEER) & (self.peer != self.steps["worker"])

    @cached_property
    def permutations(self) -> np.ndarray:
        """Whom each worker gives to in round 1, 2, ...; shape (1 + n_rounds, n_workers), round 0 being none."""
        n_rounds = int(self.count.max(initial=0)) // self.period
        rounds = [range(self.n_workers), *(self._peers.permutation(round) for round in range(1, n_rounds + 1))]
        return np.array([list(gives_to) for gives_to in rounds])

    @property
    def _peers(self) -> PeerSelection:
        paradigm = self.job.paradigm
        assert isinstance(paradigm, GossipOptions)
        return PeerSelection(self.n_workers, self.job.seed, paradigm.topology, paradigm.include_self)

    @cached_property
    def n_contributing(self) -> np.ndarray:
        """Of those in step, how many take part in the exchange that ends an iteration, or ended the last one before it.

        Those who have made an iteration since the exchange before, also who has left by then. Shape
        (1 + n_iterations,); that of iteration 0 is everybody.
        """
        n_iterations = int(self.count.max(initial=0))
        gone = np.cumsum(np.bincount(self.made[~self.going_on], minlength=n_iterations + 1))  # after at most 0, 1, ...
        exchange = np.arange(n_iterations + 1) // self.period * self.period
        took_part = np.bincount(self.count, minlength=n_iterations + 1)[exchange]
        took_part += gone[exchange - 1] - gone[np.maximum(exchange - self.period, 0)]
        return np.where(exchange == 0, self.n_workers, took_part)

    @cached_property
    def steps_as_counted(self) -> np.ndarray:
        """Of those in step, how many steps all have made after each iteration, as they count: after an exchange all of
        them, and from there as if everybody who contributed to it went on. Shape (1 + n_iterations,)."""
        iterations = np.arange(len(self.n_contributing))
        exchange = iterations // self.period * self.period
        made = np.cumsum(np.bincount(self.count, minlength=len(iterations)))[exchange]
        return made + (iterations - exchange) * self.n_contributing

    @cached_property
    def samples_as_counted(self) -> np.ndarray:
        """The samples of `steps_as_counted`. Between exchanges, batches are alike. Shape (1 + n_iterations,)."""
        iterations = np.arange(len(self.n_contributing))
        exchange = iterations // self.period * self.period
        sizes = self.samples
        made = np.cumsum(np.bincount(self.count, sizes, minlength=len(iterations)).astype(np.int64))[exchange]
        return made + (iterations - exchange) * self.n_contributing * int(sizes.max(initial=0))

    @cached_property
    def going_on(self) -> np.ndarray:
        """Which workers have not left, shape (n_workers,)."""
        return np.isinf(self.left_s)

    def known(self, iteration: np.ndarray) -> np.ndarray:
        """Whether everybody's report of these iterations is there, but for those who had left."""
        return iteration <= self.made[self.going_on].min(initial=np.iinfo(np.int64).max)

    def told(self, row: int) -> str:
        """Which step it is."""
        return f"iteration {self.steps['iteration'][row]} of worker {self.steps['worker'][row]}"

    # ---- updates ---------------------------------------------------------------------------------------------------

    @cached_property
    def update_of(self) -> np.ndarray:
        """Of each step: the version that it should have made or contributed to, from 1 on. Shape (n_steps,)."""
        return self.count if self.one_model else np.arange(1, len(self.steps) + 1)

    @cached_property
    def updated_s(self) -> np.ndarray:
        """Of each version that should be there: when all that it takes was known. Shape (n_versions,)."""
        if not self.one_model:
            return self.steps["now_s"]
        known_s = np.full(len(self.n_contributing), -np.inf)
        np.maximum.at(known_s, self.count, self.steps["now_s"])
        left = np.flatnonzero(~self.going_on)
        late = np.full(len(known_s) + 1, -np.inf)  # the others went on without whoever had left, once that was known
        np.maximum.at(late, self.made[left] + 1, self.left_s[left])
        known_s = np.maximum(known_s, np.maximum.accumulate(late)[:-1])[1:]
        return known_s[self.known(np.arange(1, len(known_s) + 1))]

    @cached_property
    def first_step_of(self) -> np.ndarray:
        """Of each version that should be there: the first step reported of those that it takes. (n_versions,)."""
        first = np.unique(self.update_of, return_index=True)[1]
        return first[: len(self.updated_s)]
