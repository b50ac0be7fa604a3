"""Audits of gossip in which a worker dies: the invariants of the survivors, and negative controls."""

import math

import numpy as np
import pytest

from hpcsync.core.peer_coordinator import PeerCoordinator
from hpcsync.paradigms.gossip import PeerSelection
from hpcsync.paradigms.records import StepInfo
from hpcsync.trace.schema import Change
from tests.unit.audit.failing import failing
from tests.unit.recorder import Recorder
from tests.unit.trace.peer_recorder import in_memory, peer_job
from tests.unit.trace.recorder import edit, with_rows

N, DEAD, DIES_AT, ROUNDS = 4, 2, 9, 30
BATCH, BYTES = 4, 24


class Gossip:
    """A run whose workers step in turn; a sent model arrives at once and is received at the receiver's next exchange.

    Parameters
    ----------
    lags
        Number of rounds after the death until each worker learns of it.
    n_unrecorded
        Number of models of the dead worker that arrive, from as many last iterations that are not recorded.
    """

    def __init__(self, mode: str, lags: tuple[int, ...] = (0, 2, 0, 5), n_unrecorded: int = 0) -> None:
        dies = DIES_AT + max(1, n_unrecorded)
        steps = ROUNDS * (N - 1) + DIES_AT
        paradigm = {"name": "gossip", "mode": mode}
        self.job = peer_job(paradigm, (1.0,) * N, samples=steps * BATCH, evaluation={"every_samples": 0})
        self.job = self.job.model_copy(update={"cluster": self.job.cluster.model_copy(update={"on_death": "continue"})})
        self.rows = Recorder()
        for rank in range(N):
            self.rows.append("clocks", (0, rank, b"virtual", 0.0, 0.0))
        self.recorder = PeerCoordinator(self.job, self.rows)
        self.mode = mode
        self.weight, self.inbox = [1.0] * N, [[] for _ in range(N)]
        self.iteration = [0] * N
        for round in range(1, ROUNDS + 1):
            for worker in range(N):
                if worker != DEAD or round <= DIES_AT:
                    self.step(worker, round, round > dies + lags[worker])
                elif round <= dies:
                    if n_unrecorded:
                        self.send(DEAD, next(r for r in range(N) if r != DEAD))
                if (worker, round) == (DEAD, dies):
                    self.recorder.left(round + 0.2, DEAD, Change.DIED)
        for worker in sorted({*range(N)} - {DEAD}):
            self.recorder.left(ROUNDS + 2.0, worker)
        for worker in sorted({*range(N)} - {DEAD}):
            if n := self.receive(worker):
                now_s, weight = ROUNDS + 3.0, self.weight[worker]
                rest = StepInfo(worker, ROUNDS, begin_s=now_s, end_s=now_s, n_received=n, weight=weight)
                self.recorder.exchanged(now_s, rest)
        last = self.recorder
        last.evaluated(last.updated_s, last.version, last.samples, 1.0, math.nan, 0.0)

    def step(self, worker: int, round: int, knows: bool) -> None:
        peers = PeerSelection(N, self.job.seed, dead=(DEAD,) if knows else ())
        peer = peers.drawn(worker, round, self.weight[worker])
        n_received = int(peer != worker)
        if self.mode != "pull":
            if peer != worker:
                self.send(worker, peer)
            n_received = self.receive(worker)
        begin_s = round + 0.1 * worker
        n_bytes = BYTES * (peer != worker)
        row = (worker, round, peer, n_bytes, 0.05, 0.0, 0.0, 0.5, BATCH, begin_s, begin_s + 0.05, n_received)
        self.recorder.exchanged(begin_s + 0.06, StepInfo(*row, self.weight[worker]))

    def send(self, worker: int, peer: int) -> None:
        if self.mode == "push-sum":
            self.weight[worker] /= 2
        self.inbox[peer].append(self.weight[worker])

    def receive(self, worker: int) -> int:
        received, self.inbox[worker] = self.inbox[worker], []
        if self.mode == "push-sum":
            self.weight[worker] += sum(received)
        return len(received)

    @property
    def trace(self):
        return in_memory(self.job, self.rows.rows)


PEERS = "peers follow from the job and its seed"
SENT = "as many models are received as sent"
PUSH_SUM = "push-sum weights add up"


@pytest.mark.parametrize("n_unrecorded", [0, 1, 2, 5])
@pytest.mark.parametrize("mode", ["pull", "push", "push-sum"])
def test_survivors_draw_each_other(mode, n_unrecorded):
    """Messages of a dead worker that have not been received are lost."""
    assert failing(Gossip(mode, n_unrecorded=n_unrecorded * (mode != "pull")).trace) == set()


def test_a_dead_worker_has_not_sent_more_than_it_had_time_for():
    trace = Gossip("push-sum", n_unrecorded=5).trace
    row = int(np.flatnonzero(trace.tables["membership"]["change"] == Change.DIED)[0])
    assert failing(edit(trace, "membership", row, now_s=DIES_AT + 1.2)) >= {SENT, PUSH_SUM}
    exchanges = trace.tables["exchanges"]
    last = int(np.flatnonzero(exchanges["n_received"] > 0)[-1])
    for more in (-0.9 * exchanges["weight"][last], 4.0):
        assert PUSH_SUM in failing(edit(trace, "exchanges", last, weight=exchanges["weight"][last] + more))


@pytest.mark.parametrize("mode", ["pull", "push", "push-sum"])
def test_only_dead_workers_are_dropped(mode):
    trace = Gossip(mode).trace
    row = int(np.flatnonzero(trace.tables["membership"]["change"] == Change.DIED)[0])
    assert PEERS in failing(edit(trace, "membership", row, change=Change.LEFT))


def test_no_worker_is_dropped_before_its_death():
    trace = Gossip("pull").trace
    late = edit(trace, "membership", 0, now_s=ROUNDS - 5.0)
    assert PEERS in failing(late)


def test_no_worker_forgets_a_death():
    """Change a row of a worker that knew of the death to the peer that it would have drawn before."""
    gossip = Gossip("pull", lags=(0, 0, 0, 0))
    trace, before = gossip.trace, PeerSelection(N, gossip.job.seed)
    exchanges = trace.tables["exchanges"]
    late = np.flatnonzero((exchanges["now_s"] > DIES_AT + 8) & (exchanges["worker"] == 0))
    row = next(i for i in late if before.drawn(0, int(exchanges["iteration"][i])) == DEAD)
    assert PEERS in failing(edit(trace, "exchanges", row, peer=DEAD))


def test_only_models_sent_to_dead_workers_may_be_missing():
    trace = Gossip("push").trace
    exchanges = trace.tables["exchanges"]
    row = int(np.flatnonzero((exchanges["worker"] == 0) & (exchanges["n_received"] > 1))[0])
    assert failing(edit(trace, "exchanges", row, n_received=exchanges["n_received"][row] - 1)) == {SENT}
    more = edit(trace, "exchanges", row, n_received=exchanges["n_received"][row] + 2)
    assert failing(more) == {SENT}


@pytest.mark.parametrize("lost", [True, False])
def test_weights_shrink_by_those_of_the_dead_and_no_more(lost):
    gossip = Gossip("push-sum")
    trace = gossip.trace
    total = sum(gossip.weight[worker] for worker in range(N) if worker != DEAD)
    assert total < N - 0.5, "without a loss the test shows nothing"
    last = int(np.flatnonzero(trace.tables["exchanges"]["n_received"] > 0)[-1])
    weight = trace.tables["exchanges"]["weight"][last]
    assert PUSH_SUM in failing(edit(trace, "exchanges", last, weight=weight + (-1e-3 if lost else 1e-3)))


def test_a_worker_dies_once():
    trace = Gossip("pull").trace
    twice = with_rows(trace, "membership", trace.tables["membership"][[0, 0, 1, 2, 3]])
    twice.tables["membership"]["seq"] = range(1, 6)
    assert "no worker acts after it leaves" in failing(twice)
