"""Effect of an exchange on the weights of all ranks, against NumPy.

In a round all ranks read, or send, before any of them continues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcsync.config.job import Job
from hpcsync.core.job_validation import optimizer_spec
from hpcsync.core.peer_machine import create_method
from hpcsync.mpi.collectives.model_parts import Layers
from hpcsync.mpi.peer.channel import PeerChannel
from hpcsync.mpi.peer.exchange import Setup
from hpcsync.mpi.peer.session import TRANSPORTS
from hpcsync.paradigms.peer_method import Agreed, ExchangeResult
from hpcsync.training.flat_model import FlatModel
from tests.unit.jobs import make_job

SIZE = 7
SGD = {"name": "sgd", "lr": 0.1}
NESTEROV = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}
MODES = ("pull", "push", "push-sum", "permutation")


def job(n_workers: int, mode: str, optimizer: Any = SGD, **paradigm: Any) -> Job:
    return make_job(
        seed=5,
        workload={"name": "linear"},
        optimizer=optimizer,
        stop={"updates": 1},
        paradigm={"name": "gossip", "mode": mode, **paradigm},
        cluster={"workers": n_workers},
    )


class Worker:
    """This rank as its method sees it, between the rounds that a test makes it carry out."""

    def __init__(self, comm: MPI.Intracomm, job: Job) -> None:
        self._comm = comm
        self.flat = FlatModel(torch.nn.Linear(SIZE, 1, bias=False, dtype=torch.float64))
        self.link = PeerChannel(comm, self.flat.size, self.flat.weights.dtype)
        self.method = create_method(job)
        self.made = TRANSPORTS[self.method.transport](
            Setup(
                job,
                self.method,
                self.link,
                self.flat,
                optimizer_spec(job),
                Layers(comm, self.flat.model),
                lambda: False,
                lambda: None,
            )
        )
        self.worker, self.update = comm.rank, self.made.peer
        self.n_steps, self.agreed = 1, Agreed(comm.size, comm.size, 0, False)
        self.transport = self.made
        collect = self.made.collect

        def collect_what_all_sent(worker: int) -> Any:
            comm.Barrier()
            return collect(worker)

        self.made.collect = collect_what_all_sent  # type: ignore[method-assign]

    def round(self, round: int) -> ExchangeResult:
        """Exchange, without a step, at the same time as all ranks."""
        self._comm.Barrier()
        self.made.publish(round)
        self._comm.Barrier()
        result = self.made.run(self.method.exchange(self, round))
        self._comm.Barrier()
        return result


@contextmanager
def worker(comm: MPI.Intracomm, job: Job) -> Iterator[tuple[Worker, torch.Tensor]]:
    """Yield this rank's worker and its weights."""
    this = Worker(comm, job)
    yield this, this.flat.weights
    comm.Barrier()
    this.made.free()
    this.link.free()


def models(comm: MPI.Intracomm, weights: torch.Tensor) -> np.ndarray:
    return np.array(comm.allgather(weights.numpy().copy()))


def expected(this: Job, x: np.ndarray, round: int) -> np.ndarray:
    peers, n = create_method(this).peers, len(x)
    mode = this.paradigm.mode
    if mode == "permutation":
        after = x.copy()
        for source, target in enumerate(peers.permutation(round)):
            after[target] = (x[target] + x[source]) / 2
        return after
    drawn = [peers.drawn(i, round) for i in range(n)]
    if mode == "pull":
        return np.array([(x[i] + x[drawn[i]]) / 2 for i in range(n)])
    after = []
    for i in range(n):
        come = [x[j] for j in range(n) if drawn[j] == i and j != i]
        own = 2 if drawn[i] == i else 1
        after.append((own * x[i] + sum(come, np.zeros(SIZE))) / (own + len(come)))
    return np.array(after)


class Deaf:
    """Communicator on which no rank waits for the notification of a put."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Recv(self, *_: Any) -> None:
        pass

    def Isend(self, *_: Any) -> MPI.Request:
        return MPI.REQUEST_NULL


@pytest.mark.parametrize("deaf", [False, True])
def test_a_worker_waits_for_the_weights_put_into_its_window(comm, needs, deaf):
    needs(2)
    with worker(comm, job(comm.size, "permutation", include_self=False)) as (mine, weights):
        weights.fill_(comm.rank + 1)
        comm.Barrier()
        hearing = mine.link.comm
        mine.link.comm = Deaf(hearing) if deaf else hearing
        if comm.rank == 0:
            comm.gather(None) if deaf else time.sleep(0.1)
        mine.made.run(mine.method.exchange(mine, 1))
        if comm.rank > 0 and deaf:
            comm.gather(None)
        mine.link.comm = hearing
        comm.Barrier()
        assert (models(comm, weights).sum() == SIZE * comm.size * (comm.size + 1) / 2) != deaf


@pytest.mark.parametrize("topology", ["complete", "ring", "exponential"])
@pytest.mark.parametrize(
    ("mode", "synchronous"),
    [("pull", False), ("pull", True), ("push", False), ("push", True), ("permutation", True)],
)
def test_a_round_follows_from_the_seed(comm, mode, synchronous, topology):
    this = job(comm.size, mode, topology=topology, synchronous=synchronous)
    with worker(comm, this) as (mine, weights):
        weights.copy_(torch.from_numpy(np.random.default_rng(comm.rank).normal(size=SIZE)))
        differed = 0
        for round in range(1, 9):
            before = models(comm, weights)
            mine.round(round)
            after = models(comm, weights)
            np.testing.assert_allclose(after, expected(this, before, round), rtol=1e-13, atol=1e-15)
            differed += not np.allclose(after, expected(this, before, round + 1), rtol=1e-9)
            assert (after >= before.min(0) - 1e-15).all() and (after <= before.max(0) + 1e-15).all(), "convex"
            if mode == "permutation":
                np.testing.assert_allclose(after.mean(0), before.mean(0), rtol=1e-12, atol=1e-15)
        if comm.size > 2 and topology != "ring":
            assert differed > 0, "the test can tell one round from another"


@pytest.mark.parametrize(("mode", "synchronous"), [*((mode, mode == "permutation") for mode in MODES), ("push", True)])
def test_equal_replicas_stay_equal_bit_for_bit(comm, mode, synchronous):
    this = job(comm.size, mode, synchronous=synchronous)
    with worker(comm, this) as (mine, weights):
        start = torch.linspace(0.1, 0.7, SIZE, dtype=torch.float64)
        weights.copy_(start)
        for round in range(1, 9):
            mine.round(round)
            if mode in ("pull", "permutation"):
                assert torch.equal(weights, start)
            else:
                torch.testing.assert_close(weights, start, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("synchronous", [False, True])
def test_push_sum_keeps_both_sums(comm, synchronous):
    this = job(comm.size, "push-sum", include_self=False, synchronous=synchronous)
    with worker(comm, this) as (mine, weights):
        weights.copy_(torch.from_numpy(np.random.default_rng(comm.rank).normal(size=SIZE)))
        mean, biased = models(comm, weights).mean(0), 0
        for round in range(1, 40):
            mine.round(round)
            w = np.array(comm.allgather(mine.update.weight))
            z = models(comm, weights)
            assert w.sum() == comm.size
            np.testing.assert_allclose((w[:, None] * z).sum(0) / comm.size, mean, rtol=1e-9, atol=1e-12)
            biased += not np.allclose(z.mean(0), mean, rtol=1e-6)
        np.testing.assert_allclose(z, np.tile(mean, (comm.size, 1)), rtol=1e-3, atol=1e-3)
        assert comm.size < 3 or biased > 0, "the control: without w the mean is not kept"


@pytest.mark.parametrize("mode", ["pull", "permutation"])
def test_distances_shrink_as_the_formulas_say(comm, needs, mode):
    """A round halves the mean squared distance from the previous mean (drawing oneself included)."""
    needs(3)
    this = job(comm.size, mode)
    rounds, factors = 150, []
    with worker(comm, this) as (mine, weights):
        for round in range(1, rounds + 1):
            weights.copy_(torch.from_numpy(np.random.default_rng([comm.rank, round]).normal(size=SIZE)))
            before = models(comm, weights)
            mine.round(round)
            after = models(comm, weights)
            factors.append(((after - before.mean(0)) ** 2).sum() / ((before - before.mean(0)) ** 2).sum())
    error = np.std(factors) / np.sqrt(rounds)
    assert abs(np.mean(factors) - 0.5) < 4 * error < 0.25


@pytest.mark.parametrize("mode", MODES)
def test_momentum_and_look_ahead_are_not_exchanged(comm, mode):
    """Theta is mixed; gradients are taken at the weights theta + mu v, with the worker's own v."""
    this = job(comm.size, mode, NESTEROV)
    with worker(comm, this) as (mine, weights):
        weights.fill_(float(comm.rank))
        gradient = torch.full((SIZE,), 1.0 + comm.rank, dtype=torch.float64)
        mine.update.step(gradient, 0.1)
        v = -0.1 * gradient
        theta = models(comm, weights - 0.9 * v)
        np.testing.assert_allclose(theta[comm.rank], comm.rank + v.numpy())
        mine.round(1)
        after = models(comm, weights - 0.9 * v)
        if mode == "push-sum":
            w = np.array(comm.allgather(mine.update.weight))[:, None]
            np.testing.assert_allclose((w * after).sum(0), theta.sum(0), rtol=1e-12)
        else:
            np.testing.assert_allclose(after, expected(this, theta, 1), rtol=1e-12)
            mixed_ahead = expected(this, theta + 0.9 * models(comm, v), 1) - 0.9 * models(comm, v)
            if not np.allclose(after, theta):
                assert not np.allclose(after, mixed_ahead), "the control: an exchanged look-ahead"
